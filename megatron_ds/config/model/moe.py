"""Options of mixture of experts."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from megatron_ds.config.checks import divisors, list_numbers, nearest_multiples
from megatron_ds.config.fields import ABOVE_ONE, ANY_VALUE, Condition, option_field, when
from megatron_ds.config.model.layer_pattern import layer_pattern
from megatron_ds.config.model.model import ModelConfig
from megatron_ds.config.problems import Problem

EXPERTS = when(num_experts=ABOVE_ONE)
WITHOUT_PATTERN = Condition({"moe_layer_freq": (None,)}, without_flags=True)
BALANCED = when(moe_router_load_balancing_type=("aux_loss", "seq_aux_loss", "global_aux_loss"))
SHARED = when(moe_shared_expert_intermediate_size=ANY_VALUE)
DROPPING = (EXPERTS, Condition({"moe_token_dropping": (True,)}, without_flags=True))

_of_experts = functools.partial(option_field, only_with=EXPERTS)
_of_dropping = functools.partial(option_field, only_with=DROPPING)
_size = functools.partial(_of_experts, None, minimum=1)


@dataclass(frozen=True)
class MoEConfig:
    """Mixture of experts: a router sends each token to a few of the feed-forward networks."""

    num_experts: tuple[int, ...] = option_field((1,), nargs="*", minimum=0)
    expert_interval: int = option_field(1, minimum=1, only_with=(EXPERTS, WITHOUT_PATTERN))
    moe_layer_freq: str | None = _of_experts(None, metavar="PATTERN")
    moe_ffn_hidden_size: int | None = _size()
    moe_latent_size: int | None = _size()
    moe_shared_expert_intermediate_size: int | None = _size()
    moe_shared_expert_gate: bool = option_field(False, only_with=(EXPERTS, SHARED))
    moe_router_topk: int = _of_experts(2, aliases=("topk",), minimum=1)
    moe_router_pre_softmax: bool = _of_experts(False)
    moe_router_bias: bool = _of_experts(False)
    moe_router_score_function: str = _of_experts("softmax", choices=("softmax", "sigmoid"))
    moe_router_enable_expert_bias: bool = _of_experts(False)
    moe_router_bias_update_rate: float = option_field(
        1e-3, minimum=0, only_with=(EXPERTS, when(moe_router_enable_expert_bias=True))
    )
    moe_router_topk_scaling_factor: float | None = _of_experts(None, above=0)
    moe_router_num_groups: int | None = _size()
    moe_router_group_topk: int | None = option_field(
        None, minimum=1, only_with=(EXPERTS, when(moe_router_num_groups=ANY_VALUE))
    )
    moe_router_dtype: str = _of_experts("fp32", choices=("fp32", "fp64"))
    moe_input_jitter_eps: float | None = _of_experts(None, above=0, below=1, metavar="EPS")
    moe_router_force_load_balancing: bool = _of_experts(False)
    moe_router_load_balancing_type: str = _of_experts(
        "aux_loss", choices=("aux_loss", "seq_aux_loss", "global_aux_loss", "none")
    )
    moe_aux_loss_coeff: float = option_field(
        0.0, aliases=("moe-loss-coeff",), minimum=0, only_with=(EXPERTS, BALANCED)
    )
    moe_z_loss_coeff: float = _of_experts(0.0, minimum=0)
    moe_expert_capacity_factor: float | None = _of_dropping(
        None, aliases=("moe-train-capacity-factor",), above=0
    )
    moe_eval_capacity_factor: float | None = _of_dropping(None, above=0)
    moe_min_capacity: int = _of_dropping(0, minimum=0)
    moe_token_drop_policy: str = _of_dropping("probs", choices=("probs", "position"))
    moe_token_dropping: bool = _of_experts(True, flag="disable-moe-token-dropping")

    @property
    def experts(self) -> int:
        """Experts of each mixture-of-experts layer; 1 in a dense model."""
        return max(1, *self.num_experts)

    @property
    def is_used(self) -> bool:
        return self.experts > 1

    def has_experts(self, layer: int) -> bool:
        """Whether a layer, counted from 0, is a mixture of experts."""
        if not self.is_used or self.moe_layer_freq is None:
            return self.is_used and (layer + 1) % self.expert_interval == 0
        pattern = _pattern(self.moe_layer_freq)
        return layer % pattern == 0 if isinstance(pattern, int) else bool(pattern[layer])

    def width(self, model: ModelConfig) -> int:
        """Hidden size of an expert."""
        return self.moe_ffn_hidden_size or model.mlp_hidden_size

    @property
    def is_pre_softmax(self) -> bool:
        """Whether softmax precedes the selection; after it, one expert's probability would be 1."""
        return self.moe_router_pre_softmax or self.moe_router_topk == 1

    @property
    def aux_loss_coeff(self) -> float:
        """Coefficient of the load-balancing loss in effect."""
        return self.moe_aux_loss_coeff if BALANCED.holds(self) else 0.0

    @property
    def balances_replicas(self) -> bool:
        """Whether the auxiliary loss balances the micro-batches of all replicas together."""
        balancing = self.moe_router_load_balancing_type
        return self.is_used and balancing == "global_aux_loss" and self.aux_loss_coeff > 0

    def capacity_factor(self, *, training: bool) -> float | None:
        """The capacity factor in effect; None if experts accept all tokens."""
        if not self.moe_token_dropping:
            return None
        if not training and self.moe_eval_capacity_factor is not None:
            return self.moe_eval_capacity_factor
        return self.moe_expert_capacity_factor

    def problems(self, model: ModelConfig, tp_size: int, ep_size: int) -> Iterator[Problem]:
        if len(set(self.num_experts)) > 1:
            yield Problem("numbers-of-experts-differ", settings=self)
        if not self.is_used:
            return
        if self.moe_router_topk > self.experts:
            yield Problem("topk-exceeds-experts", settings=self)
        if self.moe_router_enable_expert_bias and self.moe_router_score_function != "sigmoid":
            yield Problem("expert-bias-without-sigmoid", settings=self)
        yield from self._pattern_problems(model.num_layers)
        yield from self._group_problems()
        if ep_size > 0 and self.experts % ep_size:
            yield Problem(
                "experts-not-divisible-by-expert-parallel-size",
                experts=self.experts,
                ep_size=ep_size,
                valid=list_numbers(divisors(self.experts)),
            )
        for name in ("moe_ffn_hidden_size", "moe_shared_expert_intermediate_size"):
            if tp_size > 1 and (size := getattr(self, name) or 0) % tp_size:
                yield Problem(
                    "not-divisible-by-tensor-parallel-size",
                    *(name, "tensor_model_parallel_size"),
                    value=size,
                    origin="",
                    tp_size=tp_size,
                    nearest_multiples=nearest_multiples(size, tp_size),
                    valid=list_numbers(divisors(size)),
                )

    def _pattern_problems(self, num_layers: int) -> Iterator[Problem]:
        """Check which layers have experts."""
        try:
            pattern = 1 if self.moe_layer_freq is None else _pattern(self.moe_layer_freq)
            is_valid = pattern > 0 if isinstance(pattern, int) else len(pattern) == num_layers
        except (ValueError, TypeError, SyntaxError):
            is_valid = False
        if not is_valid:
            yield Problem("expert-pattern-malformed", settings=self, layers=num_layers)
        elif num_layers > 0 and not any(map(self.has_experts, range(num_layers))):
            yield Problem("no-layer-has-experts", num_layers=num_layers)

    def _group_problems(self) -> Iterator[Problem]:
        """Check that a token's experts are in as many groups as it may use."""
        groups, chosen = self.moe_router_num_groups, self.moe_router_group_topk
        if groups is None:
            return
        size, remainder = divmod(self.experts, groups)
        share = self.moe_router_topk / (chosen or math.inf)
        if remainder or (chosen or 0) > groups or not 1 <= share <= size:
            shown = "(not given)" if chosen is None else chosen
            yield Problem("expert-groups-misfit", settings=self, chosen=shown, experts=self.experts)


@functools.cache
def _pattern(text: str) -> int | list[int]:
    """The interval of layers with experts, or 1 for each such layer."""
    return int(text) if text.strip().isdecimal() else layer_pattern(text)
