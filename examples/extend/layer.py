"""Trains with the parallel layers of GPT-J: attention and MLP read the same norm of the input.

torchrun --nproc_per_node 8 examples/extend/layer.py FLAGS OF pretrain_gpt.py
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from megatron_ds.extend import Extensions, pretrain
from megatron_ds.extend.layers import AttentionContext, Block, KeyValueCache, LayerBuilder


class ParallelBlock(Block):
    """x + attention(norm(x)) + mlp(norm(x)), [S, B, H] to [S, B, H] (Wang and Komatsuzaki 2021)."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        del self.mlp_norm

    def forward(
        self, x_SBH: Tensor, context: AttentionContext, cache: KeyValueCache | None = None
    ) -> Tensor:
        normed = self.attention_norm(x_SBH)
        q, k, v = self.attention.project(normed, context.rotation)
        attended = self.attention.attend(q, k, v, context.core)
        sum_SBH: Tensor = x_SBH + self.attention.output(attended) + self.mlp(normed)
        return sum_SBH


def layer(builder: LayerBuilder) -> Block:
    """Builds the layer with the number `builder.layer`; it is sharded as the built-in one is."""
    return builder.block(block_type=ParallelBlock)


if __name__ == "__main__":
    pretrain(Extensions(layer=layer))
