"""Declaration of a mixture of experts."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from megatron_ds.config import MoEConfig
from megatron_ds.dataclass import dataclass
from megatron_ds.model.declaration.forward_pass import FP32, Pass
from megatron_ds.model.declaration.parts import FeedForwardSpec, Part
from megatron_ds.parallel.weights import FIXED, Partial, Role, Weight, Width, linear_weights


@dataclass(frozen=True)
class ExpertsSpec(Part):
    """A mixture of experts: a router, and feed-forward layers whose weights are stacked."""

    moe: MoEConfig

    @property
    def regions(self) -> int:  # type: ignore[override]
        return 1 if self.shared is None else 2

    @property
    def expert(self) -> FeedForwardSpec:
        """One of the experts that the router selects."""
        return FeedForwardSpec(self.model, self.moe.moe_latent_size, self.moe.width(self.model))

    @property
    def shared(self) -> FeedForwardSpec | None:
        """The shared experts, one feed-forward layer."""
        width = self.moe.moe_shared_expert_intermediate_size
        return None if width is None else FeedForwardSpec(self.model, width=width)

    def weights(self) -> Iterator[Weight]:
        model = self.model
        moe = self.moe
        hidden = self.model.hidden_size
        bias = moe.moe_router_bias
        std = model.init_method_std
        widths = (FIXED, Width.HIDDEN)
        yield from linear_weights(
            "router", (moe.experts, hidden), None, widths=widths, bias=bias, std=std
        )
        if moe.moe_router_enable_expert_bias:
            yield Weight("router.expert_bias", (moe.experts,), role=Role.STATE)
        for weight in self.expert.weights():
            shard = weight.shard
            yield dataclasses.replace(
                weight,
                name=f"experts.{weight.name}",
                shape=(moe.experts, *weight.shape),
                shard=shard and dataclasses.replace(shard, dim=shard.dim + 1),
                is_stacked=True,
                widths=(FIXED, *weight.widths),
            )
        bias = model.add_bias_linear
        latent = moe.moe_latent_size
        if latent is not None:
            std = model.init_method_std
            latent_hidden = (Width.LATENT, Width.HIDDEN)
            yield from linear_weights(
                "latent_in", (latent, hidden), None, widths=latent_hidden, bias=bias, std=std
            )
            std = self.residual_std
            hidden_latent = (Width.HIDDEN, Width.LATENT)
            yield from linear_weights(
                "latent_out", (hidden, latent), None, widths=hidden_latent, bias=bias, std=std
            )
        if self.shared is not None:
            yield from self.shared.named("shared").values()
        if self.shared is not None and moe.moe_shared_expert_gate:
            yield Weight(
                "shared_gate.weight",
                (1, hidden),
                std=model.init_method_std,
                partial_over=Partial.SEQUENCE,
                widths=(FIXED, Width.HIDDEN),
            )

    def matmul_macs(self, keys: int) -> int:
        """Products of all weights and the selected experts; dropped tokens are counted."""
        unused = self.moe.experts - self.moe.moe_router_topk
        return super().matmul_macs(keys) - unused * self.expert.matmul_macs(keys)

    def describe(self) -> str:
        moe = self.moe
        factor = self.moe.capacity_factor(training=True)
        limit = "dropless" if factor is None else f"capacity factor {factor:g}"
        if factor is not None:
            limit += f" (at least {moe.moe_min_capacity} tokens, by {moe.moe_token_drop_policy})"
        interval = moe.expert_interval
        layers = "every layer" if interval == 1 else f"1 of {interval} layers"
        if moe.moe_layer_freq is not None:
            layers = f"layers {moe.moe_layer_freq}"
        weights = "all experts" if moe.is_pre_softmax else "the selected ones"
        scores = f"softmax over {weights}"
        if moe.moe_router_score_function != "softmax":
            scores = moe.moe_router_score_function
            scores += " and bias" if moe.moe_router_enable_expert_bias else ""
        if moe.moe_router_num_groups is not None:
            scores += f" in {moe.moe_router_group_topk} of {moe.moe_router_num_groups} groups"
        if moe.moe_latent_size is not None:
            layers += f" on {moe.moe_latent_size} latent features"
        if self.shared is not None:
            layers += f", shared {self.shared.describe()}"
        return (
            f"{moe.experts} experts with {self.expert.describe()} in {layers}, top "
            f"{moe.moe_router_topk} with {scores}, {limit}, load-balancing loss x "
            f"{moe.aux_loss_coeff:g}, z-loss x {moe.moe_z_loss_coeff:g}"
        )

    def saved(self, run: Pass) -> int:
        """If every rank receives as many tokens."""
        moe = self.moe
        hidden = self.model.hidden_size
        experts = moe.experts
        topk = moe.moe_router_topk
        latent = moe.moe_latent_size
        rows = run.tokens * topk
        is_half = run.element < FP32
        senders = run.tp_size if run.has_whole_experts else 1  # each has a slice of the tokens
        saved = 2 * rows // senders * (latent or hidden) * run.element + topk * self.expert.inner(
            run
        )
        # The router's logits and probabilities, the logarithms of sums, and the selected ones.
        router = 2 * run.tokens * experts + run.tokens + rows
        if moe.moe_router_score_function == "sigmoid":  # their sums, and what is divided by them
            router += run.tokens * experts + 2 * run.tokens + rows
        if is_half:  # the router's input and weight in fp32
            router += (run.tokens + experts) * hidden
            saved += rows * run.element
        if not is_half or latent or self.shared:  # the complete input
            saved += run.stream
        if moe.moe_input_jitter_eps is not None:
            router += run.tokens * hidden
        if latent is not None:
            saved += run.tokens * latent * run.element
        if self.shared is not None:
            saved += self.shared.inner(run)
            if moe.moe_shared_expert_gate:
                saved += run.residual + run.tokens * run.element
        return saved + run.mask + FP32 * router
