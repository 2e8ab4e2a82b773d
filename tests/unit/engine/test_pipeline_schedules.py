"""Idle time of pipeline ranks by DeepSpeed's instructions, as in docs/training/pipeline.md.

Claim (parallel): DualPipeV idles less than 1F1B, by the instructions of both
"""

from __future__ import annotations

from pathlib import Path

import pytest
from deepspeed.runtime.pipe import schedule

from megatron_ds.config import ParallelConfig

FORWARD = 1.0
"""Time of a forward pass through a stage."""
BACKWARD = 2.0
"""Time of a backward pass through a stage."""
PAGE = Path(__file__).resolve().parents[3] / "docs" / "training" / "pipeline.md"
Pass = tuple[bool, int, int]
"""Whether it is a backward pass, its stage, and the micro-batch."""


def passes(parallel: ParallelConfig, rank: int, micro_batches: int) -> list[Pass]:
    """The passes of a rank in their order."""
    own = parallel.stages_of_ranks[rank]
    kind = schedule.TrainSchedule if len(own) == 1 else schedule.DualPipeVSchedule
    counts: dict[tuple[bool, int], int] = {}
    found = []
    for commands in kind(micro_batches, parallel.pipeline_model_parallel_size, rank).steps():
        for command in commands:
            if isinstance(command, (schedule.ForwardPass, schedule.BackwardPass)):
                stage = own[getattr(command, "phase", 0)]
                key = isinstance(command, schedule.BackwardPass), stage
                counts[key] = counts.get(key, -1) + 1
                found.append((*key, counts[key]))
    return found


def idle_fraction(name: str, ranks: int, micro_batches: int) -> float:
    """Part of a step in which ranks wait, if communication takes no time."""
    parallel = ParallelConfig(pipeline_model_parallel_size=ranks, pipeline_schedule=name)
    last = parallel.num_stages - 1
    waiting = [passes(parallel, rank, micro_batches) for rank in range(ranks)]
    ends: dict[Pass, float] = {}
    times = [0.0] * ranks

    def needed(backward: bool, stage: int, micro_batch: int) -> Pass | None:
        if not backward:
            return (False, stage - 1, micro_batch) if stage else None
        return (True, stage + 1, micro_batch) if stage < last else (False, stage, micro_batch)

    while any(waiting):
        for rank, rest in enumerate(waiting):
            while rest and ((before := needed(*rest[0])) is None or before in ends):
                start = max(times[rank], ends[before] if before else 0.0)
                times[rank] = start + (BACKWARD if rest[0][0] else FORWARD)
                ends[rest.pop(0)] = times[rank]
    busy = micro_batches * (FORWARD + BACKWARD) * parallel.num_stages / ranks
    return 1 - busy / max(times)


@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 8), (4, 8), (4, 16), (8, 32)])
def test_idle_times_are_those_of_the_page(ranks: int, micro_batches: int) -> None:
    usual, folded = (idle_fraction(each, ranks, micro_batches) for each in ("1f1b", "dualpipev"))
    assert usual == pytest.approx((ranks - 1) / (micro_batches + ranks - 1))
    row = f"| {ranks} | {micro_batches} | {usual:.0%} | {folded:.0%} |".replace("%", " %")
    assert row in PAGE.read_text(encoding="utf-8")
