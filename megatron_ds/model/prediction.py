"""Multi-token prediction (DeepSeek-V3): what surrounds its transformer layers.

Depth k reads, at each position, the hidden state of depth k - 1 and the embedding of the token k
places ahead, and predicts the token after that.

Shapes: B micro-batch, S sequence, H hidden.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_ds.config import ModelConfig
from megatron_ds.model.declaration.parts import NormSpec, PredictionSpec
from megatron_ds.model.norm import build_norm
from megatron_ds.model.weight_init import Initializer
from megatron_ds.parallel.linear import ReplicatedLinear
from megatron_ds.parallel.mesh import Group
from megatron_ds.parallel.sharding import declared_parameter


class Prediction(nn.Module):
    """The input of a transformer layer, W [norm(embedding); norm(hidden)], and its output's norm.

    Args:
        config: Architecture.
        name: Canonical name.
        group: Tensor-parallel group.
        init: Draws the initial weights.
    """

    def __init__(self, config: ModelConfig, name: str, group: Group, init: Initializer) -> None:
        super().__init__()
        self.is_wide = config.fp32_residual_connection
        norm = NormSpec(config)
        weights = PredictionSpec(config, rows=0).named(name)
        self.embedding_norm = build_norm(norm, f"{name}.embedding_norm", group)
        self.hidden_norm = build_norm(norm, f"{name}.hidden_norm", group)
        self.output_norm = build_norm(norm, f"{name}.output_norm", group)
        projection = declared_parameter(weights["projection.weight"], group, init)
        self.projection = ReplicatedLinear(projection)

    def forward(self, hidden_SBH: Tensor, embedded_SBH: Tensor) -> Tensor:
        parts = self.embedding_norm(embedded_SBH), self.hidden_norm(hidden_SBH)
        x_SBH: Tensor = self.projection(torch.cat(parts, dim=-1))
        return x_SBH.float() if self.is_wide else x_SBH


def ahead(values_BS: Tensor, depth: int, documents_BS: Tensor | None) -> Tensor:
    """Values shifted left by `depth`; 0 past the end of the sample or document.

    Args:
        values_BS: A value of each token.
        depth: Number of positions, at least 1.
        documents_BS: Numbers of the tokens' documents. None: their ends do not matter.
    """
    pad = 0, min(depth, values_BS.shape[1])
    shifted = F.pad(values_BS[:, depth:], pad)
    if documents_BS is None:
        return shifted
    return shifted * (F.pad(documents_BS[:, depth:], pad, value=-1) == documents_BS)
