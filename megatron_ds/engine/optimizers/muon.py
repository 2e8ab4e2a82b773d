"""The Muon optimizer (Jordan et al. 2024) with AdamW for what is not a hidden matrix."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain, cycle, islice, repeat
from typing import Any

import torch
from torch import Tensor

from megatron_ds.config.data_files import read_table
from megatron_ds.config.options.optimizer import MUON_BATCH
from megatron_ds.engine.optimizers.adamw import CHUNK, AdamW
from megatron_ds.engine.optimizers.distributed_matrices import DistributedMatrices, MatrixShard

Coefficients = tuple[float, float, float]
COEFFICIENTS: dict[str, list[Coefficients]] = read_table(__file__)
"""Those of the iterations, by --muon-coefficient-type."""
SAFETY = 1.01
"""Factor by which Polar Express shrinks singular values against rounding errors."""
SMALLEST_NORM = 1e-7
NEURON_EPSILON = 1e-8
MATRICES = "is_matrix"
"""Key of parameter groups: whether Muon updates the group."""
AVERAGE, SQUARES = "momentum_buffer", "exp_avg_sq"
"""Names of the states of matrices."""


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
        coefficient_type: Which coefficients they have.
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

    NorMuon (Li et al. 2025) divides the rows of u, the neurons, by the roots of their second
    moments. Every element of a row has its second moment as a state, so that these are partitioned,
    saved and resharded as the momentum. With cautious decay, only elements that u moves towards
    zero decay.

    Gradients are those that DeepSpeed passes to its optimizers: averaged, unscaled and clipped. A
    parameter of several matrices, such as queries, keys and values or the experts of a rank, has
    each of them orthogonalized by itself, with its own scale.

    `attach` must be called before the first step.

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
            self.state_types[AVERAGE] = average
        for group in self.param_groups:
            group.setdefault(MATRICES, False)
            group["momentum"] = momentum
        self._nesterov, self._steps, self._coefficients = nesterov, steps, coefficient_type
        self._neuron_beta = neuron_beta
        self.is_cautious = False
        """Whether the decay of matrices is cautious."""
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
        lr, momentum, decay = group["lr"], group["momentum"], group["lr"] * group["weight_decay"]
        names = [AVERAGE] if self._neuron_beta is None else [AVERAGE, SQUARES]
        for master in group["params"]:
            state = self.state[master]
            if not state:
                # AdamW expects a number of steps in every state that is loaded.
                state["step"] = torch.zeros((), dtype=torch.float32)
                types = self.state_types
                state |= {n: torch.zeros_like(master, dtype=types.get(n)) for n in names}
            state["step"] += 1
            tensors = (tensor.view(-1).split(CHUNK) for tensor in (state[AVERAGE], master.grad))
            for average, gradient in zip(*tensors, strict=True):
                average.copy_(average.to(gradient.dtype).lerp_(gradient, 1 - momentum))
            if not self.is_cautious:
                master.mul_(1 - decay)

        matrices = self._matrices[group["params"][0]]

        def state_of(name: str, piece: MatrixShard) -> Tensor:
            values: Tensor = self.state[piece.master][name].view(-1)[piece.place]
            return values

        def update_of(piece: MatrixShard) -> Tensor:
            average = state_of(AVERAGE, piece)
            if self._nesterov:
                assert piece.master.grad is not None
                gradient = piece.master.grad.view(-1)[piece.place]
                average = gradient.lerp(average.to(gradient.dtype), momentum)
            return average

        averages, squares = matrices.collect(update_of), None
        if self._neuron_beta is not None:
            squares = matrices.collect(partial(state_of, SQUARES), torch.float32)
        updates = self._updates(averages, squares, matrices.owned)
        for piece, update in matrices.distribute(updates):
            weights = piece.master.view(-1)[piece.place]
            if self.is_cautious:
                weights.addcmul_(weights, (update * weights >= 0).to(weights), value=-decay)
            weights.add_(update.to(weights), alpha=-lr)
        for piece, values in matrices.distribute(squares, torch.float32) if squares else ():
            state_of(SQUARES, piece).copy_(values)

    def _updates(
        self, averages: list[Tensor], squares: list[Tensor] | None, pieces: Sequence[MatrixShard]
    ) -> list[Tensor]:
        """The scaled update of each matrix that the parameters stack or fuse.

        Matrices of one shape are computed together: one of a small model does not fill a device.

        Args:
            averages: What is orthogonalized, of each of the pieces.
            squares: Second moments, which are updated; None without them.
            pieces: Parameters.
        """
        updates = [torch.empty_like(average) for average in averages]
        by_shape: dict[tuple[int, ...], list[tuple[Tensor, ...]]] = {}
        for piece, *tensors in zip(pieces, averages, updates, squares or updates, strict=True):
            sizes = piece.sections or (tensors[0].shape[-2],)
            for parts in zip(*(tensor.split(sizes, -2) for tensor in tensors), strict=True):
                stacks = (tensor.reshape(-1, *tensor.shape[-2:]) for tensor in parts)
                by_shape.setdefault(parts[0].shape[-2:], []).extend(zip(*stacks, strict=True))
        for shape, rows in by_shape.items():
            scale = self._scale_factor * self._scale(*shape)
            count = max(1, MUON_BATCH // math.prod(shape))
            for start in range(0, len(rows), count):
                matrices, results, moments = zip(*rows[start : start + count], strict=True)
                values = orthogonalize(torch.stack(matrices), self._steps, self._coefficients)
                if self._neuron_beta is not None:
                    second = torch.stack([moment[:, :1] for moment in moments])
                    values = normalize_neurons(values, second, self._neuron_beta)
                    torch._foreach_copy_(moments, list(second.expand_as(values)))
                torch._foreach_copy_(results, list(values.mul_(scale)))
        return updates
