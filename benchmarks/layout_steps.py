"""Step time with compiled layers relative to eager ones, in layouts of two ranks.

`benchmarks/train_step.py --cases` runs it. Both train in the same processes, of a thread each, one
after the other in each round.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.common import on_ranks, paired_ratio
from benchmarks.train_step import LR, WEIGHT_DECAY, Setting, Shape, our_config

RANKS = 2
BOUND = 0.9
"""Largest accepted step time of compiled layers, relative to eager ones of the same layout."""
MOE = {"num_experts": (4,), "moe_router_topk": 2}
Step = Callable[[], float]


@dataclass(frozen=True)
class Case:
    """A layout, and whether the bound applies to it."""

    values: Mapping[str, Any]
    has_bound: bool = False


CASES = {
    "TP 2": Case({"tensor_model_parallel_size": 2}, has_bound=True),
    "TP 2, sequence parallel": Case({"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "ZeRO 3": Case({"zero_stage": 3}, has_bound=True),
    "Ulysses 2": Case({"ds_sequence_parallel_size": 2}),
    "CP 2": Case({"context_parallel_size": 2}),
    "EP 2": Case({"expert_model_parallel_size": 2, **MOE}),
}
"""Name -> layout of two ranks."""
SHAPE = Shape(layers=8, hidden=256, heads=8, sequence=128, vocab=4096, micro_batch=4)
"""The layers, and not the output layer as in the other tables, have most of the FLOPs."""


def measure_cases(
    names: Sequence[str], dtypes: Sequence[str], rounds: int, steps: int
) -> Iterator[dict[str, Any]]:
    """Measure cases, and print a row for each.

    Args:
        names: Their names; empty: all.
        dtypes: Precisions.
        rounds: Rounds of each.
        steps: Steps of a round.
    """
    columns = f"{'eager, s':>10}{'compiled, s':>13}{'ratio':>8}{'CPU':>8}{'graphs':>8}{'breaks':>8}"
    print(f"{'layout':26}{'dtype':6}{columns}")
    for name, dtype in itertools.product(names or CASES, dtypes):
        found: dict[str, Any] = on_ranks(_compare, RANKS, name, dtype, rounds, steps)
        ratios = f"{found['ratio']:8.3f}{found['cpu_ratio']:8.3f}"
        counts = f"{found['graphs']:8}{found['graph_breaks']:8}"
        times = f"{found['eager_seconds']:10.3f}{found['compiled_seconds']:13.3f}"
        verdict = ""
        if CASES[name].has_bound:
            is_met = found["ratio"] <= BOUND
            verdict = f"  {BOUND} {'met' if is_met else 'MISSED'}"
        print(f"{name:26}{dtype:6}{times}{ratios}{counts}{verdict}", flush=True)
        yield {"case": name, "dtype": dtype, **found}


def _compare(name: str, dtype: str, rounds: int, steps: int) -> dict[str, Any]:
    """Train both in turn. Collective, in an initialized process group."""
    import torch.distributed as dist
    from torch._dynamo.utils import counters

    loops = {
        is_compiled: _step(name, dtype, is_compiled=is_compiled) for is_compiled in (False, True)
    }
    for step in loops.values():  # compiles and warms up
        for _ in range(3):
            step()
    wall: dict[bool, list[list[float]]] = {False: [], True: []}
    cpu: dict[bool, list[list[float]]] = {False: [], True: []}
    losses = dict[bool, float]()
    for number in range(rounds):
        # Who is first alternates, so that a growing load affects both.
        for is_compiled in (False, True) if number % 2 else (True, False):
            dist.barrier()
            seconds: list[float] = []
            cpu_seconds: list[float] = []
            for _ in range(steps):
                start = time.perf_counter()
                cpu_start = time.process_time()
                losses[is_compiled] = loops[is_compiled]()
                seconds.append(time.perf_counter() - start)
                cpu_seconds.append(time.process_time() - cpu_start)
            wall[is_compiled].append(seconds)
            cpu[is_compiled].append(cpu_seconds)
    medians = {which: statistics.median(itertools.chain(*kept)) for which, kept in wall.items()}
    return {
        "eager_seconds": medians[False],
        "compiled_seconds": medians[True],
        "ratio": paired_ratio(wall[True], wall[False]),
        "cpu_ratio": paired_ratio(cpu[True], cpu[False]),
        "graphs": counters["stats"]["unique_graphs"],
        "graph_breaks": sum(counters["graph_break"].values()),
        "losses": {"eager": losses[False], "compiled": losses[True]},
    }


def _step(name: str, dtype: str, *, is_compiled: bool) -> Step:
    import torch

    from megatron_ds.engine.build import build_engine
    from megatron_ds.engine.device_batches import DeviceBatch
    from megatron_ds.model.kernels.half_products import replace_slow_products
    from megatron_ds.parallel.mesh import Mesh
    from megatron_ds.train_state import StepPlan

    device = torch.device("cpu")
    config = our_config(Setting(SHAPE, dtype, 1), compiled=is_compiled)
    config = config.with_values(CASES[name].values)
    mesh = Mesh.build(**config.mesh_sizes)
    samples = SHAPE.micro_batch * mesh.dp.size
    config = config.with_values({"global_batch_size": samples})
    if dtype == "bf16":
        replace_slow_products(torch.bfloat16, device)
    engine = build_engine(config, mesh, device)
    generator = torch.Generator().manual_seed(mesh.dp.rank)
    shape = SHAPE.micro_batch, SHAPE.sequence + 1
    ids = torch.randint(SHAPE.vocab, shape, generator=generator)
    batch = DeviceBatch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), None, position=0)
    plan = StepPlan(1, samples, 1, LR, WEIGHT_DECAY, seq_length=SHAPE.sequence)

    def step() -> float:
        return float(engine.train_step(iter([batch]), plan).loss)

    return step
