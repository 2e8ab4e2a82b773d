"""A forward pass, as declarations of parts need to know it to tell what they save."""

from __future__ import annotations

from megatron_ds.config import ModelConfig
from megatron_ds.dataclass import dataclass

FP32 = 4
"""Bytes of an element in fp32."""


@dataclass(frozen=True)
class Pass:
    """A training forward pass of one rank, as far as it determines what is saved for the backward
    pass."""

    model: ModelConfig
    tokens: int
    """Tokens of a micro-batch on this rank."""
    element: int
    """Bytes of an element of the activations."""
    tp_size: int
    ulysses_size: int
    """Sequence-parallel size of DeepSpeed-Ulysses."""
    shards: int
    """Ranks that share what is stored between the layers."""
    on_cpu: bool
    saves_core: bool
    """Whether the attention core is not recomputed."""
    is_per_document: bool
    """Whether attention runs document by document."""
    has_tiles: bool
    """Whether feed-forward layers are computed in tiles."""
    has_whole_experts: bool = False
    """Whether tensor-parallel ranks have different experts."""

    @property
    def stream(self) -> int:
        """Bytes of the hidden states of all tokens."""
        return self.tokens * self.model.hidden_size * self.element

    @property
    def residual(self) -> int:
        """Bytes of this rank's hidden states, in the type of the activations."""
        return self.stream // self.shards

    @property
    def between(self) -> int:
        """Bytes of the hidden states between the layers."""
        element = FP32 if self.model.fp32_residual_connection else self.element
        return self.residual // self.element * element

    @property
    def mask(self) -> int:
        """Bytes of a mask of dropout over them: in the data type on a CPU, else one each."""
        size = self.residual if self.on_cpu else self.residual // self.element
        return size if self.model.hidden_dropout > 0 else 0
