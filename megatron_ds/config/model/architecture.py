"""Options of sizes, norms, the residual stream, the vocabulary and multi-token prediction."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator

from megatron_ds.config.fields import (
    NON_ZERO,
    UNSET_INT,
    Decides,
    InPhase,
    exclusive_problem,
    option_field,
    when,
)
from megatron_ds.config.problems import Problem
from megatron_ds.dataclass import dataclass

_required_size = functools.partial(option_field, UNSET_INT, required=True, minimum=1)
size_field = functools.partial(option_field, None, minimum=1)
"""Declares a size whose default follows from others."""


@dataclass(frozen=True)
class SizesConfig:
    """Sizes of the transformer."""

    num_layers: int = _required_size(aliases=("encoder-num-layers",), common=True)
    """Number of transformer layers."""
    hidden_size: int = _required_size(common=True)
    """Hidden size."""
    num_attention_heads: int = _required_size(common=True)
    """Number of attention heads."""
    kv_channels: int | None = size_field()
    """Dimension of each attention head (default: hidden size / heads)."""
    seq_length: int = _required_size(
        aliases=("encoder-seq-length",),
        common=True,
        decides=Decides.SAMPLES | Decides.FUNCTION,
        in_phase=InPhase.REPLACED,
    )
    """Sequence length in tokens."""

    @property
    def head_dim(self) -> int:
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    @property
    def rotated_dim(self) -> int:
        """Dimensions of a head of which RoPE rotates a fraction."""
        return self.head_dim


@dataclass(frozen=True)
class NormConfig:
    """Normalization."""

    normalization: str = option_field(
        "LayerNorm",
        choices=("LayerNorm", "RMSNorm"),
        synonyms={"layernorm": "LayerNorm", "rmsnorm": "RMSNorm"},
    )
    """Type of normalization."""
    norm_epsilon: float = option_field(1e-5, aliases=("layernorm-epsilon",), above=0)
    """Epsilon of the normalization."""
    apply_layernorm_1p: bool = option_field(False)
    """Norms multiply by 1 + weight; their weights start at 0."""
    embed_layernorm: bool = option_field(False)
    """Normalize the token embedding, before position embeddings are added."""


NORM_POSITIONS = ("before", "after", "both", "reordered")
_multiplier = functools.partial(option_field, 1.0, above=0)


@dataclass(frozen=True)
class ResidualConfig:
    """Residual stream."""

    norm_position: str = option_field("before", choices=NORM_POSITIONS)
    """Norms of attention and MLP f: before is x + f(norm(x)); after, norm(x + f(x)); both, x +
    norm(f(norm(x))); reordered, x + norm(f(x))."""
    parallel_residual: str | None = option_field(None, choices=("separate", "shared"))
    """Attention and MLP both read the input of the layer: separate is x + attention(norm1(x)) +
    mlp(norm2(x)), shared has one norm (default: the MLP reads what attention was added to)."""
    apply_residual_connection_post_layernorm: bool = option_field(False)
    """Add the output of attention and MLP to the norm that they read: norm(x) + f(norm(x))."""
    fp32_residual_connection: bool = option_field(False, decides=Decides.FUNCTION)
    """Keep the hidden states between attention and MLP in fp32, whatever the data type."""
    embedding_multiplier: float = _multiplier()
    """Factor of the embedding's output."""
    residual_multiplier: float = _multiplier()
    """Factor of what attention and MLP add to the hidden states."""
    logits_multiplier: float = _multiplier()
    """Factor of the logits."""

    def residual_problems(self) -> Iterator[Problem]:
        """Check that at most one option changes the form of a layer, and what fp32 needs."""
        reason = "each is another form of the layer"
        forms = {
            "norm_position": self.norm_position != "before",
            "parallel_residual": self.parallel_residual is not None,
            "apply_residual_connection_post_layernorm": (
                self.apply_residual_connection_post_layernorm
            ),
        }
        chosen = [name for name, is_chosen in forms.items() if is_chosen]
        if len(chosen) > 1:
            yield exclusive_problem(*chosen, reason=reason)
        is_norm = self.norm_position == "after" or self.apply_residual_connection_post_layernorm
        if self.fp32_residual_connection and is_norm:
            reason = "what is added to is a norm, in the data type"
            yield exclusive_problem(*chosen[:1], "fp32_residual_connection", reason=reason)


@dataclass(frozen=True)
class VocabularyConfig:
    """Embedding table and output layer."""

    untie_embeddings_and_output_weights: bool = option_field(False)
    """Do not share the weights of embedding and output layer."""
    output_layer_bias: bool = option_field(False)
    """Add a bias to the logits, one for each token id."""
    make_vocab_size_divisible_by: int = option_field(
        128, minimum=1, decides=Decides.INITIAL_VALUES | Decides.LAYOUT
    )
    """Pad the vocabulary to a multiple of this value and of the tensor-parallel size."""
    pad_vocab_size_to: int | None = size_field(
        aliases=("padded-vocab-size",), decides=Decides.INITIAL_VALUES | Decides.LAYOUT
    )
    """Rows of the embedding table, at least the vocabulary size and a multiple of the
    tensor-parallel size; replaces --make-vocab-size-divisible-by."""
    vocab_size: int = option_field(UNSET_INT, minimum=1, decides=Decides.WEIGHTS | Decides.TOKENS)
    """Vocabulary size of NullTokenizer or TikTokenizer (default: the tokenizer's)."""
    softmax_vocab_size: int | None = size_field()
    """Rows of the output layer over which the loss normalizes, if more than the vocabulary: a run
    of Megatron includes its padding (default: the vocabulary; when such a run is continued, the
    rows of its checkpoint)."""
    final_logit_softcapping: float | None = option_field(None, above=0, metavar="CAP")
    """Bound of the logits, CAP x tanh(logit / CAP) (default: no bound)."""
    z_loss_coeff: float = option_field(0.0, minimum=0, decides=Decides.TRAINING)
    """Coefficient of the z-loss, the squared logarithm of the softmax's denominator of each token;
    the logged loss is without it."""

    @property
    def softmax_rows(self) -> int:
        """Rows of the output layer over which the loss normalizes."""
        return max(self.vocab_size, self.softmax_vocab_size or 0)

    def padded_vocab(self, tp_size: int) -> int:
        """Rows of the embedding table.

        All tensor-parallel sizes that divide `make_vocab_size_divisible_by` give the same number.
        """
        unit = math.lcm(self.make_vocab_size_divisible_by, tp_size)
        return -(-self.softmax_rows // unit) * unit

    def padding_problems(self, tp_size: int) -> Iterator[Problem]:
        """Check that the padded vocabulary has room for the vocabulary, as far as it is known."""
        rows = self.pad_vocab_size_to
        if rows and tp_size > 0 and (rows < self.vocab_size or rows % tp_size):
            least = -(-max(rows, self.vocab_size) // tp_size) * tp_size
            yield Problem("padded-vocabulary-misfits", settings=self, tp_size=tp_size, least=least)


@dataclass(frozen=True)
class PredictionConfig:
    """Multi-token prediction."""

    mtp_num_layers: int = option_field(0, minimum=0)
    """Further tokens that training predicts at each position as DeepSeek-V3 does, each by a
    transformer layer of its own."""
    mtp_loss_scaling_factor: float = option_field(
        0.1, minimum=0, only_with=when(mtp_num_layers=NON_ZERO), decides=Decides.TRAINING
    )
    """Factor of the mean of the losses of --mtp-num-layers; the logged loss is without them."""
