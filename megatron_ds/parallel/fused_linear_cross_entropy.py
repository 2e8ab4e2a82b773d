"""Fused output layer and cross entropy: the logits of a batch are neither stored nor recomputed.

The weight of every token's loss is known before its logits, so the forward pass turns each chunk of
logits into its gradient at once and multiplies it out: three matmuls, one pass over the logits, and
only the gradients of input and weight are stored for the backward pass. The vocabulary may be
sharded over a group; the ranks then exchange two numbers per token (vocabulary-parallel cross
entropy, Shoeybi et al. 2019, section 3). The matmuls run at the padded width, whose rows are
aligned in memory; the logits of the padding are -inf, so its probabilities and gradients are zero.
Optional: the z-loss (Chowdhery et al. 2022, section 5) and a bound of the logits (Gemma 2, 2024).

Shapes: T tokens, H hidden, v this rank's rows of the padded vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from megatron_ds.config.devices import is_host
from megatron_ds.config.problems import user_error
from megatron_ds.parallel.chunks import chunk_bytes
from megatron_ds.parallel.collectives import all_gather, start_all_reduce_
from megatron_ds.parallel.mesh import Group

LossFunction = Callable[[Tensor, Tensor], Tensor]
"""Losses [T] of logits [T, vocabulary] in fp32 and labels [T], each of its own row only."""
TILE_ROWS = 256
"""Rows of a tile in the matmul kernels of devices."""
CACHED_LOGITS = 2**20
"""Logits of a softmax call on a CPU, so that its passes over them in fp32 stay in the cache."""


def softmax_(logits: Tensor) -> Tensor:
    """Apply softmax to the last dimension in place.

    Returns:
        Logarithm of the denominator of each row, fp32.
    """
    log_sum = torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device)
    for rows in _row_slices(logits):
        part = logits[rows]
        highest = part.amax(dim=-1).float()
        probabilities = torch.softmax(part, dim=-1, dtype=torch.float32)
        # The highest logit's probability is 1 / sum(exp(logit - highest)).
        log_sum[rows] = highest - probabilities.amax(dim=-1).log()
        part.copy_(probabilities)
    return log_sum


def fusible_softmax_(logits: Tensor) -> Tensor:
    """`softmax_` in operations that torch.compile fuses into passes over one row at a time."""
    values = logits.float()
    highest = values.amax(dim=-1, keepdim=True)
    log_sum = highest + (values - highest).exp().sum(dim=-1, keepdim=True).log()
    logits.copy_((values - log_sum).exp())  # cheaper than storing the first exponentials
    return log_sum.squeeze(-1)


def multiply(x: Tensor, factor: Tensor) -> Tensor:
    """x times a scalar, rounded once."""
    return (x.float() * factor).to(x.dtype)


@dataclass(frozen=True)
class LossKernels:
    """The functions of the loss that are limited by memory bandwidth."""

    softmax_: Callable[[Tensor], Tensor] = softmax_
    multiply: Callable[[Tensor, Tensor], Tensor] = multiply

    @classmethod
    def compiled(cls) -> LossKernels:
        """One kernel each, compiled by torch.compile when they are first called."""
        return cls(torch.compile(fusible_softmax_), torch.compile(multiply))


EAGER = LossKernels()


@dataclass(frozen=True)
class LossTerms:
    """Settings of the loss terms other than the cross entropy."""

    z_loss_coeff: float = 0.0
    """Coefficient of the square of the logarithm of the softmax's denominator."""
    softcap: float | None = None
    """Bound of the logits, softcap x tanh(logit / softcap). None: they have no bound."""

    @property
    def number(self) -> int:
        """Losses that are summed."""
        return 2 if self.z_loss_coeff else 1

    def z_loss(self, log_sum: Tensor) -> list[Tensor]:
        """The z-losses of tokens by the logarithms of their denominators; empty without one."""
        return [log_sum.square()] if self.z_loss_coeff else []


PLAIN = LossTerms()


