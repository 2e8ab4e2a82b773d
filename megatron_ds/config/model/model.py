"""Options of the model."""

from __future__ import annotations

import ast
import functools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megatron_ds.config.checks import divisors, list_numbers, nearest_multiples
from megatron_ds.config.fields import ANY_VALUE, UNSET_INT, option_field, when
from megatron_ds.config.problems import Problem, with_value

GLU_ACTIVATIONS = ("swiglu", "geglu", "reglu", "liglu")
ACTIVATIONS = ("gelu", "openai-gelu", "squared-relu", *GLU_ACTIVATIONS)

MAX_LAYERS = 10_000
"""Largest number in a pattern over layers."""

WINDOW = re.compile(r"\s*[\[(]?\s*(-1|\d+)\s*,\s*(?:-1|\d+)\s*[\])]?\s*")
"""The form of `window_size`."""

ROPE = when(position_embedding_type="rope")

_required_size = functools.partial(option_field, UNSET_INT, required=True, minimum=1)
_size = functools.partial(option_field, None, minimum=1)


@dataclass(frozen=True)
class ModelConfig:
    """Architecture of the transformer."""

    num_layers: int = _required_size(
        "number of transformer layers", aliases=("encoder-num-layers",)
    )
    hidden_size: int = _required_size("hidden size")
    ffn_hidden_size: int | None = _size(
        "hidden size of the MLP (default: 4 x hidden size; with --swiglu the multiple of 64 below "
        "8/3 x hidden size)"
    )
    num_attention_heads: int = _required_size("number of attention heads")
    kv_channels: int | None = _size(
        "dimension of each attention head (default: hidden size / heads)"
    )
    num_query_groups: int | None = _size(
        "number of key-value heads for grouped-query attention (default: --num-attention-heads)",
        aliases=("num-key-value-heads",),
    )
    seq_length: int = _required_size("sequence length in tokens", aliases=("encoder-seq-length",))
    max_position_embeddings: int | None = _size(
        "number of learned position embeddings (default: --seq-length)"
    )
    position_embedding_type: str = option_field(
        "learned_absolute",
        "type of position embedding",
        choices=("learned_absolute", "rope", "alibi", "none"),
        synonyms={"absolute": "learned_absolute", "rotary": "rope"},
    )
    rotary_percent: float = option_field(
        1.0, "fraction of each head that RoPE rotates", above=0, maximum=1, only_with=ROPE
    )
    rotary_base: float = option_field(
        10000.0,
        "base period of RoPE",
        aliases=("rotary-position-embeddings-theta",),
        above=0,
        only_with=ROPE,
    )
    window_size: str | None = option_field(
        None,
        "LEFT,RIGHT: a token attends to itself and LEFT tokens before it, -1 for all; RIGHT has no "
        "effect, because attention is causal (default: all)",
        metavar="LEFT,RIGHT",
    )
    window_attn_skip_freq: str | None = option_field(
        None,
        "layers without the window: N for every N-th layer, counted from 1, or a list with 0 for "
        "these layers and 1 for the others, such as ([1]*3+[0])*4",
        metavar="PATTERN",
        only_with=when(window_size=ANY_VALUE),
    )
    qk_layernorm: bool = option_field(
        False, "normalize the queries and keys of each head, before they are rotated"
    )
    normalization: str = option_field(
        "LayerNorm",
        "type of normalization",
        choices=("LayerNorm", "RMSNorm"),
        synonyms={"layernorm": "LayerNorm", "rmsnorm": "RMSNorm"},
    )
    norm_epsilon: float = option_field(
        1e-5, "epsilon of the normalization", aliases=("layernorm-epsilon",), above=0
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
    untie_embeddings_and_output_weights: bool = option_field(
        False, "do not share the weights of embedding and output layer"
    )
    add_bias_linear: bool = option_field(
        True, "disable bias in the linear layers", flag="disable-bias-linear"
    )
    add_qkv_bias: bool = option_field(
        False,
        "keep bias in the QKV projection with --disable-bias-linear",
        only_with=when(add_bias_linear=False),
    )
    embed_layernorm: bool = option_field(
        False, "normalize the token embedding, before position embeddings are added"
    )
    attention_dropout: float = option_field(
        0.1, "dropout probability of the attention weights", minimum=0, below=1
    )
    hidden_dropout: float = option_field(
        0.1, "dropout probability before each residual addition", minimum=0, below=1
    )
    init_method_std: float = option_field(
        0.02,
        "standard deviation of the initial weights; layers that write to the residual stream use "
        "it / sqrt(2 x layers)",
        minimum=0,
    )
    make_vocab_size_divisible_by: int = option_field(
        128,
        "pad the vocabulary to a multiple of this value and of the tensor-parallel size",
        minimum=1,
    )
    pad_vocab_size_to: int | None = _size(
        "rows of the embedding table, at least the vocabulary size and a multiple of the "
        "tensor-parallel size; replaces --make-vocab-size-divisible-by",
        aliases=("padded-vocab-size",),
    )
    vocab_size: int = option_field(
        UNSET_INT,
        "vocabulary size of NullTokenizer or TikTokenizer (default: the tokenizer's)",
        minimum=1,
    )
    softmax_vocab_size: int | None = _size(
        "rows of the output layer over which the loss normalizes, if more than the vocabulary: a "
        "run of Megatron includes its padding (default: the vocabulary; when such a run is "
        "continued, the rows of its checkpoint)"
    )

    # The following are defined if neither `field_problems` nor `problems` finds anything.

    @property
    def kv_heads(self) -> int:
        return self.num_query_groups or self.num_attention_heads

    @property
    def head_dim(self) -> int:
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    @property
    def window(self) -> int | None:
        """Keys that a token attends to in layers with a window, its own included; None: all."""
        if self.window_size is None:
            return None
        values = WINDOW.fullmatch(self.window_size)
        if values is None:
            raise ValueError
        return None if values[1] == "-1" else int(values[1]) + 1

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each layer."""
        pattern, layers = self.window_attn_skip_freq, range(1, self.num_layers + 1)
        if pattern is None:
            has_window = [1 for _ in layers]
        elif pattern.strip().isdecimal():
            has_window = [layer % int(pattern) for layer in layers]
        else:
            has_window = layer_pattern(pattern)
        return tuple(
            self.window if has else None for _, has in zip(layers, has_window, strict=True)
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
    def softmax_rows(self) -> int:
        """Rows of the output layer over which the loss normalizes."""
        return max(self.vocab_size, self.softmax_vocab_size or 0)

    @property
    def num_positions(self) -> int:
        return self.max_position_embeddings or self.seq_length

    @property
    def qkv_bias(self) -> bool:
        return self.add_bias_linear or self.add_qkv_bias

    @property
    def derived_values(self) -> dict[str, Any]:
        """The fields whose defaults follow from others, with the values that the model uses."""
        has_table = self.position_embedding_type == "learned_absolute"
        return {
            "window_size": None if self.window is None else f"{self.window - 1},0",
            "ffn_hidden_size": self.mlp_hidden_size,
            "kv_channels": self.head_dim,
            "num_query_groups": self.kv_heads,
            "max_position_embeddings": self.num_positions if has_table else None,
            **({"gelu_approximation": self.gelu_kind} if self.activation == "gelu" else {}),
        }

    def padded_vocab(self, tp_size: int) -> int:
        """Rows of the embedding table.

        All tensor-parallel sizes that divide `make_vocab_size_divisible_by` give the same number.
        """
        unit = math.lcm(self.make_vocab_size_divisible_by, tp_size)
        return -(-self.softmax_rows // unit) * unit

    def problems(self, tp_size: int) -> Iterator[Problem]:
        """Check sizes against each other and against the tensor-parallel size."""
        sizes = (
            self.hidden_size,
            self.num_attention_heads,
            *(self.kv_channels, self.num_query_groups, self.ffn_hidden_size),
        )
        if all(size is None or size > 0 for size in sizes):
            yield from self._shape_problems()
            if tp_size > 1:
                yield from _tensor_parallel_problems(self, tp_size)
        yield from self.padding_problems(tp_size)
        yield from self._window_problems()
        if (
            self.position_embedding_type == "learned_absolute"
            and 0 < (self.max_position_embeddings or 0) < self.seq_length
        ):
            yield Problem("sequence-exceeds-position-embeddings", settings=self)

    def padding_problems(self, tp_size: int) -> Iterator[Problem]:
        """Check that the padded vocabulary has room for the vocabulary, as far as it is known."""
        rows = self.pad_vocab_size_to
        if rows and tp_size > 0 and (rows < self.vocab_size or rows % tp_size):
            least = -(-max(rows, self.vocab_size) // tp_size) * tp_size
            yield Problem("padded-vocabulary-misfits", settings=self, tp_size=tp_size, least=least)

    def _shape_problems(self) -> Iterator[Problem]:
        hidden, heads = self.hidden_size, self.num_attention_heads
        if self.kv_channels is None and hidden % heads:
            yield Problem(
                "hidden-size-not-divisible-by-heads",
                settings=self,
                nearest_multiples=nearest_multiples(hidden, heads),
            )
        else:
            yield from self._rope_problems()
        if heads % self.kv_heads:
            yield Problem(
                "heads-not-divisible-by-query-groups",
                settings=self,
                valid=list_numbers(divisors(heads)),
            )

    def _window_problems(self) -> Iterator[Problem]:
        try:
            _ = self.window
        except ValueError:
            return (yield Problem("window-malformed", settings=self))
        try:
            _ = self.windows
        except (ValueError, TypeError, SyntaxError, ZeroDivisionError):
            yield Problem("window-pattern-malformed", settings=self, layers=self.num_layers)

    def _rope_problems(self) -> Iterator[Problem]:
        rotated = int(self.head_dim * self.rotary_percent)
        if self.position_embedding_type == "rope" and (rotated % 2 or rotated <= 0):
            yield Problem(
                "odd-rotary-dimension",
                settings=self,
                head_dim=self.head_dim,
                rotated=rotated,
                nearest_multiples=nearest_multiples(rotated, 2),
            )


def _tensor_parallel_problems(model: ModelConfig, tp_size: int) -> Iterator[Problem]:
    """Check that heads, query groups and MLP divide evenly over tensor-parallel ranks.

    The vocabulary always fits: it is padded to a multiple of the tensor-parallel size.
    """
    valid = [
        size
        for size in divisors(model.num_attention_heads)
        if model.kv_heads % size == 0 and model.mlp_hidden_size % size == 0
    ]
    for name, value in (
        ("num_attention_heads", model.num_attention_heads),
        ("num_query_groups", model.num_query_groups),
        ("ffn_hidden_size", model.mlp_hidden_size),
    ):
        if value is None or value % tp_size == 0:
            continue
        is_derived = getattr(model, name) is None
        origin = f" (from {with_value(model, 'hidden_size')})" if is_derived else ""
        yield Problem(
            "not-divisible-by-tensor-parallel-size",
            name,
            "tensor_model_parallel_size",
            value=value,
            origin=origin,
            tp_size=tp_size,
            nearest_multiples=nearest_multiples(value, tp_size),
            valid=list_numbers(valid),
        )


def layer_pattern(text: str) -> list[int]:
    """A value of each layer, from an expression of lists, sums and repetitions: ([1]*3+[0])*4.

    Raises:
        SyntaxError: If it is no expression.
        TypeError: If its value is no list.
        ValueError: If it has other operations or values.
    """

    def value(node: ast.expr) -> Any:
        match node:
            case ast.Constant(int() as number) if number <= MAX_LAYERS:
                return number
            case ast.List(elements):
                return [value(each) for each in elements]
            case ast.BinOp(left, ast.Add(), right):
                return value(left) + value(right)
            case ast.BinOp(left, ast.Mult(), right):
                return value(left) * value(right)
        raise ValueError

    return [*value(ast.parse(text.strip(), mode="eval").body)]
