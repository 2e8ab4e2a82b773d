"""Step time with compiled layers relative to eager ones, in layouts of two ranks.

`benchmarks/train_step.py --cases` runs it. Both train in ranks of their own, of a thread each, that
are idle while others train. With --against, eager layers of another checkout train in turn with
them.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import Contender, Work, free_port, paired_ratio, set_rank
from benchmarks.train_step import LR, WEIGHT_DECAY, Setting, Shape, our_config, start_process_group

RANKS = 2
BOUND = 0.9
"""Largest accepted step time of compiled layers, relative to eager ones of the same layout."""
WARM_UP = 3
"""Steps before the first round, in which layers are compiled."""
MOE = {"num_experts": (4,), "moe_router_topk": 2}
LLAMA = {
    "normalization": "RMSNorm",
    "position_embedding_type": "rope",
    "activation": "swiglu",
    "add_bias_linear": False,
}
DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
EAGER = "eager"
COMPILED = "compiled"
OTHER = "other eager"


@dataclass(frozen=True)
class Case:
    """A layout, and whether the bound applies to it."""

    values: Mapping[str, Any]
    mesh: Mapping[str, Any]
    """Arguments of `Mesh.build`, but for the tensor-parallel size."""
    has_bound: bool = False

    @property
    def tp_size(self) -> int:
        return int(self.values.get("tensor_model_parallel_size", 1))


CASES = {
    "TP 2": Case({"tensor_model_parallel_size": 2}, {}, has_bound=True),
    "TP 2, sequence parallel": Case(
        {"tensor_model_parallel_size": 2, "sequence_parallel": True}, {}
    ),
    "TP 2, Llama's layers": Case({"tensor_model_parallel_size": 2, **LLAMA}, {}),
    "TP 2, dropout": Case({"tensor_model_parallel_size": 2, **DROPOUT}, {}),
    "ZeRO 3": Case({"zero_stage": 3}, {}, has_bound=True),
    "Ulysses 2": Case({"ds_sequence_parallel_size": 2}, {"ulysses_size": 2}),
    "CP 2": Case({"context_parallel_size": 2}, {"cp_size": 2}),
    "EP 2": Case({"expert_model_parallel_size": 2, **MOE}, {"ep_size": 2}),
}
"""Name -> layout of two ranks."""
SHAPE = Shape(layers=8, hidden=256, heads=8, sequence=128, vocab=4096, micro_batch=4)
"""The layers, and not the output layer as in the other tables, have most of the FLOPs."""


@dataclass(frozen=True)
class Report:
    """Measurements of a rank, or of all, in one round."""

    seconds: list[float]
    cpu_seconds: list[float]
    loss: float
    graphs: int
    breaks: int


def measure_cases(
    names: Sequence[str],
    dtypes: Sequence[str],
    rounds: int,
    steps: int,
    against: Path | None = None,
) -> Iterator[dict[str, Any]]:
    """Measure cases, and print the ratios of each.

    Args:
        names: Their names; empty: all.
        dtypes: Precisions.
        rounds: Rounds of each.
        steps: Steps of a round.
        against: Another checkout of this project, whose eager layers the bound is relative to.
    """
    columns = f"{'s':>8}{'CPU s':>8}{'to, s':>8}{'CPU s':>8}{'ratio':>8}{'CPU':>8}"
    print(f"{'layout':26}{'dtype':6}{'':24}{columns}")
    for name, dtype in itertools.product(names or CASES, dtypes):
        reports = _measure(name, dtype, rounds, steps, against)
        compiled = reports[COMPILED][-1]
        pairs = ratios(name, reports)
        for pair in pairs:
            _print(name, dtype, pair)
        print(f"{'':32}{compiled.graphs} graphs, {compiled.breaks} breaks", flush=True)
        yield {
            "case": name,
            "dtype": dtype,
            "against": None if against is None else str(against),
            "pairs": pairs,
            "graphs": compiled.graphs,
            "graph_breaks": compiled.breaks,
            "losses": {side: kept[-1].loss for side, kept in reports.items()},
        }


def ratios(name: str, reports: Mapping[str, list[Report]]) -> list[dict[str, Any]]:
    """The ratios of a case by paired rounds.

    Args:
        name: Name of the case.
        reports: Reports of each side by round.
    """
    wall = {side: [report.seconds for report in kept] for side, kept in reports.items()}
    cpu = {side: [report.cpu_seconds for report in kept] for side, kept in reports.items()}
    pairs = [(COMPILED, EAGER)]
    if OTHER in reports:
        pairs += [(EAGER, OTHER), (COMPILED, OTHER)]
    return [
        {
            "ours": ours,
            "peer": peer,
            "seconds": [_median(wall[side]) for side in (ours, peer)],
            "cpu_seconds": [_median(cpu[side]) for side in (ours, peer)],
            "ratio": paired_ratio(wall[ours], wall[peer]),
            "cpu_ratio": paired_ratio(cpu[ours], cpu[peer]),
            "bound": BOUND if CASES[name].has_bound and (ours, peer) == pairs[-1] else None,
        }
        for ours, peer in pairs
    ]


def _median(rounds: Sequence[Sequence[float]]) -> float:
    return statistics.median(itertools.chain(*rounds))


def _print(name: str, dtype: str, pair: Mapping[str, Any]) -> None:
    sides = zip(pair["seconds"], pair["cpu_seconds"], strict=True)
    times = "".join(f"{wall:8.3f}{cpu:8.3f}" for wall, cpu in sides)
    verdict = ""
    if (bound := pair["bound"]) is not None:
        verdict = f"  {bound} {'met' if pair['ratio'] <= bound else 'MISSED'}"
    title = f"{pair['ours']} / {pair['peer']}"
    ratios = f"{pair['ratio']:8.3f}{pair['cpu_ratio']:8.3f}"
    print(f"{name:26}{dtype:6}{title:24}{times}{ratios}{verdict}", flush=True)


def _measure(
    name: str, dtype: str, rounds: int, steps: int, against: Path | None
) -> dict[str, list[Report]]:
    """Train all sides in turn: their reports by round."""
    here = Path(__file__).resolve().parents[1]
    checkouts = {EAGER: here, COMPILED: here} | ({} if against is None else {OTHER: against})
    with ExitStack() as stack:
        sides = {}
        for side, checkout in checkouts.items():
            setting = checkout.resolve(), name, dtype, side == COMPILED
            sides[side] = stack.enter_context(closing(Side(side, *setting)))
            sides[side].run(WARM_UP)
        reports: dict[str, list[Report]] = {side: [] for side in sides}
        for index in range(rounds):
            # Who is first alternates, so that a growing load affects all.
            for side in list(sides)[:: 1 if index % 2 else -1]:
                reports[side].append(sides[side].run(steps))
    return reports


class Side:
    """The ranks of a layout, which are idle between calls."""

    def __init__(self, side: str, *setting: Any) -> None:
        port = free_port()
        self._ranks = [
            Contender(f"{side}, rank {rank}", build_rank, rank, port, *setting)
            for rank in range(RANKS)
        ]

    def run(self, count: int) -> Report:
        """Train: wall time of the first rank, CPU time of all ranks together."""
        for rank in self._ranks:
            rank.start(count)
        first, *others = (rank.report() for rank in self._ranks)
        for other in others:
            pairs = zip(first.cpu_seconds, other.cpu_seconds, strict=True)
            first.cpu_seconds[:] = [sum(pair) for pair in pairs]
        return first  # type: ignore[no-any-return]

    def close(self) -> None:
        for rank in self._ranks:
            rank.close()


def build_rank(
    rank: int, port: int, checkout: Path, name: str, dtype: str, is_compiled: bool
) -> Work:
    """Build the engine of a rank.

    Args:
        rank: The rank.
        port: Where the first rank listens.
        checkout: Checkout whose package trains.
        name: Name of the case.
        dtype: Precision.
        is_compiled: Whether the layers are compiled.
    """
    set_rank(rank, RANKS, port)
    sys.path.insert(0, str(checkout))
    device = start_process_group(1)
    import torch
    from torch._dynamo.utils import counters

    from megatron_ds.engine.build import build_engine
    from megatron_ds.engine.device_batches import DeviceBatch
    from megatron_ds.parallel.mesh import Mesh
    from megatron_ds.train_state import StepPlan

    case = CASES[name]
    mesh = Mesh.build(case.tp_size, **case.mesh)
    samples = SHAPE.micro_batch * mesh.dp.size
    values = {**case.values, "global_batch_size": samples}
    config = our_config(Setting(SHAPE, dtype, 1), compiled=is_compiled).with_values(values)
    engine = build_engine(config, mesh, device)
    generator = torch.Generator().manual_seed(mesh.dp.rank)
    shape = SHAPE.micro_batch, SHAPE.sequence + 1
    ids = torch.randint(SHAPE.vocab, shape, generator=generator)
    batch = DeviceBatch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), None, position=0)
    plan = StepPlan(1, samples, 1, LR, WEIGHT_DECAY, seq_length=SHAPE.sequence)

    def train(count: int) -> Report:
        """Measure `count` steps after one, since an idle process starts slowly."""
        seconds = []
        cpu_seconds = []
        loss = float("nan")
        for _ in range(count + 1):
            start = time.perf_counter()
            cpu_start = time.process_time()
            loss = float(engine.train_step(iter([batch]), plan).loss)
            seconds.append(time.perf_counter() - start)
            cpu_seconds.append(time.process_time() - cpu_start)
        counted = counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())
        return Report(seconds[1:], cpu_seconds[1:], loss, *counted)

    return train