def _row_slices(logits: Tensor) -> list[slice]:
    """Rows that are processed together."""
    size = logits.shape[0]
    if is_host(logits.device.type):
        size = max(1, CACHED_LOGITS // logits.shape[1])
    return [slice(start, start + size) for start in range(0, logits.shape[0], size)]


def chunk_rows(num_tokens: int, width: int, element_size: int, *, on_host: bool) -> int:
    """Tokens of each chunk but the last one, which may have fewer.

    On devices they are complete tiles. They are all equal where the number of tokens has such a
    divisor, so that a compiled softmax has one shape.

    Args:
        num_tokens: Tokens of all chunks.
        width: Columns of the logits.
        element_size: Bytes of a logit.
        on_host: Whether the logits are in host memory.
    """
    most = max(1, chunk_bytes(on_host=on_host) // (width * element_size))
    if on_host or num_tokens <= most or most < TILE_ROWS:
        return min(most, num_tokens)
    chunks = -(-num_tokens // most)
    equal = (n for n in range(chunks, 2 * chunks) if num_tokens % (n * TILE_ROWS) == 0)
    count = next(equal, None)
    return most // TILE_ROWS * TILE_ROWS if count is None else num_tokens // count


def linear_cross_entropy(
    x_TH: Tensor,
    weight_vH: Tensor,
    labels_T: Tensor,
    weights_T: Tensor | None,
    *,
    vocab_size: int,
    group: Group,
    kernels: LossKernels = EAGER,
    function: LossFunction | None = None,
    terms: LossTerms = PLAIN,
) -> tuple[Tensor, Tensor | None]:
    """Sum over tokens of weight x cross entropy(x W^T, label); softmax and sums are in fp32.

    Args:
        x_TH: Hidden states, the same on every rank. With sequence parallelism their gradient is
            this rank's partial sum, which `gather_sequence` reduces.
        weight_vH: This rank's rows of the output layer.
        labels_T: Token ids below `vocab_size`.
        weights_T: Weight of each token's loss, fp32. None: ones.
        vocab_size: Rows of the full output layer that are tokens.
        group: Group over which the rows are sharded.
        kernels: Eager or compiled functions.
        function: Computes the losses instead of the cross entropy.
        terms: The z-loss and the bound of the logits.

    Returns:
        The loss, a scalar in fp32 without the z-loss, whose gradients are the gradients of loss +
        coefficient x z-loss; and the sum of weight x z-loss without its coefficient, None if the
        coefficient is 0.

    Raises:
        UserError: If `function` does not return a loss for each label.
    """
    width = weight_vH.shape[0]
    first = group.rank * width
    rows = min(max(vocab_size - first, 0), width)
    loss = _Loss(
        labels_T, weights_T, first, rows, width, group, kernels, vocab_size, function, terms
    )
    if torch.is_grad_enabled() and (x_TH.requires_grad or weight_vH.requires_grad):
        result: tuple[Tensor, Tensor | None] = _LinearCrossEntropy.apply(x_TH, weight_vH, loss)
        return result
    return loss.split(loss.value(x_TH, weight_vH))


@dataclass(frozen=True)
class _Loss:
    """The loss as a function of x and of one rank's shard of the weight."""

    labels_T: Tensor
    weights_T: Tensor | None
    first: int
    """First row of the shard."""
    rows: int
    """Rows that are tokens."""
    width: int
    """Rows including the padding, the same on every rank."""
    group: Group
    kernels: LossKernels
    vocab_size: int
    function: LossFunction | None
    terms: LossTerms

    def split(self, total: Tensor) -> tuple[Tensor, Tensor | None]:
        """The loss, and the z-loss if there is one."""
        return total[0], total[1] if self.terms.z_loss_coeff else None

    def value(self, x_TH: Tensor, weight_vH: Tensor) -> Tensor:
        """The loss, and the z-loss if there is one, without gradients."""
        total = torch.zeros(self.terms.number, dtype=torch.float32, device=x_TH.device)
        for chunk in self._chunks(x_TH):
            logits, _ = self._logits(x_TH[chunk], weight_vH)
            total += self._loss_(logits, chunk, for_gradient=False)
            del logits  # before the next chunk's are allocated
        return total

    def value_and_gradients(self, x_TH: Tensor, weight_vH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The loss and the z-loss, if there is one, and the gradients of their sum with respect to
        x (this rank's summand) and the weight."""
        chunks = self._chunks(x_TH)
        total = torch.zeros(self.terms.number, dtype=torch.float32, device=x_TH.device)
        grad_x = torch.empty_like(x_TH) if self.rows else torch.zeros_like(x_TH)
        # Several chunks are summed in fp32, as the matrix product does within a single one. A sum
        # over many tokens may exceed fp16 before the loss is divided by their number.
        is_single = len(chunks) == 1 and x_TH.dtype != torch.float16
        sum_type = weight_vH.dtype if is_single else torch.float32
        grad_weight = torch.empty_like(weight_vH, dtype=sum_type)
        if not (is_single and self.rows):
            grad_weight.zero_()
        for chunk in chunks:
            x = x_TH[chunk]
            logits, slope = self._logits(x, weight_vH)
            total += self._loss_(logits, chunk, for_gradient=True)
            if not self.rows:
                continue
            if slope is not None:
                logits.mul_(slope)
            torch.mm(logits, weight_vH, out=grad_x[chunk])
            if self.weights_T is not None:
                scale = self.weights_T[chunk].unsqueeze(1)
                grad_x[chunk] *= scale
                x = (x * scale).to(x.dtype)
            if is_single:
                torch.mm(logits.t(), x, out=grad_weight)
            else:
                _add_product_(grad_weight, logits.t(), x)
            del logits  # before the next chunk's are allocated
        return total, grad_x, grad_weight

    def _logits(self, x: Tensor, weight_vH: Tensor) -> tuple[Tensor, Tensor | None]:
        """Logits of a chunk, -inf for the padding; without columns where all rows are padding.
        With a bound also its derivative."""
        if not self.rows and self.function is None:
            return x.new_empty((x.shape[0], 0)), None
        logits = x @ weight_vH.t()
        slope = None
        if (cap := self.terms.softcap) is not None:
            share = (logits.float() / cap).tanh_()
            logits.copy_(share * cap)
            slope = 1 - share.square_()
        logits[:, self.rows :] = -torch.inf
        return logits, slope

    def _chunks(self, x_TH: Tensor) -> list[slice]:
        # By the width, not the rows: the ranks communicate once per chunk, so they need the same
        # number of chunks, but padding is on the last ranks only.
        columns = self.width if self.function is None else self.width * self.group.size
        tokens = x_TH.shape[0]
        on_host = is_host(x_TH.device.type)
        size = chunk_rows(tokens, columns, x_TH.element_size(), on_host=on_host)
        return [slice(start, start + size) for start in range(0, tokens, size)]

    def _loss_(self, logits: Tensor, chunk: slice, *, for_gradient: bool) -> Tensor:
        """Compute the chunk's loss and z-loss and, in the memory of the logits, the gradient of
        each token's loss."""
        compute = self._cross_entropy_ if self.function is None else self._custom_loss_
        losses = compute(logits, self.labels_T[chunk], for_gradient=for_gradient)
        if self.weights_T is not None:
            losses = [loss * self.weights_T[chunk] for loss in losses]
        return torch.stack([loss.sum() for loss in losses])

    def _custom_loss_(self, logits: Tensor, labels: Tensor, *, for_gradient: bool) -> list[Tensor]:
        """Does the same as `_cross_entropy_` for the loss `function`, by autograd, with the logits
        gathered from all ranks."""
        assert self.function is not None
        full = all_gather(logits, self.group).transpose(0, 1).flatten(1)[:, : self.vocab_size]
        with torch.set_grad_enabled(for_gradient):
            full = full.float().detach().requires_grad_(for_gradient)
            losses = self.function(full, labels)
            if losses.shape != labels.shape:
                shape = list(losses.shape)
                needed = list(labels.shape)
                raise user_error("loss-of-other-shape", found=shape, needed=needed)
            parts = [losses.float(), *self.terms.z_loss(full.logsumexp(dim=-1))]
            if for_gradient and self.rows:
                total = parts[0].sum() + self.terms.z_loss_coeff * parts[-1].sum()
                (gradient,) = torch.autograd.grad(total, full)
                logits.zero_()
                logits[:, : self.rows] = gradient[:, self.first : self.first + self.rows]
        return [part.detach() for part in parts]

    def _cross_entropy_(
        self, logits: Tensor, labels: Tensor, *, for_gradient: bool
    ) -> list[Tensor]:
        """Compute the losses and z-losses and, in the memory of the logits, their gradient:
        softmax x (1 + 2 x coefficient x log-sum-exp) - one-hot label."""
        local = labels - self.first
        # Masks instead of index lists, whose lengths would force a synchronization.
        is_local = (local >= 0) & (local < self.rows)
        columns = local.clamp(0, max(self.rows - 1, 0))
        tokens = torch.arange(labels.shape[0], device=labels.device)
        if self.rows:
            picked = torch.where(is_local, logits[tokens, columns].float(), 0.0)
            log_sum = self.kernels.softmax_(logits)
        else:
            picked = torch.zeros(labels.shape, dtype=torch.float32, device=labels.device)
            log_sum = torch.full_like(picked, -torch.inf)
        if self.group.size > 1:
            parts = all_gather(torch.stack([log_sum, picked]), self.group)
            total = parts[:, 0].logsumexp(dim=0)
            picked = parts[:, 1].sum(dim=0)
        else:
            total = log_sum
        factors = None if total is log_sum else (log_sum - total).exp()
        if coefficient := self.terms.z_loss_coeff:
            growth = 1 + 2 * coefficient * total
            factors = growth if factors is None else growth * factors
        if factors is not None and for_gradient and self.rows:
            factors = factors.unsqueeze(1)
            for rows in _row_slices(logits):
                logits[rows].mul_(factors[rows])
        losses = total - picked
        if for_gradient and self.rows:
            # The label's gradient, its probability - 1, is rounded once: a probability close to 1
            # has lost it. scatter_ would pass over all logits in bf16 on a CPU.
            labels_gradient = torch.expm1(-losses)
            if coefficient:
                labels_gradient += (-losses).exp() * 2 * coefficient * total
            labels_gradient = labels_gradient.to(logits.dtype)
            logits[tokens, columns] = torch.where(
                is_local, labels_gradient, logits[tokens, columns]
            )
        return [losses, *self.terms.z_loss(total)]


def _add_product_(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a b in fp32, without rounding the product where the device can."""
    if a.dtype != total.dtype and _adds_products_in_fp32(a.device, a.dtype):
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    elif a.dtype == torch.float16:  # the product may exceed its range
        total += a.float() @ b.float()
    else:
        total += a @ b


@cache
def _adds_products_in_fp32(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether torch correctly accumulates matmuls of this type into fp32 on this device."""
    ones = torch.ones((8, 8), dtype=dtype, device=device)
    total = torch.full((8, 8), 2.0**-12, dtype=torch.float32, device=device)
    try:
        torch.addmm(total, ones, ones, out_dtype=torch.float32, out=total)
    except (RuntimeError, TypeError):  # NotImplementedError is a RuntimeError
        return False
    return bool((total == 8 + 2.0**-12).all())


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_TH: Tensor, weight_vH: Tensor, loss: _Loss
    ) -> tuple[Tensor, Tensor | None]:
        total, grad_x, grad_weight = loss.value_and_gradients(x_TH, weight_vH)
        ctx.weight_type = weight_vH.dtype
        ctx.loss = loss
        ctx.save_for_backward(grad_x, grad_weight)
        value, z_loss = loss.split(total)
        if z_loss is not None:
            ctx.mark_non_differentiable(z_loss)
        return value, z_loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor, Tensor, None]:
        grad_x, grad_weight = ctx.saved_tensors
        # In fp32, because the factor contains the number of tokens and the loss scale.
        kernels = ctx.loss.kernels
        group = ctx.loss.group
        grad_x = kernels.multiply(grad_x, grad)
        work = None if group.sequence_parallel else start_all_reduce_(grad_x, group)
        grad_weight = kernels.multiply(grad_weight, grad).to(ctx.weight_type)
        if work is not None:
            work.wait()
        return grad_x, grad_weight, None
