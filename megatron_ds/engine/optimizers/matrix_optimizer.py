"""Base of the optimizers that update full matrices; AdamW updates all weights that are not hidden
matrices."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_ds.config.options.optimizer import MATRIX_BATCH
from megatron_ds.engine.optimizers.adamw import CHUNK, AdamW
from megatron_ds.engine.optimizers.distributed_matrices import DistributedMatrices, MatrixShard

MATRICES = "is_matrix"
"""Key of parameter groups: whether they are matrices that are updated as such."""
Rows = Sequence[Tensor]
"""Matrices of one shape."""


class MatrixOptimizer(AdamW):
    """AdamW, but for groups whose key `is_matrix` is true an update of full matrices.

    Their states have the shape of the parameter, so that they are partitioned, saved and resharded
    as the weights. Gradients are those that DeepSpeed passes to its optimizers: averaged, unscaled
    and clipped. A parameter of several matrices, such as queries, keys and values or the experts of
    a rank, has each of them updated by itself. With cautious decay, only elements that the update
    moves towards zero decay.

    `attach` must be called before the first step.

    Args:
        params: Parameter groups.
        adamw: Arguments of AdamW; its learning rate and weight decay apply to the matrices, too.
    """

    average = "exp_avg"
    """Name of the average of a matrix' gradients."""
    states: tuple[str, ...] = ()
    """Names of the states that are updated with full matrices, in fp32."""
    skipped_steps = 0
    """First steps that set states alone."""
    computes_in_fp32 = False

    def __init__(self, params: Iterable[dict[str, Any]], **adamw: Any) -> None:
        super().__init__(params, **adamw)
        for group in self.param_groups:
            group.setdefault(MATRICES, False)
        self.is_cautious = False
        """Whether the decay of matrices is cautious."""
        self._matrices: dict[Tensor, DistributedMatrices] = {}

    @property
    def matrix_count(self) -> int:
        """Number of parameters that are updated as matrices."""
        return sum(len(matrices.pieces) for matrices in self._matrices.values())

    def attach(self, matrices: Iterable[DistributedMatrices]) -> None:
        """Give the optimizer the locations of its matrices.

        Args:
            matrices: Matrices of each set of tensors that is stepped together.
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

    def inputs(self, group: dict[str, Any]) -> list[Callable[[MatrixShard], Tensor]]:
        """Further flat tensors that are sent to the owners of matrices together with the states."""
        raise NotImplementedError

    def update(self, group: dict[str, Any], step: int, inputs: Sequence[Rows]) -> list[Tensor]:
        """Compute matrices of one shape together: one of a small model does not fill a device.

        Args:
            group: Settings.
            step: Steps with this one.
            inputs: The inputs and the states of each matrix.

        Returns:
            Stacks of the updates and of the new states.
        """
        raise NotImplementedError

    def elements_of(self, name: str, piece: MatrixShard) -> Tensor:
        """A state's elements of a matrix, one-dimensional."""
        values: Tensor = self.state[piece.master][name].view(-1)[piece.place]
        return values

    def _step_matrices(self, group: dict[str, Any]) -> None:
        matrices = self._matrices[group["params"][0]]
        step = max(self._step_elements(master, group) for master in group["params"])
        tensors = [matrices.collect(values_of) for values_of in self.inputs(group)]
        for name in self.states:
            tensors.append(matrices.collect(partial(self.elements_of, name), torch.float32))
        updates = self._updates(group, step, tensors, matrices.owned)
        lr = group["lr"]
        decay = group["lr"] * group["weight_decay"]
        is_skipped = step <= self.skipped_steps
        for piece, update in () if is_skipped else matrices.distribute(updates):
            weights = piece.master.view(-1)[piece.place]
            if self.is_cautious:
                weights.addcmul_(weights, (update * weights >= 0).to(weights), value=-decay)
            weights.add_(update.to(weights), alpha=-lr)
        for name, new in zip(reversed(self.states), reversed(tensors), strict=False):
            for piece, values in matrices.distribute(new, torch.float32):
                self.elements_of(name, piece).copy_(values)

    def _step_elements(self, master: Tensor, group: dict[str, Any]) -> int:
        """Count the step of a tensor, average its gradient and decay it, unless cautiously."""
        state = self.state[master]
        types = self.state_types
        gradient = master.grad
        assert gradient is not None
        if not state:
            # AdamW expects a number of steps in every state that is loaded.
            state["step"] = torch.zeros((), dtype=torch.float32)
            for name in (self.average, *self.states):
                state[name] = torch.zeros_like(master, dtype=types.get(name))
        state["step"] += 1  # on the host
        if (step := int(state["step"])) <= self.skipped_steps:
            return step
        momentum = group.get("momentum", group["betas"][0])
        tensors = (tensor.view(-1).split(CHUNK) for tensor in (state[self.average], gradient))
        for average, values in zip(*tensors, strict=True):
            average.copy_(average.to(values.dtype).lerp_(values, 1 - momentum))
        if not self.is_cautious:
            master.mul_(1 - group["lr"] * group["weight_decay"])
        return step

    def _updates(
        self,
        group: dict[str, Any],
        step: int,
        tensors: Sequence[list[Tensor]],
        pieces: Sequence[MatrixShard],
    ) -> list[Tensor]:
        """The update of each matrix that the parameters stack or fuse.

        Args:
            group: Settings.
            step: Steps with this one.
            tensors: The inputs, and the states, which are updated, of each of the pieces.
            pieces: Parameters.
        """
        updates = [torch.empty_like(values) for values in tensors[0]]
        by_shape: dict[tuple[int, ...], list[tuple[Tensor, ...]]] = {}
        for piece, *of_piece in zip(pieces, *tensors, updates, strict=True):
            sizes = piece.sections or (of_piece[0].shape[-2],)
            for parts in zip(*(tensor.split(sizes, -2) for tensor in of_piece), strict=True):
                stacks = (tensor.reshape(-1, *tensor.shape[-2:]) for tensor in parts)
                by_shape.setdefault(parts[0].shape[-2:], []).extend(zip(*stacks, strict=True))
        for shape, matrices in by_shape.items():
            count = max(1, MATRIX_BATCH // math.prod(shape))
            for start in range(0, len(matrices), count):
                *inputs, results = zip(*matrices[start : start + count], strict=True)
                update, *states = self.update(group, step, inputs)
                old = inputs[len(inputs) - len(states) :]
                for rows, new in zip((results, *old), (update, *states), strict=True):
                    torch._foreach_copy_(list(rows), list(new))
        return updates
