"""Options of the feed-forward layers."""

from __future__ import annotations

from megatron_ds.config.fields import Condition, option_field, when
from megatron_ds.config.model.architecture import SizesConfig, size_field
from megatron_ds.dataclass import dataclass

GLU_ACTIVATIONS = ("swiglu", "geglu", "quick-geglu", "reglu", "liglu")
ACTIVATIONS = ("gelu", "openai-gelu", "squared-relu", *GLU_ACTIVATIONS)


@dataclass(frozen=True)
class FeedForwardConfig(SizesConfig):
    """Feed-forward layers, and bias of the linear layers."""

    ffn_hidden_size: int | None = size_field()
    """Hidden size of the MLP (default: 4 x hidden size; with --swiglu the multiple of 64 below 8/3
    x hidden size)."""
    activation: str = option_field("gelu", choices=ACTIVATIONS)
    """Activation function of the MLP; the *glu functions are gated: act(gate) * up. Also --swiglu,
    --openai-gelu, --squared-relu, --quick-geglu, --glu-activation X."""
    gelu_approximation: str | None = option_field(
        None, choices=("tanh", "none"), only_with=when(activation=("gelu", "geglu"))
    )
    """Approximation of gelu: tanh, as in Megatron's fused kernel, or none (exact, erf); default:
    tanh, or none with --disable-bias-linear, with which Megatron has no such kernel, and with
    geglu."""
    activation_func_clamp_value: float | None = option_field(
        None, above=0, only_with=when(activation=GLU_ACTIVATIONS)
    )
    """Gated activations: largest value of the gate before the function, and largest absolute value
    of what it multiplies (default: no limit)."""
    glu_linear_offset: float = option_field(0.0, only_with=when(activation=GLU_ACTIVATIONS))
    """Gated activations: offset of what the gate multiplies, act(gate) * (up + offset)."""
    add_bias_linear: bool = option_field(True, flag="disable-bias-linear")
    """`--disable-bias-linear`: disable bias in the linear layers."""
    add_attention_bias: bool = option_field(
        True,
        flag="disable-attention-bias",
        only_with=Condition({"add_bias_linear": (True,)}, without_flags=True),
    )
    """`--disable-attention-bias`: no bias in the projections of attention, with one in the MLP."""
    add_qkv_bias: bool = option_field(False, only_with=when(add_bias_linear=False))
    """Keep bias in the QKV projection with --disable-bias-linear."""

    @property
    def is_gated(self) -> bool:
        return self.activation in GLU_ACTIVATIONS

    @property
    def has_gelu(self) -> bool:
        return self.activation in ("gelu", "geglu")

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
        has_kernel = self.add_bias_linear and self.activation != "geglu"
        return self.gelu_approximation or ("tanh" if has_kernel else "none")

    @property
    def activation_arguments(self) -> tuple[str, str, float | None, float]:
        """Activation function, kind of gelu, limit and offset of a gated one."""
        limits = self.activation_func_clamp_value, self.glu_linear_offset
        return self.activation, self.gelu_kind, *(limits if self.is_gated else (None, 0.0))

    @property
    def attention_bias(self) -> bool:
        return self.add_bias_linear and self.add_attention_bias

    @property
    def qkv_bias(self) -> bool:
        return self.attention_bias if self.add_bias_linear else self.add_qkv_bias
