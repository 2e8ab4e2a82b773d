"""Which lengths and heads sequence-parallel ranks can share, and what is rejected before a run."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_ds.config import Config
from megatron_ds.config.problems import Problem
from megatron_ds.engine.ds_config.fields import replace_fields
from tests.problems import codes

VALID = {
    "num_layers": 2,
    "hidden_size": 48,
    "num_attention_heads": 12,
    "seq_length": 64,
    "vocab_size": 91,
    "tokenizer_type": "NullTokenizer",
    "data_path": ("data",),
    "micro_batch_size": 1,
    "train_iters": 5,
    "lr": 1.0,
}
SIZE = "ds_sequence_parallel_size"
HEADS = "heads-not-divisible-by-sequence-parallel-size"
LENGTH = "sequence-not-divisible"
BOTH = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
BOTH_FIELDS = (SIZE, "sequence_parallel", "tensor_model_parallel_size")


def problems(size: int, world_size: int = 24, **changes: Any) -> list[Problem]:
    config = replace_fields(Config(), {**VALID, SIZE: size, **changes})
    return config.problems(world_size)


@pytest.mark.parametrize(
    ("size", "changes"),
    [
        (2, {}),
        (4, {"num_query_groups": 2}),  # two ranks share a key-value head
        (4, {"num_query_groups": 1}),
        (2, {"num_query_groups": 6}),
        (2, {"num_query_groups": 2, "tensor_model_parallel_size": 2}),
        (3, {"seq_length": 66}),
        (4, {"curriculum_seqlen": (8, 64, 10), "curriculum_seqlen_step": 8}),
        (4, {"curriculum_seqlen": (8, 60, 10), "curriculum_seqlen_step": 8}),
        (4, {"curriculum_seqlen": (36, 36, 10), "curriculum_seqlen_step": 6}),  # one length
        (2, {**BOTH, "seq_length": 68}),
        (2, {"tensor_model_parallel_size": 2, "seq_length": 66}),
    ],
)
def test_equal_shares_are_accepted(size: int, changes: dict[str, Any]) -> None:
    assert problems(size, **changes) == []


@pytest.mark.parametrize(
    ("size", "changes", "code", "names"),
    [
        (3, {}, LENGTH, ("seq_length", SIZE)),
        (
            *(4, {"curriculum_seqlen": (6, 64, 10), "curriculum_seqlen_step": 6}),
            *(LENGTH, ("curriculum_seqlen_step", SIZE)),
        ),
        (4, {"curriculum_seqlen": (8, 62, 10)}, LENGTH, ("curriculum_seqlen", SIZE)),
        (2, {**BOTH, "seq_length": 66}, LENGTH, ("seq_length", *BOTH_FIELDS)),
        (8, {}, HEADS, ("num_attention_heads", "num_query_groups", SIZE)),
        # Three query heads of a rank, of two key-value heads: no whole number of queries for each.
        (4, {"num_query_groups": 6}, HEADS, ("num_attention_heads", "num_query_groups", SIZE)),
        (
            *(4, {"num_query_groups": 6, "tensor_model_parallel_size": 6}),
            *(HEADS, ("num_attention_heads", "num_query_groups", SIZE)),
        ),
        (2, {"compile": True}, "sequence-parallelism-with-compile", (SIZE, "compile")),
    ],
)
def test_unequal_shares_are_rejected(
    size: int, changes: dict[str, Any], code: str, names: tuple[str, ...]
) -> None:
    (problem,) = problems(size, **changes)
    assert problem.code == code
    assert problem.fields == names


def test_ranks_that_share_sequences_have_no_samples_of_their_own() -> None:
    parallel = replace_fields(Config(), {SIZE: 4, "tensor_model_parallel_size": 2}).parallel
    assert parallel.data_parallel_size(24) == 3
    assert parallel.data_parallel_size(20) == 0
    found = problems(4, world_size=20)
    assert found == []
    found = problems(4, world_size=18)
    assert codes(found) == ["world-size-not-divisible-by-sequence-parallel-size"]
