"""Checks of sequence parallelism, Megatron's and DeepSpeed-Ulysses, against the other options.

Both split the sequence evenly over their ranks, together over the product of both sizes. Inside
attention, Ulysses also splits the heads of a tensor-parallel rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from megatron_ds.config.checks import divisors, list_numbers, nearest_multiples
from megatron_ds.config.fields import in_effect
from megatron_ds.config.problems import Problem, option, with_value

if TYPE_CHECKING:
    from megatron_ds.config import Config

SIZE, TP_SIZE = "ds_sequence_parallel_size", "tensor_model_parallel_size"


def problems(config: Config) -> Iterator[Problem]:
    """What prevents the sequence parallelism of a configuration."""
    yield from _length_problems(config)
    size = config.parallel.ds_sequence_parallel_size
    if size <= 1:
        return
    if config.runtime.compile:
        yield Problem("sequence-parallelism-with-compile", SIZE, "compile")
    model, tp_size = config.model, config.parallel.tensor_model_parallel_size
    sizes = (tp_size, model.num_attention_heads, model.kv_heads)
    if min(sizes) > 0 and not any(heads % tp_size for heads in sizes[1:]):
        yield from _head_problems(config, size)


def _length_problems(config: Config) -> Iterator[Problem]:
    """Check that every sequence length of the run can be split over the ranks."""
    parallel, schedule = in_effect(config.parallel), config.schedule
    parts, flags, fields = 1, [], []
    if parallel.ds_sequence_parallel_size > 1:
        parts *= parallel.ds_sequence_parallel_size
        flags.append(with_value(parallel, SIZE))
        fields.append(SIZE)
    if parallel.sequence_parallel:
        parts *= parallel.tensor_model_parallel_size
        flags.append(f"{with_value(parallel, TP_SIZE)} with {option('sequence_parallel')}")
        fields += ["sequence_parallel", TP_SIZE]
    lengths: dict[str, tuple[object, int]] = {"seq_length": (config.model, config.model.seq_length)}
    if schedule.curriculum_seqlen is not None:
        start, end, _ = schedule.curriculum_seqlen
        lengths["curriculum_seqlen"] = (schedule, end)
        if start < end:  # the lengths before END are multiples of it
            lengths["curriculum_seqlen_step"] = (schedule, schedule.curriculum_seqlen_step)
    for name, (options, length) in lengths.items():
        if length > 0 and parts > 1 and length % parts:
            yield Problem(
                "sequence-not-divisible",
                name,
                *fields,
                setting=with_value(options, name),
                length=length,
                size=" x ".join(flags),
                parts=parts,
                nearest=nearest_multiples(length, parts),
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
