"""Options of the model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron_ds.config.checks import divisors, list_numbers, nearest_multiples
from megatron_ds.config.fields import Decides, exclusive_problem, option_field
from megatron_ds.config.model.architecture import (
    NormConfig,
    PredictionConfig,
    ResidualConfig,
    VocabularyConfig,
)
from megatron_ds.config.model.attention import AttentionConfig, PositionConfig
from megatron_ds.config.model.feed_forward import FeedForwardConfig
from megatron_ds.config.model.layer_pattern import pattern_of
from megatron_ds.config.model.transfer import TransferConfig
from megatron_ds.config.problems import Problem, with_value
from megatron_ds.dataclass import dataclass


# Each base is a group of --help. The groups are in reverse order, as the fields of bases are.
@dataclass(frozen=True)
class ModelConfig(
    TransferConfig,
    PredictionConfig,
    VocabularyConfig,
    FeedForwardConfig,
    ResidualConfig,
    NormConfig,
    PositionConfig,
    AttentionConfig,
):
    """Architecture of the transformer."""

    DECIDES = Decides.WEIGHTS

    hidden_dropout: float = option_field(0.1, minimum=0, below=1, decides=Decides.TRAINING)
    """Dropout probability before each residual addition."""
    init_method_std: float = option_field(0.02, minimum=0, decides=Decides.INITIAL_VALUES)
    """Standard deviation of the initial weights; layers that write to the residual stream use it /
    sqrt(2 x layers)."""
    embedding_init_method_std: float | None = option_field(
        None, minimum=0, decides=Decides.INITIAL_VALUES
    )
    """Standard deviation of the initial embeddings, of words and of positions (default: as of other
    weights)."""
    init_method_xavier_uniform: bool = option_field(False, decides=Decides.INITIAL_VALUES)
    """Draw initial matrices [out, in] uniformly between the signs of sqrt(6 / (out + in)), those
    that write to the residual stream, too."""

    # The following are defined if neither `field_problems` nor `problems` finds anything.

    @property
    def derived_values(self) -> dict[str, Any]:
        """The fields whose defaults follow from others, with the values that the model uses."""
        has_length = self.position_embedding_type == "learned_absolute" or (
            self.rope_ntk_factor is not None and self.position_embedding_type == "rope"
        )
        pattern = self.window_pattern
        return {
            "window_size": None if pattern is None else f"{(self.window or 0) - 1},0",
            "window_attn_skip_freq": pattern if pattern and "0" in pattern else None,
            "ffn_hidden_size": self.mlp_hidden_size,
            "kv_channels": self.head_dim,
            "num_query_groups": self.kv_heads,
            "max_position_embeddings": self.num_positions if has_length else None,
            **{name: pattern_of(layers) for name, layers in self.rope_layers.items()},
            **({"gelu_approximation": self.gelu_kind} if self.has_gelu else {}),
        }

    def problems(self, tp_size: int) -> Iterator[Problem]:
        """Check sizes against each other and against the tensor-parallel size."""
        sizes = (
            self.hidden_size,
            self.num_attention_heads,
            self.kv_channels,
            self.num_query_groups,
            self.ffn_hidden_size,
        )
        if all(size is None or size > 0 for size in sizes):
            yield from self._shape_problems()
            if tp_size > 1:
                yield from _tensor_parallel_problems(self, tp_size)
        yield from self.padding_problems(tp_size)
        yield from self.attention_problems()
        yield from self.residual_problems()
        yield from self.position_problems()
        yield from self.transfer_problems()
        if self.use_mup and self.init_method_xavier_uniform:
            reason = "muP sets the deviations of the initial weights"
            yield exclusive_problem("init_method_xavier_uniform", "use_mup", reason=reason)

    def _shape_problems(self) -> Iterator[Problem]:
        hidden = self.hidden_size
        heads = self.num_attention_heads
        has_latents = self.multi_latent_attention
        if self.kv_channels is None and hidden % heads and not has_latents:
            yield Problem(
                "hidden-size-not-divisible-by-heads",
                settings=self,
                nearest_multiples=nearest_multiples(hidden, heads),
            )
        else:
            yield from self.rope_problems()
        if heads % self.kv_heads:
            yield Problem(
                "heads-not-divisible-by-query-groups",
                settings=self,
                valid=list_numbers(divisors(heads)),
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
