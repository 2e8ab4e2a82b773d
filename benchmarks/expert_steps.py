"""Step time of a model of 32 experts, relative to another checkout of this project.

`benchmarks/train_step.py --experts` runs it. The contenders train the same tokens in processes of
their own, of a thread each, one after the other in each round; the first losses must be equal, but
for rounding.
"""

from __future__ import annotations

import functools
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import Contender, Work, in_turn, paired_ratio
from benchmarks.train_step import (
    LR,
    WEIGHT_DECAY,
    Report,
    Setting,
    Shape,
    Training,
    flatten,
    our_config,
    start_process_group,
)

HERE = Path(__file__).resolve().parents[1]
SHAPE = Shape(layers=4, hidden=256, heads=8, sequence=256, vocab=4096, micro_batch=8)
EXPERTS = {"num_experts": (32,), "moe_router_topk": 4, "moe_ffn_hidden_size": 256}
ARCHITECTURE = {
    "activation": "swiglu",
    "normalization": "RMSNorm",
    "position_embedding_type": "rope",
    "add_bias_linear": False,
}
"""The parts of a Llama, as in the case experts-1b of `benchmarks/gpu.py`."""
BOUND = 0.8
"""Largest accepted ratio of the CPU time."""
WARM_UP = 5
"""Steps before the first round: kernels are made for each number of rows."""


def measure_experts(
    against: Path | None, dtypes: Sequence[str], rounds: int, steps: int
) -> Iterator[dict[str, Any]]:
    """Measure each data type, and print a row for it.

    Args:
        against: The other checkout. None: only this one is measured.
        dtypes: Precisions.
        rounds: Rounds of each.
        steps: Steps of a round.
    """
    folders = [HERE, *([] if against is None else [against.resolve()])]
    print(f"{'dtype':6}{'CPU s/step':>12}{'against':>10}{'ratio':>8}{'wall':>8}")
    for dtype in dtypes:
        contenders = [
            Contender(str(folder), functools.partial(_build, str(folder), dtype))
            for folder in folders
        ]
        try:
            in_turn(contenders, 1, WARM_UP)
            reports: list[list[Report]] = in_turn(contenders, rounds, steps)
        finally:
            for contender in contenders:
                contender.close()
        cpu = [[report.cpu_seconds for report in kept] for kept in reports]
        wall = [[report.seconds for report in kept] for kept in reports]
        seconds = [statistics.median(flatten(iter(kept))) for kept in cpu]
        row: dict[str, Any] = {"dtype": dtype, "cpu_seconds": seconds[0]}
        row["losses"] = [kept[0].loss for kept in reports]
        line = f"{dtype:6}{seconds[0]:12.3f}"
        if against is not None:
            row["against"] = seconds[1]
            row["cpu_ratio"] = paired_ratio(*cpu)
            row["ratio"] = paired_ratio(*wall)
            verdict = "met" if row["cpu_ratio"] <= BOUND else "MISSED"
            line += f"{seconds[1]:10.3f}{row['cpu_ratio']:8.3f}{row['ratio']:8.3f}"
            line += f"  {BOUND} of the CPU time {verdict}"
        print(f"{line}  losses {row['losses']}", flush=True)
        yield row


def _build(folder: str, dtype: str) -> Work:
    """Build the engine of a checkout, in a process that has imported none."""
    assert "megatron_ds" not in sys.modules
    sys.path.insert(0, folder)
    device = start_process_group(1, dtype)
    from megatron_ds.engine.build import build_engine
    from megatron_ds.engine.device_batches import DeviceBatch
    from megatron_ds.parallel.mesh import Mesh
    from megatron_ds.train_state import StepPlan

    config = our_config(Setting(SHAPE, dtype, 1), compiled=False)
    size = SHAPE.micro_batch
    values = {**EXPERTS, **ARCHITECTURE, "global_batch_size": size}
    engine = build_engine(config.with_values(values), Mesh.build(1), device)
    plan = StepPlan(1, size, 1, LR, WEIGHT_DECAY, seq_length=SHAPE.sequence)

    def step(tokens: Any, labels: Any) -> float:
        batch = DeviceBatch(tokens, labels, None, position=0)
        return float(engine.train_step(iter([batch]), plan).loss)

    return Training(SHAPE, step)
