"""The Muon optimizer (Jordan et al. 2024) with AdamW for what is not a hidden matrix."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW

from megatron_ds.config.options.optimizer import MUON_BATCH
from megatron_ds.engine.optimizers.distributed_matrices import DistributedMatrices, MatrixShard

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of the quintic Newton-Schulz iteration; largest slope at zero (Jordan et al.)."""
SMALLEST_NORM = 1e-7
MATRICES = "is_matrix"
"""Key of parameter groups: whether Muon updates the group."""


def orthogonalize(matrices: Tensor, steps: int) -> Tensor:
    """Move the singular values of matrices close to 1: between about 0.7 and 1.2.

    Args:
        matrices: A matrix, or a stack of them [N, rows, columns], in the type of the computation.
        steps: Iterations.
    """
    a, b, c = COEFFICIENTS
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    x = (matrices.mT if is_tall else matrices).reshape(-1, *sorted(matrices.shape[-2:]))
    norms = torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True)
    x = x / norms.clamp(min=SMALLEST_NORM)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if is_tall else x).view(matrices.shape)


SCALES: dict[str, Callable[[int, int], float]] = {
    "spectral": lambda rows, columns: math.sqrt(max(rows, columns)),
    "unit_rms_norm": lambda rows, columns: math.sqrt(rows / columns),
    "shape_scaling": lambda rows, columns: math.sqrt(max(1.0, rows / columns)),
}
"""Factors of an orthogonalized update, by --muon-scale-mode."""


class Muon(AdamW):
    """Orthogonalized momentum for the groups whose key `is_matrix` is true, AdamW for other groups.

        m = momentum m + (1 - momentum) g
        u = orthogonalize(momentum m + (1 - momentum) g), or of m without Nesterov momentum
        w = (1 - lr weight_decay) w - lr scale_factor scale(rows, columns) u

    Gradients are those that DeepSpeed passes to its optimizers: averaged, unscaled and clipped. A
    parameter of several matrices, such as queries, keys and values or the experts of a rank, has
    each of them orthogonalized by itself, with its own scale.

    `attach` must be called before the first step.

    Args:
        params: Parameter groups.
        momentum: Decay rate of the momentum.
        nesterov: Whether the update looks ahead by the gradient.
        steps: Newton-Schulz iterations.
        scale_mode: Key of SCALES.
        scale_factor: Further factor of the update.
        adamw: Arguments of AdamW; its learning rate and weight decay apply to the matrices, too.
    """

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        *,
        momentum: float,
        nesterov: bool,
        steps: int,
        scale_mode: str,
        scale_factor: float,
        **adamw: Any,
    ) -> None:
        super().__init__(params, **adamw)
        for group in self.param_groups:
            group.setdefault(MATRICES, False)
            group["momentum"] = momentum
        self._nesterov, self._steps = nesterov, steps
        self._scale, self._scale_factor = SCALES[scale_mode], scale_factor
        self._matrices: dict[Tensor, DistributedMatrices] = {}

    @property
    def matrix_count(self) -> int:
        """Number of parameters that are orthogonalized."""
        return sum(len(matrices.pieces) for matrices in self._matrices.values())

    def attach(self, matrices: Iterable[DistributedMatrices]) -> None:
        """Give the optimizer the locations of its matrices.

        Args:
            matrices: For each set of tensors that is stepped at once.
        """
        self._matrices = {group.pieces[0].master: group for group in matrices if group.pieces}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        groups = self.param_groups
        self.param_groups = [group for group in groups if not group[MATRICES]]
        try:
            super().step()
        finally:
            self.param_groups = groups
        for group in groups:
            if group[MATRICES] and group["params"]:
                self._step_matrices(group)

    def _step_matrices(self, group: dict[str, Any]) -> None:
        lr, momentum = group["lr"], group["momentum"]
        for master in group["params"]:
            state = self.state[master]
            if not state:
                # AdamW expects a number of steps in every state that is loaded.
                state["step"] = torch.zeros((), dtype=torch.float32)
                state["momentum_buffer"] = torch.zeros_like(master)
            state["step"] += 1
            state["momentum_buffer"].lerp_(master.grad, 1 - momentum)
            master.mul_(1 - lr * group["weight_decay"])

        matrices = self._matrices[group["params"][0]]

        def update_of(piece: MatrixShard) -> Tensor:
            master = piece.master
            average = self.state[master]["momentum_buffer"].view(-1)[piece.place]
            if self._nesterov:
                assert master.grad is not None
                average = master.grad.view(-1)[piece.place].lerp(average, momentum)
            return matrices.prepare(average)

        for piece, update in matrices.map(update_of, self._orthogonalize):
            weights = piece.master.view(-1)[piece.place]
            weights.add_(update.to(weights), alpha=-lr)

    def _orthogonalize(self, shards: list[Tensor], pieces: Sequence[MatrixShard]) -> list[Tensor]:
        """The scaled update of each matrix that the parameters stack or fuse.

        Matrices of one shape are computed together: one of a small model does not fill a device.
        """
        updates = [torch.empty_like(shard) for shard in shards]
        by_shape: dict[tuple[int, ...], list[tuple[Tensor, Tensor]]] = {}
        for shard, update, piece in zip(shards, updates, pieces, strict=True):
            sizes = piece.sections or (shard.shape[-2],)
            for pair in zip(shard.split(sizes, -2), update.split(sizes, -2), strict=True):
                stacks = (tensor.reshape(-1, *tensor.shape[-2:]) for tensor in pair)
                by_shape.setdefault(pair[0].shape[-2:], []).extend(zip(*stacks, strict=True))
        for shape, pairs in by_shape.items():
            scale = self._scale_factor * self._scale(*shape)
            count = max(1, MUON_BATCH // math.prod(shape))
            for start in range(0, len(pairs), count):
                matrices, results = zip(*pairs[start : start + count], strict=True)
                values = orthogonalize(torch.stack(matrices), self._steps).mul_(scale)
                torch._foreach_copy_(results, list(values))
        return updates
