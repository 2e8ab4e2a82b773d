"""Output layer and cross entropy in one: the whole batch's logits are never kept in fp32, nor
recomputed.

The loss of every token has a weight that is known before the logits are, so the forward pass can
turn each chunk of logits into its gradient on the spot and multiply it out: three matrix products,
one pass over the logits, and nothing but the gradients of input and weight is kept for the backward
pass. The vocabulary may be cut over a group; the ranks exchange three numbers per token (the
vocabulary-parallel cross entropy of Shoeybi et al. 2019, section 3). Rows of padding take no part.

Shapes: T tokens, H hidden, v this rank's rows of the vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from megatron_ds.parallel.collectives import copy_to_group
from megatron_ds.parallel.mesh import Group

CHUNK_BYTES = 2**28
"""Memory of the logits held at a time, in the model's type."""
CACHED_LOGITS = 2**20
"""Logits that the softmax works on at a time on a CPU, in fp32, so that its passes stay in the
cache.
"""


def softmax_(logits: torch.Tensor) -> torch.Tensor:
    """Softmax over the last dimension in place; returns the logarithm of its denominator, fp32."""
    log_sum = torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device)
    for rows in _cached(logits):
        part = logits[rows]
        highest = part.amax(dim=-1).float()
        shares = torch.softmax(part, dim=-1, dtype=torch.float32)
        # The highest logit's share is 1 / sum(exp(logit - highest)).
        log_sum[rows] = highest - shares.amax(dim=-1).log()
        part.copy_(shares)
    return log_sum


def scale_rows_(logits: torch.Tensor, factors: torch.Tensor) -> None:
    """Multiply each row by its factor, in fp32, in place."""
    for rows in _cached(logits):
        logits[rows].mul_(factors[rows].unsqueeze(1))


