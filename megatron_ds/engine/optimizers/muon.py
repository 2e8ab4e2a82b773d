"""The Muon optimizer (Jordan et al. 2024) with AdamW for what is not a hidden matrix."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, cycle, islice, repeat
from typing import Any

import torch
from torch import Tensor

from megatron_ds.engine.optimizers.distributed_matrices import MatrixShard
from megatron_ds.engine.optimizers.matrix_optimizer import MatrixOptimizer, Rows

Coefficients = tuple[float, float, float]
COEFFICIENTS: dict[str, tuple[Coefficients, ...]] = {
    # The author's, with the largest slope at zero.
    "simple": ((3.4445, -4.7750, 2.0315),),
    # Those of Megatron's default, one for each of five iterations (Cesista et al. 2025).
    "quintic": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
    # The best polynomial for each iteration (Amsel et al. 2025, the last for all further ones).
    "polar_express": (
        (8.28721201814563, -23.595886519098837, 17.300387312530933),
        (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
        (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
        (3.3184196573706015, -2.488488024314874, 0.51004894012372),
        (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
        (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
        (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
        (1.875, -1.25, 0.375),
    ),
}
"""Coefficients (a, b, c) of the Newton-Schulz iterations x <- a x + b (x x^T) x + c (x x^T)^2 x, in
order, by --muon-coefficient-type."""
SAFETY = 1.01
"""Factor by which Polar Express shrinks singular values against rounding errors."""
SMALLEST_NORM = 1e-7
NEURON_EPSILON = 1e-8


def iterations(coefficient_type: str, steps: int) -> list[Coefficients]:
    """The coefficients of each Newton-Schulz iteration, by --muon-coefficient-type."""
    if coefficient_type != "polar_express":
        return list(islice(cycle(COEFFICIENTS[coefficient_type]), steps))
    *first, last = COEFFICIENTS[coefficient_type]
    safe = [(a / SAFETY, b / SAFETY**3, c / SAFETY**5) for a, b, c in first]
    return list(islice(chain(safe, repeat(last)), steps))


def orthogonalize(matrices: Tensor, steps: int, coefficient_type: str = "simple") -> Tensor:
    """Move the singular values of matrices close to 1: between about 0.7 and 1.2.

    Args:
        matrices: A matrix, or a stack of them [N, rows, columns], in the type of the computation.
        steps: Iterations.
        coefficient_type: Kind of the polynomial's coefficients.
    """
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    x = (matrices.mT if is_tall else matrices).reshape(-1, *sorted(matrices.shape[-2:]))
    norms = torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True)
    x = x / (norms * (SAFETY if coefficient_type == "polar_express" else 1)).clamp(SMALLEST_NORM)
    for a, b, c in iterations(coefficient_type, steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if is_tall else x).view(matrices.shape)


def normalize_neurons(updates: Tensor, squares: Tensor, beta: float) -> Tensor:
    """Divide each row by the root of its second moment, at the norm of an orthogonal matrix.

    Args:
        updates: Orthogonalized matrices [N, rows, columns].
        squares: Second moments [N, rows, 1], which are updated.
        beta: Their decay rate.
    """
    squares.lerp_(updates.float().square().mean(-1, keepdim=True), 1 - beta)
    updates = updates.float() / (squares.sqrt() + NEURON_EPSILON)
    norms = torch.linalg.vector_norm(updates, dim=(-2, -1), keepdim=True)
    factors: Tensor = math.sqrt(min(updates.shape[-2:])) / norms.clamp(SMALLEST_NORM)
    return updates * factors


def _spectral(rows: int, columns: int) -> float:
    return math.sqrt(max(rows, columns))


def _unit_rms_norm(rows: int, columns: int) -> float:
    return math.sqrt(rows / columns)


def _shape_scaling(rows: int, columns: int) -> float:
    return math.sqrt(max(1.0, rows / columns))


SCALES: dict[str, Callable[[int, int], float]] = {
    "spectral": _spectral,
    "unit_rms_norm": _unit_rms_norm,
    "shape_scaling": _shape_scaling,
}
"""Factors of an orthogonalized update, by --muon-scale-mode."""


class Muon(MatrixOptimizer):
    """Orthogonalized momentum for the groups whose key `is_matrix` is true, AdamW for other groups.

        m = momentum m + (1 - momentum) g
        u = orthogonalize(momentum m + (1 - momentum) g), or of m without Nesterov momentum
        w = (1 - lr weight_decay) w - lr scale_factor scale(rows, columns) u

    NorMuon (Li et al. 2025) divides the rows of u, the neurons, by the roots of their second
    moments. Every element of a row has its second moment as a state.

    Args:
        params: Parameter groups.
        momentum: Decay rate of the momentum.
        nesterov: Whether the update looks ahead by the gradient.
        steps: Newton-Schulz iterations.
        coefficient_type: Their coefficients.
        scale_mode: Key of SCALES.
        scale_factor: Further factor of the update.
        neuron_beta: Decay rate of the second moments of neurons. None: there are none.
        adamw: Arguments of AdamW; its learning rate and weight decay apply to the matrices, too.
    """

    average = "momentum_buffer"

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        *,
        momentum: float,
        nesterov: bool,
        steps: int,
        coefficient_type: str,
        scale_mode: str,
        scale_factor: float,
        neuron_beta: float | None,
        **adamw: Any,
    ) -> None:
        super().__init__(params, **adamw)
        if (average := self.state_types.get("exp_avg")) is not None:
            self.state_types[self.average] = average
        for group in self.param_groups:
            group["momentum"] = momentum
        self._nesterov = nesterov
        self._steps = steps
        self._coefficients = coefficient_type
        self._neuron_beta = neuron_beta
        self.states = () if neuron_beta is None else ("exp_avg_sq",)
        self._scale = SCALES[scale_mode]
        self._scale_factor = scale_factor

    def inputs(self, group: dict[str, Any]) -> list[Callable[[MatrixShard], Tensor]]:
        def look_ahead(piece: MatrixShard) -> Tensor:
            average = self.elements_of(self.average, piece)
            if not self._nesterov:
                return average
            assert piece.master.grad is not None
            gradient = piece.master.grad.view(-1)[piece.place]
            return gradient.lerp(average.to(gradient.dtype), group["momentum"])

        return [look_ahead]

    def update(self, group: dict[str, Any], step: int, inputs: Sequence[Rows]) -> list[Tensor]:
        averages, *squares = inputs
        values = orthogonalize(torch.stack(list(averages)), self._steps, self._coefficients)
        states = []
        if self._neuron_beta is not None:
            second = torch.stack([square[:, :1] for square in squares[0]])
            values = normalize_neurons(values, second, self._neuron_beta)
            states = [second.expand_as(values)]
        return [values.mul_(self._scale_factor * self._scale(*values.shape[-2:])), *states]
