"""The output layer: hidden states to the loss, or to logits.

Shapes: S sequence, B micro-batch, H hidden, v this rank's rows of the padded vocabulary V.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_ds.parallel.collectives import gather_from_group, gather_sequence
from megatron_ds.parallel.embedding import validate_token_ids
from megatron_ds.parallel.fused_linear_cross_entropy import (
    EAGER,
    PLAIN,
    LossFunction,
    LossTerms,
    linear_cross_entropy,
)
from megatron_ds.parallel.linear import Product, multiply
from megatron_ds.parallel.mesh import Group
from megatron_ds.parallel.sharding import Draws, declared_parameter
from megatron_ds.parallel.ulysses import sum_of_slices
from megatron_ds.parallel.weights import Weight

Z_LOSS = "lm_z_loss"
"""Name of the z-loss among the extras of a loss, and in logs."""


class TokenLoss(NamedTuple):
    """Loss of one micro-batch, not yet divided by the number of its tokens."""

    loss_sum: Tensor
    """Sum over counted tokens of the cross entropy in nats, a scalar in fp32."""
    num_tokens: Tensor
    """Number of counted tokens (sum of the loss mask), a scalar in fp32."""
    extras: Mapping[str, tuple[Tensor, Tensor]] = MappingProxyType({})
    """Further loss terms by name, each as a sum and its number of tokens; terms over other tokens
    come last. Training adds their gradients to the gradient of the loss."""

    def mean(self) -> Tensor:
        """Mean over the counted tokens; 0 if there are none, not 0 / 0."""
        return _weighted(self.loss_sum, self.num_tokens, None)

    def weighted(self, weights: Tensor | None) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the loss times a weight, or its mean without a weight, and the extras likewise.

        Args:
            weights: Weight of the loss, and of each of the extras over other tokens. The value is
                without the extras, its gradient is with them.
        """
        factors: list[Tensor | None] = [None] if weights is None else [*weights.unbind()]
        loss = _weighted(self.loss_sum, self.num_tokens, first := factors[0])
        extras = {}
        factors = [first] * (len(self.extras) + 1 - len(factors)) + factors[1:]
        for (name, sums), weight in zip(self.extras.items(), factors, strict=True):
            mean = _weighted(*sums, weight)
            extras[name] = mean.detach()
            loss = loss + (mean - mean.detach())
        return loss, extras

    def of_all_slices(self, group: Group) -> TokenLoss:
        """The loss of complete sequences; each rank of a group has a slice."""
        if group.size == 1:
            return self
        extras = (total for total, _ in self.extras.values())
        sums = torch.stack([self.loss_sum, self.num_tokens, *extras])
        loss_sum, num_tokens, *totals = sum_of_slices(sums, group).unbind()
        pairs = [(total.detach(), num_tokens) for total in totals]
        return TokenLoss(loss_sum, num_tokens, dict(zip(self.extras, pairs, strict=True)))


def _weighted(total: Tensor, count: Tensor, weight: Tensor | None) -> Tensor:
    """The total times a weight. None: divided by the count, unless that is 0."""
    return total / torch.where(count > 0, count, 1.0) if weight is None else total * weight


class OutputLayer(nn.Module):
    """Output layer and loss in one, because the loss is computed without storing the logits.

    Args:
        vocab_size: Rows that are tokens.
        softmax_rows: Rows over which the loss normalizes.
        weight: A weight of its own. None: the weight is the embedding's, passed to each call.
        group: Tensor-parallel group.
        init: Draws the weight.
        loss: Computes the loss instead of the cross entropy.
        terms: The z-loss and the bound of the logits.
        bias: A bias of the logits. None: they have none.
    """

    product: Product | None = None
    """Takes the place of the weight in the logits, without gradients."""

    def __init__(
        self,
        vocab_size: int,
        softmax_rows: int,
        weight: Weight | None,
        *,
        group: Group,
        init: Draws,
        loss: LossFunction | None = None,
        terms: LossTerms = PLAIN,
        bias: Weight | None = None,
    ) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.softmax_rows = softmax_rows
        self.group = group
        self.kernels = EAGER
        self.loss_function = loss
        self.terms = terms
        self.weight = None if weight is None else declared_parameter(weight, group, init)
        self.bias = None if bias is None else declared_parameter(bias, group, init)

    def forward(
        self,
        x_SBH: Tensor,
        labels_BS: Tensor | None = None,
        loss_weights_BS: Tensor | None = None,
        weight_vH: Tensor | None = None,
    ) -> Tensor | TokenLoss:
        """Compute the loss or, without labels, the logits.

        Args:
            x_SBH: Hidden states, with sequence parallelism this rank's part of the sequence.
            labels_BS: Token ids.
            loss_weights_BS: Weight of each label's loss. None: ones.
            weight_vH: The embedding's weight, if it is tied.

        Returns:
            The loss, or logits [B, S, V] in fp32, -inf for padding.

        Raises:
            UserError: If a label is outside the vocabulary (on the CPU).
        """
        weight = self.weight if weight_vH is None else weight_vH
        assert weight is not None
        if self.group.sequence_parallel:
            x_SBH = gather_sequence(x_SBH, self.group)
        if labels_BS is None:
            return self._logits(x_SBH, weight)
        return self._loss(x_SBH, labels_BS, loss_weights_BS, weight)

    def _loss(
        self, x_SBH: Tensor, labels_BS: Tensor, loss_weights_BS: Tensor | None, weight_vH: Tensor
    ) -> TokenLoss:
        validate_token_ids(labels_BS, self.vocab_size)
        weights = None if loss_weights_BS is None else loss_weights_BS.t().reshape(-1).float()
        if self.bias is not None:  # a column of the weight, which multiplies a one
            x_SBH = F.pad(x_SBH, (0, 1), value=1.0)
            weight_vH = torch.cat([weight_vH, self.bias.unsqueeze(1)], dim=1)
        total, z_loss = linear_cross_entropy(
            x_SBH.flatten(0, 1),
            weight_vH,
            labels_BS.t().reshape(-1),
            weights,
            vocab_size=self.softmax_rows,
            group=self.group,
            kernels=self.kernels,
            function=self.loss_function,
            terms=self.terms,
        )
        count = total.new_full((), labels_BS.numel()) if weights is None else weights.sum()
        return TokenLoss(total, count, {} if z_loss is None else {Z_LOSS: (z_loss, count)})

    def _logits(self, x_SBH: Tensor, weight_vH: Tensor) -> Tensor:
        local = multiply(x_SBH.transpose(0, 1), weight_vH, self.bias, self.product)
        logits = gather_from_group(local, self.group).float()
        if (cap := self.terms.softcap) is not None:
            logits = cap * torch.tanh(logits / cap)
        logits[..., self.vocab_size :] = -torch.inf
        return logits