def _cached(logits: torch.Tensor) -> list[slice]:
    """Rows to work on at a time."""
    size = logits.shape[0]
    if logits.device.type == "cpu":
        size = max(1, CACHED_LOGITS // logits.shape[1])
    return [slice(start, start + size) for start in range(0, logits.shape[0], size)]


def linear_cross_entropy(
    x_TH: torch.Tensor,
    weight_vH: torch.Tensor,
    labels_T: torch.Tensor,
    weights_T: torch.Tensor | None,
    *,
    vocab_size: int,
    group: Group,
) -> torch.Tensor:
    """Sum over tokens of weight x cross entropy(x W^T, label), a scalar in fp32.

    x_TH: whole on every rank. weight_vH: this rank's rows of the padded vocabulary. labels_T: ids
    below vocab_size. weights_T: weight of each token, fp32; None: ones. vocab_size: rows that are
    tokens, without the padding. Softmax and sums are in fp32, whatever the model's type.
    """
    first = group.rank * weight_vH.shape[0]
    rows = min(max(vocab_size - first, 0), weight_vH.shape[0])
    problem = _VocabShard(first, rows, weight_vH.shape[0], group)
    x_TH = copy_to_group(x_TH, group)
    if torch.is_grad_enabled() and (x_TH.requires_grad or weight_vH.requires_grad):
        loss: torch.Tensor = _LinearCrossEntropy.apply(
            x_TH, weight_vH, labels_T, weights_T, problem
        )
        return loss
    return problem.loss(x_TH, weight_vH, labels_T, weights_T)


class _VocabShard:
    """One rank's share: rows `first` to `first + rows` of the vocabulary.

    width: rows with the padding, the same on every rank.
    """

    def __init__(self, first: int, rows: int, width: int, group: Group) -> None:
        self.first = first
        self.rows = rows
        self.width = width
        self.group = group

    def loss(
        self,
        x_TH: torch.Tensor,
        weight_vH: torch.Tensor,
        labels_T: torch.Tensor,
        weights_T: torch.Tensor | None,
    ) -> torch.Tensor:
        """The loss alone."""
        total = torch.zeros((), dtype=torch.float32, device=x_TH.device)
        for chunk in self.chunks(x_TH):
            logits = x_TH[chunk] @ weight_vH[: self.rows].t()
            losses, _ = self.normalise(logits, labels_T[chunk], for_gradient=False)
            total += _weighted_sum(losses, weights_T, chunk)
        return total

    def loss_and_gradients(
        self,
        x_TH: torch.Tensor,
        weight_vH: torch.Tensor,
        labels_T: torch.Tensor,
        weights_T: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Loss, its gradient with respect to x (this rank's share of the sum) and to the weight."""
        weight = weight_vH[: self.rows]
        chunks = self.chunks(x_TH)
        total = torch.zeros((), dtype=torch.float32, device=x_TH.device)
        grad_x = torch.empty_like(x_TH)
        # Several chunks are summed in fp32; a single one is summed so inside the matrix product.
        sum_type = weight.dtype if len(chunks) == 1 else torch.float32
        grad_weight = torch.zeros_like(weight_vH, dtype=sum_type)
        for index, chunk in enumerate(chunks):
            x = x_TH[chunk]
            logits = x @ weight.t()
            losses, grad_logits = self.normalise(logits, labels_T[chunk], for_gradient=True)
            total += _weighted_sum(losses, weights_T, chunk)
            torch.mm(grad_logits, weight, out=grad_x[chunk])
            if weights_T is not None:
                scale = weights_T[chunk].unsqueeze(1)
                grad_x[chunk] *= scale
                x = (x * scale).to(x.dtype)
            if sum_type == weight.dtype:
                into = grad_weight[: self.rows]
                torch.addmm(into, grad_logits.t(), x, beta=float(index > 0), out=into)
            else:
                grad_weight[: self.rows] += grad_logits.t() @ x
        return total, grad_x, grad_weight

    def chunks(self, x_TH: torch.Tensor) -> list[slice]:
        # By the width and not by the rows: the ranks talk once per chunk, and padding is not even.
        size = max(1, CHUNK_BYTES // (self.width * x_TH.element_size()))
        return [slice(start, start + size) for start in range(0, x_TH.shape[0], size)]

    def normalise(
        self, logits: torch.Tensor, labels: torch.Tensor, *, for_gradient: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Each token's loss, and (in the memory of the logits) softmax - one-hot of the label."""
        local = labels - self.first
        # Masks, not lists of indices: an accelerator would have to be waited for to count them.
        mine = (local >= 0) & (local < self.rows)
        columns = local.clamp(0, max(self.rows - 1, 0))
        tokens = torch.arange(labels.shape[0], device=labels.device)
        if self.rows:
            picked = torch.where(mine, logits[tokens, columns].float(), 0.0)
            log_sum = softmax_(logits)
        else:
            picked = torch.zeros(labels.shape, dtype=torch.float32, device=labels.device)
            log_sum = torch.full_like(picked, -torch.inf)
        whole, picked = self.combine(log_sum, picked)
        if for_gradient and self.rows:
            if self.group.size > 1:
                scale_rows_(logits, (log_sum - whole).exp())
            # Not scatter_, which takes a pass over all logits in bf16 on a CPU.
            logits[tokens, columns] -= mine.to(logits.dtype)
        return whole - picked, logits

    def combine(
        self, log_sum: torch.Tensor, picked: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Logarithm of the whole denominator, and the label's logit, from all ranks' parts."""
        if self.group.size == 1:
            return log_sum, picked
        mine = torch.stack([log_sum, picked])
        parts = [torch.empty_like(mine) for _ in self.group.ranks]
        dist.all_gather(parts, mine, group=self.group.handle)
        together = torch.stack(parts)
        return together[:, 0].logsumexp(dim=0), together[:, 1].sum(dim=0)


def _weighted_sum(
    losses: torch.Tensor, weights_T: torch.Tensor | None, chunk: slice
) -> torch.Tensor:
    return losses.sum() if weights_T is None else (losses * weights_T[chunk]).sum()


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TH: torch.Tensor,
        weight_vH: torch.Tensor,
        labels_T: torch.Tensor,
        weights_T: torch.Tensor | None,
        problem: _VocabShard,
    ) -> torch.Tensor:
        loss, grad_x, grad_weight = problem.loss_and_gradients(x_TH, weight_vH, labels_T, weights_T)
        ctx.weight_type = weight_vH.dtype
        ctx.save_for_backward(grad_x, grad_weight)
        return loss

    @staticmethod
    def backward(
        ctx: Any, grad: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, None, None, None]:
        grad_x, grad_weight = ctx.saved_tensors
        # In fp32: the factor carries the number of tokens and the loss scale.
        return (
            (grad_x.float() * grad).to(grad_x.dtype),
            (grad_weight.float() * grad).to(ctx.weight_type),
            None,
            None,
            None,
        )
