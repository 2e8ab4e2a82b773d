"""Options of mixture of experts."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

from megatron_ds.config.checks import divisors, list_numbers
from megatron_ds.config.fields import ABOVE_ONE, Condition, option_field, when
from megatron_ds.config.problems import Problem

EXPERTS = when(num_experts=ABOVE_ONE)
DROPPING = (EXPERTS, Condition({"moe_token_dropping": (True,)}, without_flags=True))

_of_experts = functools.partial(option_field, only_with=EXPERTS)
_of_dropping = functools.partial(option_field, only_with=DROPPING)


@dataclass(frozen=True)
class MoEConfig:
    """Mixture of experts: a router sends each token to a few of the feed-forward networks."""

    num_experts: tuple[int, ...] = option_field(
        (1,),
        "number of experts in each mixture-of-experts layer; 0 and 1: a dense model",
        nargs="*",
        minimum=0,
    )
    expert_interval: int = _of_experts(
        1, "every N-th layer has experts, counted from 1; the others are dense", minimum=1
    )
    moe_router_topk: int = _of_experts(
        2, "number of experts of each token", aliases=("topk",), minimum=1
    )
    moe_router_pre_softmax: bool = _of_experts(
        False,
        "weigh the selected experts by their probabilities among all experts, not among the "
        "selected ones; always so with one expert per token",
    )
    moe_router_load_balancing_type: str = _of_experts(
        "aux_loss",
        "how the router learns to use all experts: aux_loss adds the auxiliary loss",
        choices=("aux_loss", "none"),
    )
    moe_aux_loss_coeff: float = option_field(
        0.0,
        "coefficient of the load-balancing loss (Switch Transformer), summed over the layers",
        aliases=("moe-loss-coeff",),
        minimum=0,
        only_with=(EXPERTS, when(moe_router_load_balancing_type="aux_loss")),
    )
    moe_z_loss_coeff: float = _of_experts(
        0.0,
        "coefficient of the router's z-loss, the squared log of the softmax's denominator",
        minimum=0,
    )
    moe_expert_capacity_factor: float | None = _of_dropping(
        None,
        "tokens that an expert accepts of a micro-batch, relative to an equal distribution; "
        "further tokens skip the expert (default: no limit)",
        aliases=("moe-train-capacity-factor",),
        above=0,
    )
    moe_eval_capacity_factor: float | None = _of_dropping(
        None, "the same in evaluation (default: --moe-expert-capacity-factor)", above=0
    )
    moe_min_capacity: int = _of_dropping(0, "least capacity of an expert, in tokens", minimum=0)
    moe_token_drop_policy: str = _of_dropping(
        "probs",
        "tokens that an expert with too many keeps: those of highest probability, or the first",
        choices=("probs", "position"),
    )
    moe_token_dropping: bool = _of_experts(
        True,
        "experts accept all tokens, whatever the capacity factors",
        flag="disable-moe-token-dropping",
    )

    @property
    def experts(self) -> int:
        """Experts of each mixture-of-experts layer; 1 in a dense model."""
        return max(1, *self.num_experts)

    @property
    def is_used(self) -> bool:
        return self.experts > 1

    def has_experts(self, layer: int) -> bool:
        """Whether a layer, counted from 0, is a mixture of experts."""
        return self.is_used and (layer + 1) % self.expert_interval == 0

    @property
    def is_pre_softmax(self) -> bool:
        """Whether softmax precedes the selection; after it, one expert's probability would be 1."""
        return self.moe_router_pre_softmax or self.moe_router_topk == 1

    @property
    def aux_loss_coeff(self) -> float:
        """Coefficient of the load-balancing loss in effect."""
        is_balanced = self.moe_router_load_balancing_type == "aux_loss"
        return self.moe_aux_loss_coeff if is_balanced else 0.0

    def capacity_factor(self, *, training: bool) -> float | None:
        """The capacity factor in effect; None if experts accept all tokens."""
        if not self.moe_token_dropping:
            return None
        if not training and self.moe_eval_capacity_factor is not None:
            return self.moe_eval_capacity_factor
        return self.moe_expert_capacity_factor

    def problems(self, num_layers: int, ep_size: int) -> Iterator[Problem]:
        if len(set(self.num_experts)) > 1:
            yield Problem("numbers-of-experts-differ", settings=self)
        if not self.is_used:
            return
        if self.moe_router_topk > self.experts:
            yield Problem("topk-exceeds-experts", settings=self)
        if 0 < num_layers < self.expert_interval:
            yield Problem("no-layer-has-experts", settings=self, num_layers=num_layers)
        if ep_size > 0 and self.experts % ep_size:
            yield Problem(
                "experts-not-divisible-by-expert-parallel-size",
                experts=self.experts,
                ep_size=ep_size,
                valid=list_numbers(divisors(self.experts)),
            )
