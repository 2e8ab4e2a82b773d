"""Checks of DeepSpeed-Ulysses sequence parallelism against the other options.

The sequence is split evenly over the ranks, and inside attention the heads of a tensor-parallel
rank are.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from megatron_ds.config.checks import divisors, list_numbers, nearest_multiples
from megatron_ds.config.problems import Problem, with_value

if TYPE_CHECKING:
    from megatron_ds.config import Config

SIZE = "ds_sequence_parallel_size"


def problems(config: Config) -> Iterator[Problem]:
    """What prevents the sequence parallelism of a configuration."""
    size = config.parallel.ds_sequence_parallel_size
    if size <= 1:
        return
    if config.runtime.compile:
        yield Problem("sequence-parallelism-with-compile", SIZE, "compile")
    yield from _length_problems(config, size)
    model, tp_size = config.model, config.parallel.tensor_model_parallel_size
    sizes = (tp_size, model.num_attention_heads, model.kv_heads)
    if min(sizes) > 0 and not any(heads % tp_size for heads in sizes[1:]):
        yield from _head_problems(config, size)


def _length_problems(config: Config, size: int) -> Iterator[Problem]:
    schedule = config.schedule
    lengths: list[tuple[object, str, int]] = [(config.model, "seq_length", config.model.seq_length)]
    if schedule.curriculum_seqlen is not None:
        unit = schedule.curriculum_seqlen_step
        lengths.append((schedule, "curriculum_seqlen_step", unit))  # the first one is a multiple
    for options, name, length in lengths:
        if length > 0 and length % size:
            yield Problem(
                "length-not-divisible-by-sequence-parallel-size",
                name,
                SIZE,
                setting=with_value(options, name),
                size=with_value(config.parallel, SIZE),
                nearest=nearest_multiples(length, size),
            )


def _head_problems(config: Config, size: int) -> Iterator[Problem]:
    model, tp_size = config.model, config.parallel.tensor_model_parallel_size
    heads, kv_heads = model.num_attention_heads // tp_size, model.kv_heads // tp_size
    if heads % size == 0 and (kv_heads % size == 0 or size % kv_heads == 0):
        return
    valid = [
        number for number in divisors(heads) if kv_heads % number == 0 or number % kv_heads == 0
    ]
    yield Problem(
        "heads-not-divisible-by-sequence-parallel-size",
        "num_attention_heads",
        "num_query_groups",
        SIZE,
        size=with_value(config.parallel, SIZE),
        heads=heads,
        kv_heads=kv_heads,
        valid=list_numbers(valid),
    )
