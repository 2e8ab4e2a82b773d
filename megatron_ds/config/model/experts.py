"""Options of mixture of experts."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator

from megatron_ds.config.checks import divisors, list_numbers, nearest_multiples
from megatron_ds.config.fields import ABOVE_ONE, ANY_VALUE, Condition, Decides, option_field, when
from megatron_ds.config.model.layer_pattern import layer_pattern
from megatron_ds.config.model.model import ModelConfig
from megatron_ds.config.problems import Problem
from megatron_ds.dataclass import dataclass

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

    DECIDES = Decides.WEIGHTS

    num_experts: tuple[int, ...] = option_field((1,), nargs="*", minimum=0)
    """Number of experts in each mixture-of-experts layer; 0 and 1: a dense model."""
    expert_interval: int = option_field(1, minimum=1, only_with=(EXPERTS, WITHOUT_PATTERN))
    """Every N-th layer has experts, counted from 1; the others are dense."""
    moe_layer_freq: str | None = _of_experts(None, metavar="PATTERN")
    """Layers with experts: N for the first and every N-th after it, or a list with 1 for these
    layers and 0 for dense ones, such as [0]*3+[1]*58 (default: --expert-interval)."""
    moe_ffn_hidden_size: int | None = _size()
    """Hidden size of an expert (default: --ffn-hidden-size)."""
    moe_latent_size: int | None = _size()
    """Size to which tokens are projected before they are sent to their experts, whose outputs are
    projected back (default: experts read and write the hidden size)."""
    moe_shared_expert_intermediate_size: int | None = _size()
    """Hidden size of all shared experts together: one feed-forward layer for all tokens, whose
    output is added to the selected experts' (default: none)."""
    moe_shared_expert_gate: bool = option_field(False, only_with=(EXPERTS, SHARED))
    """Multiply the shared experts' output by the sigmoid of a learned projection of the token."""
    moe_router_topk: int = _of_experts(2, aliases=("topk",), minimum=1)
    """Number of experts of each token."""
    moe_router_pre_softmax: bool = _of_experts(False)
    """Weigh the selected experts by their probabilities among all experts, not among the selected
    ones; always so with one expert per token."""
    moe_router_bias: bool = _of_experts(False)
    """Add a learned bias of each expert to the router's logits."""
    moe_router_score_function: str = _of_experts("softmax", choices=("softmax", "sigmoid"))
    """Scores of a token's experts: softmax of the router's logits, or sigmoid of each, by which
    experts are selected and weighed after division by the selected ones' sum."""
    moe_router_enable_expert_bias: bool = _of_experts(False)
    """Select experts by sigmoid scores plus a bias of each expert, which is no parameter: after
    each step it grows or shrinks by --moe-router-bias-update-rate, for experts with fewer or more
    tokens than the mean."""
    moe_router_bias_update_rate: float = option_field(
        1e-3,
        minimum=0,
        only_with=(EXPERTS, when(moe_router_enable_expert_bias=True)),
        decides=Decides.TRAINING,
    )
    """Change of an expert's bias in a step."""
    moe_router_topk_scaling_factor: float | None = _of_experts(None, above=0)
    """Factor of the weights of the selected experts (default: 1)."""
    moe_router_num_groups: int | None = _size()
    """Number of groups of experts, of which a token uses --moe-router-group-topk."""
    moe_router_group_topk: int | None = option_field(
        None, minimum=1, only_with=(EXPERTS, when(moe_router_num_groups=ANY_VALUE))
    )
    """Number of groups that a token's experts are in: those with the largest sum of their best topk
    / groups scores."""
    moe_router_dtype: str = _of_experts("fp32", choices=("fp32", "fp64"), decides=Decides.FUNCTION)
    """Data type of the router's logits and weights."""
    moe_input_jitter_eps: float | None = _of_experts(
        None, above=0, below=1, metavar="EPS", decides=Decides.TRAINING
    )
    """Multiply the router's input by random factors within 1 - EPS and 1 + EPS in training."""
    moe_router_force_load_balancing: bool = _of_experts(False, decides=Decides.FUNCTION)
    """Route by random scores, to measure the speed of balanced experts."""
    moe_router_load_balancing_type: str = _of_experts(
        "aux_loss",
        choices=("aux_loss", "seq_aux_loss", "global_aux_loss", "none"),
        decides=Decides.TRAINING,
    )
    """What the auxiliary loss balances: the experts of a micro-batch (aux_loss), of each sequence
    (seq_aux_loss), or of the global batch so far (global_aux_loss); none: no loss."""
    moe_aux_loss_coeff: float = option_field(
        0.0,
        aliases=("moe-loss-coeff",),
        minimum=0,
        only_with=(EXPERTS, BALANCED),
        decides=Decides.TRAINING,
    )
    """Coefficient of the load-balancing loss (Switch Transformer), summed over the layers."""
    moe_z_loss_coeff: float = _of_experts(0.0, minimum=0, decides=Decides.TRAINING)
    """Coefficient of the router's z-loss, the squared log of the softmax's denominator."""
    moe_expert_capacity_factor: float | None = _of_dropping(
        None, aliases=("moe-train-capacity-factor",), above=0, decides=Decides.FUNCTION
    )
    """Tokens that an expert accepts of a micro-batch, relative to an equal distribution; further
    tokens skip the expert (default: no limit)."""
    moe_eval_capacity_factor: float | None = _of_dropping(None, above=0, decides=Decides.FUNCTION)
    """The same in evaluation (default: --moe-expert-capacity-factor)."""
    moe_min_capacity: int = _of_dropping(0, minimum=0, decides=Decides.FUNCTION)
    """Least capacity of an expert, in tokens."""
    moe_token_drop_policy: str = _of_dropping(
        "probs", choices=("probs", "position"), decides=Decides.FUNCTION
    )
    """Tokens that an expert with too many keeps: those of highest probability, or the first."""
    moe_token_dropping: bool = _of_experts(
        True, flag="disable-moe-token-dropping", decides=Decides.FUNCTION
    )
    """`--disable-moe-token-dropping`: experts accept all tokens, whatever the capacity factors."""

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
            return self.is_used and (layer + 1) % max(1, self.expert_interval) == 0
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
                    name,
                    "tensor_model_parallel_size",
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
        groups = self.moe_router_num_groups
        chosen = self.moe_router_group_topk
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
