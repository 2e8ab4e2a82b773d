"""The SOAP optimizer (Vyas et al. 2024), one-sided, with AdamW for what is not a hidden matrix."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from megatron_ds.engine.optimizers.distributed_matrices import MatrixShard
from megatron_ds.engine.optimizers.matrix_optimizer import MatrixOptimizer, Rows

SAME_EIGENVALUE = 1e-6
"""Relative difference up to which two estimates in fp32 do not tell which eigenvalue is larger."""


class SOAP(MatrixOptimizer):
    """Adam in the eigenbasis of Shampoo's preconditioner for the groups whose `is_matrix` is true.

        m = beta1 m + (1 - beta1) g                   rows are the smaller side of the matrix
        v = beta2 v + (1 - beta2) (Q^T g)^2
        w = (1 - lr weight_decay) w - lr Q (Q^T m' / (sqrt(v') + eps))    m', v': without bias
        L = shampoo_beta L + (1 - shampoo_beta) g g^T
        Q = QR(L Q) every few steps, its columns by `eigenvalue_order`, and v with them

    As in the paper, the first step sets L and its eigenvectors alone. L and Q are square, at most
    as large as the matrix: they are in the corner of states that have its shape.

    Args:
        params: Parameter groups.
        shampoo_beta: Decay rate of the preconditioner.
        precondition_frequency: Steps from one eigenbasis to the next.
        adamw: Arguments of AdamW; its betas and epsilon apply to the matrices, too.
    """

    states = ("exp_avg_sq", "preconditioner", "eigenbasis")
    skipped_steps = 1
    computes_in_fp32 = True

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        *,
        shampoo_beta: float,
        precondition_frequency: int,
        **adamw: Any,
    ) -> None:
        super().__init__(params, **adamw)
        self._shampoo_beta = shampoo_beta
        self._frequency = precondition_frequency

    def inputs(self, group: dict[str, Any]) -> list[Callable[[MatrixShard], Tensor]]:
        def gradient_of(piece: MatrixShard) -> Tensor:
            assert piece.master.grad is not None
            return piece.master.grad.view(-1)[piece.place]

        return [gradient_of, partial(self.elements_of, self.average)]

    def update(self, group: dict[str, Any], step: int, inputs: Sequence[Rows]) -> list[Tensor]:
        beta1, beta2 = group["betas"]
        stacks = [torch.stack(list(rows)) for rows in inputs]
        gradients, averages, squares, preconditioners, bases = stacks
        rows, columns = gradients.shape[-2:]
        corner = (..., slice(min(rows, columns)), slice(min(rows, columns)))
        g, m, v = (x if rows <= columns else x.mT for x in (gradients, averages, squares))
        factor = preconditioners[corner]
        basis = bases[corner]
        steps = step - 1
        if steps:
            v.lerp_((basis.mT @ g).square_(), 1 - beta2)
            m = (basis.mT @ m) / (1 - beta1**steps)
            m = basis @ (m / ((v / (1 - beta2**steps)).sqrt_() + group["eps"]))
        factor.lerp_(g @ g.mT, 1 - self._shampoo_beta)
        if not steps:
            basis.copy_(torch.linalg.eigh(factor).eigenvectors.flip(-1))
        elif steps % self._frequency == 0:
            product = factor @ basis
            order = eigenvalue_order((basis * product).sum(-2))
            v.copy_(v.gather(-2, order[:, :, None].expand_as(v)))
            product = product.gather(-1, order[:, None].expand_as(product))
            basis.copy_(torch.linalg.qr(product).Q)
        return [m if rows <= columns else m.mT, squares, preconditioners, bases]


def eigenvalue_order(estimates: Tensor) -> Tensor:
    """The order of eigenvectors by descending eigenvalues, where neighbours keep their places.

    Rounding differs between layouts, and decides which of two nearly equal estimates is larger.
    An estimate that is within `SAME_EIGENVALUE` of the next larger one is in the same group as it,
    and the columns of a group stay in the order that they have.

    Args:
        estimates: Estimated eigenvalues of each matrix [matrices, columns].

    Returns:
        The columns in their new order [matrices, columns].
    """
    descending = estimates.argsort(dim=-1, descending=True, stable=True)
    values = estimates.gather(-1, descending)
    larger = values[..., :-1]
    smaller = values[..., 1:]
    is_apart = larger - smaller > SAME_EIGENVALUE * larger.abs()
    groups = functional.pad(is_apart.cumsum(-1), (1, 0))
    return torch.empty_like(groups).scatter_(-1, descending, groups).argsort(dim=-1, stable=True)
