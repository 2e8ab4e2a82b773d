"""Vocabulary-parallel embedding: the rows of the table are cut over the group (Shoeybi et al. 2019,
section 3).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from megatron_ds.config.problems import Problem, UserError
from megatron_ds.parallel.collectives import reduce_from_group
from megatron_ds.parallel.linear import Init
from megatron_ds.parallel.mesh import Group
from megatron_ds.parallel.sharding import ShardSpec, sharded_parameter


def validate_token_ids(ids: torch.Tensor, vocab_size: int) -> None:
    """Refuse token ids outside the vocabulary.

    Raises ValueError that names the id on the CPU. An accelerator would have to be waited for, so
    there the check runs on the device and fails asynchronously.
    """
    if ids.device.type != "cpu":
        inside = ((ids >= 0) & (ids < vocab_size)).all()
        torch._assert_async(inside, f"a token id is outside the vocabulary of {vocab_size}")
        return
    if ids.numel() == 0:
        return
    low, high = (int(bound) for bound in torch.aminmax(ids))
    if low < 0 or high >= vocab_size:
        wrong = low if low < 0 else high
        raise UserError(
            Problem(
                "token-id-outside-vocabulary",
                f"token id {wrong} is outside the vocabulary of {vocab_size} (valid: 0 to "
                f"{vocab_size - 1}); was the data preprocessed with another tokenizer?",
            )
        )


def vocab_parallel_weight(
    vocab_size: int, padded_size: int, hidden: int, *, group: Group, init: Init
) -> nn.Parameter:
    """This rank's rows of a [padded_size, hidden] table whose padding rows are zero."""
    full = F.pad(init((vocab_size, hidden)), (0, 0, 0, padded_size - vocab_size))
    return sharded_parameter(full, ShardSpec(0, (padded_size,)), group.rank, group.size)


class VocabParallelEmbedding(nn.Module):
    """Token ids of any shape to [..., hidden], whole on every rank."""

    def __init__(
        self, vocab_size: int, padded_size: int, hidden: int, *, group: Group, init: Init
    ) -> None:
        """padded_size: rows of the whole table; those from vocab_size on are padding and never
        looked up.
        """
        super().__init__()
        self.vocab_size = vocab_size
        self.group = group
        self.weight = vocab_parallel_weight(vocab_size, padded_size, hidden, group=group, init=init)
        self.first_row = group.rank * (padded_size // group.size)
        self.rows = padded_size // group.size

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        validate_token_ids(ids, self.vocab_size)
        if self.group.size == 1:
            return F.embedding(ids, self.weight)
        local = ids - self.first_row
        elsewhere = (local < 0) | (local >= self.rows)
        rows = F.embedding(local.masked_fill(elsewhere, 0), self.weight)
        return reduce_from_group(rows.masked_fill(elsewhere.unsqueeze(-1), 0.0), self.group)
