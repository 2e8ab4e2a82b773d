"""Which layers are in fp8, and with which sizes their blocks are of one rank."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from megatron_ds.config import (
    Config,
    ModelConfig,
    ParallelConfig,
    PrecisionConfig,
    ScheduleConfig,
)
from megatron_ds.model.declaration.fp8 import fp8_problems
from tests.problems import codes

MODEL = ModelConfig(
    num_layers=2,
    hidden_size=32,
    num_attention_heads=2,
    ffn_hidden_size=64,
    seq_length=32,
    max_position_embeddings=32,
    vocab_size=40,
)
OF_SHARDS = ["fp8-blocks-of-shards"]
OF_SEQUENCES = ["fp8-blocks-of-shared-sequences"]


def config_of(block: int, samples: int = 2, **parallel: Any) -> Config:
    precision = PrecisionConfig(
        bf16=True,
        fp8_format="e4m3",
        fp8_recipe="blockwise",
        fp8_block_size=block,
        fp8_min_features=1,
    )
    schedule = ScheduleConfig(micro_batch_size=samples)
    options = ParallelConfig(**parallel)
    return Config(model=MODEL, precision=precision, schedule=schedule, parallel=options)


@pytest.mark.parametrize(
    ("size", "block", "expected"),
    [(2, 16, []), (2, 32, OF_SHARDS), (4, 8, []), (4, 16, OF_SHARDS), (1, 32, []), (1, 7, [])],
)
def test_blocks_of_weights_are_of_one_tensor_parallel_rank(
    size: int, block: int, expected: list[str]
) -> None:
    """The projections of queries, keys and values have 32 features each, the inner layer 64."""
    config = config_of(block, tensor_model_parallel_size=size)
    assert codes(fp8_problems(config)) == expected
    rows = dataclasses.replace(config.precision, fp8_recipe="rowwise")
    assert codes(fp8_problems(dataclasses.replace(config, precision=rows))) == []


@pytest.mark.parametrize(
    ("sizes", "samples", "block", "expected"),
    [
        ({"ds_sequence_parallel_size": 2}, 1, 16, []),
        ({"ds_sequence_parallel_size": 2}, 1, 32, OF_SEQUENCES),
        ({"ds_sequence_parallel_size": 2}, 2, 32, []),
        ({"context_parallel_size": 2}, 1, 16, OF_SEQUENCES),  # two chunks of 8 tokens
        ({"context_parallel_size": 2}, 1, 8, []),
        ({"context_parallel_size": 2}, 3, 16, OF_SEQUENCES),
        ({"context_parallel_size": 2, "ds_sequence_parallel_size": 2}, 1, 16, OF_SEQUENCES),
        ({"context_parallel_size": 2, "ds_sequence_parallel_size": 2}, 1, 8, []),
        ({"context_parallel_size": 2, "ds_sequence_parallel_size": 3}, 1, 2, OF_SEQUENCES),
        ({}, 1, 7, []),
    ],
)
def test_blocks_of_tokens_are_of_one_rank_of_a_sequence(
    sizes: dict[str, int], samples: int, block: int, expected: list[str]
) -> None:
    config = config_of(block, samples, **sizes)
    assert codes(fp8_problems(config)) == expected


def test_blocks_of_tokens_are_of_one_rank_at_all_lengths() -> None:
    config = config_of(8, 1, ds_sequence_parallel_size=2)
    for step, expected in ((16, []), (8, OF_SEQUENCES)):
        schedule = dataclasses.replace(
            config.schedule, curriculum_seqlen=(16, 32, 4), curriculum_seqlen_step=step
        )
        assert codes(fp8_problems(dataclasses.replace(config, schedule=schedule))) == expected
