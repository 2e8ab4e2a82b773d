"""Options of the feed-forward layers."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_ds.config.fields import option_field, when
from megatron_ds.config.model.sizes import SizesConfig, size_field

GLU_ACTIVATIONS = ("swiglu", "geglu", "reglu", "liglu")
ACTIVATIONS = ("gelu", "openai-gelu", "squared-relu", *GLU_ACTIVATIONS)


@dataclass(frozen=True)
class FeedForwardConfig(SizesConfig):
    """Feed-forward layers, and bias of the linear layers."""

    ffn_hidden_size: int | None = size_field(
        "hidden size of the MLP (default: 4 x hidden size; with --swiglu the multiple of 64 below "
        "8/3 x hidden size)"
    )
    activation: str = option_field(
        "gelu",
        "activation function of the MLP; the *glu functions are gated: act(gate) * up. Also "
        "--swiglu, --openai-gelu, --squared-relu, --glu-activation X",
        choices=ACTIVATIONS,
    )
    gelu_approximation: str | None = option_field(
        None,
        "approximation of gelu: tanh, as in Megatron's fused kernel, or none (exact, erf); "
        "default: tanh, or none with --disable-bias-linear, with which Megatron has no such kernel",
        choices=("tanh", "none"),
        only_with=when(activation="gelu"),
    )
    add_bias_linear: bool = option_field(
        True, "disable bias in the linear layers", flag="disable-bias-linear"
    )
    add_qkv_bias: bool = option_field(
        False,
        "keep bias in the QKV projection with --disable-bias-linear",
        only_with=when(add_bias_linear=False),
    )

    @property
    def is_gated(self) -> bool:
        return self.activation in GLU_ACTIVATIONS

    @property
    def mlp_hidden_size(self) -> int:
        """`ffn_hidden_size`, or its default. For gated activations the size of one half."""
        if self.ffn_hidden_size is not None:
            return self.ffn_hidden_size
        if self.activation == "swiglu":
            return max(64, 64 * (8 * self.hidden_size // 3 // 64))
        return 4 * self.hidden_size

    @property
    def gelu_kind(self) -> str:
        """`gelu_approximation`, or its default: as in Megatron's kernel for bias and gelu."""
        return self.gelu_approximation or ("tanh" if self.add_bias_linear else "none")

    @property
    def qkv_bias(self) -> bool:
        return self.add_bias_linear or self.add_qkv_bias
