"""Vocabulary-parallel embedding (Shoeybi et al. 2019, section 3): the rows are sharded."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_ds.config.devices import is_host
from megatron_ds.config.problems import user_error
from megatron_ds.parallel.collectives import reduce_from_group_, reduce_scatter_sequence
from megatron_ds.parallel.mesh import Group
from megatron_ds.parallel.sharding import Draws, declared_parameter
from megatron_ds.parallel.weights import Weight


def validate_token_ids(ids: Tensor, vocab_size: int) -> None:
    """Validate that token ids are in the vocabulary.

    Reading the result would force a synchronization, so the check runs on the device and fails
    asynchronously, where torch has such an assertion for the device.

    Raises:
        UserError: If an id is outside (on a CPU, and on devices without assertions).
    """
    if ids.numel() == 0:
        return
    if not is_host(ids.device.type) and _assert_on_device(ids, vocab_size):
        return
    low, high = (int(bound) for bound in torch.aminmax(ids))
    if low < 0 or high >= vocab_size:
        wrong = low if low < 0 else high
        raise user_error(
            "token-id-outside-vocabulary",
            wrong=wrong,
            vocab_size=vocab_size,
            largest=vocab_size - 1,
        )


def _assert_on_device(ids: Tensor, vocab_size: int) -> bool:
    """Assert it asynchronously; False if torch has no kernel for that on this device."""
    valid = ((ids >= 0) & (ids < vocab_size)).all()
    try:
        torch._assert_async(valid, f"a token id is outside the vocabulary of {vocab_size}")
    except NotImplementedError:
        return False
    return True


class VocabParallelEmbedding(nn.Module):
    """Token ids of any shape to [..., hidden], replicated on every rank.

    With sequence parallelism, every rank has its slice of the first dimension.

    Args:
        weight: The full table [rows, hidden]; its padding is never looked up.
        group: Tensor-parallel group.
        init: Draws the table.
    """

    def __init__(self, weight: Weight, *, group: Group, init: Draws) -> None:
        super().__init__()
        self.vocab_size = weight.shape[0] - weight.padding
        self.group = group
        self.weight = declared_parameter(weight, group, init)
        self.rows = weight.shape[0] // group.size
        self.first_row = group.rank * self.rows

    def forward(self, ids: Tensor) -> Tensor:
        validate_token_ids(ids, self.vocab_size)
        if self.group.size == 1:
            return F.embedding(ids, self.weight)
        local = ids - self.first_row
        elsewhere = (local < 0) | (local >= self.rows)
        rows = F.embedding(local.masked_fill(elsewhere, 0), self.weight)
        rows = rows.masked_fill(elsewhere.unsqueeze(-1), 0.0)
        if self.group.sequence_parallel:
            return reduce_scatter_sequence(rows, self.group)
        return reduce_from_group_(rows, self.group)
