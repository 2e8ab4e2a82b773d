"""The collectives of a training step on 8 to 1,024 ranks: kind, group, bytes and order.

One process is each of the ranks in turn (`fake_world`), with a small model and the real engine.
`python -m tests.dist.test_collectives` writes the table, `tests/golden/collectives.txt`, again.

Claim (deepspeed): the ranks of a group send the messages of a step in the same order, asynchronous
where recorded, and as many bytes as planned, in ZeRO 1 to 3 and with tensor, pipeline and expert
parallelism, on 64 to 1,024 ranks; in the proofs with ZeRO 0, Ulysses and context parallelism, too
"""

from __future__ import annotations

import functools
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch

from megatron_ds.config import Config
from megatron_ds.model.experts.router import Router
from megatron_ds.parallel.mesh import Mesh, axis_groups
from megatron_ds.planning.communication import step_traffic
from megatron_ds.planning.memory_inputs import PlannedRun, memory_inputs
from tests.dist.fake_world import AXES, Message, Messages, axis_of, fake_world
from tests.dist.rank_jobs import JobResults, Jobs, run_jobs, selected
from tests.dist.test_planned_communication import (
    LAYOUTS,
    LENGTH,
    WAIT,
    balanced,
    bytes_in_messages,
    calls_after_norm,
    config_of,
    engine_and_step,
)
from tests.tables import UniqueNames, tables

TABLES = tables(__file__, tuple)

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "collectives.txt"
NEGLIGIBLE = 200
"""Bytes of norms, flags, and the loads of experts."""
PADDING = 0.02
"""Of a message that is partitioned, relative to all."""
MORE: dict[str, dict[str, Any]] = TABLES["more"]
ALL_LAYOUTS = UniqueNames([*LAYOUTS.items(), *MORE.items()])
WORLDS = TABLES["worlds"]
"""Ranks of each layout."""
PROOFS = (
    "zero0 fp32",
    "zero2 sp2 tp2",
    "zero3 sp4, llama",
    "zero1 cp4 sp2, kinds by layer",
)
CASES = [pytest.param(name, marks=[pytest.mark.proof] if name in PROOFS else []) for name in WORLDS]
Rows = list[tuple[Message, str]]
"""The messages of a rank, in order, with the names of their groups."""


class Place(NamedTuple):
    """Where a rank is, as far as its messages depend on it."""

    pp_rank: int
    cp_rank: int


def simulate(name: str, ranks: Sequence[int], meshes: Any) -> dict[int, tuple[Place, Rows]]:
    """By rank its place, and its messages in the second step."""
    del meshes
    world = WORLDS[name]
    config = config_of(ALL_LAYOUTS[name], world)
    return {rank: messages_of(config, rank, world) for rank in ranks}


def messages_of(config: Config, rank: int, world: int) -> tuple[Place, Rows]:
    with fake_world(rank, world):
        mesh = Mesh.build(**config.mesh_sizes)
        engine, take_step = engine_and_step(config, mesh)
        parts = mesh.tp.size if config.parallel.sequence_parallel else 1
        length = LENGTH // mesh.sequence.size // parts
        dtype = torch.bfloat16 if config.precision.bf16 else torch.float32
        hidden = torch.empty(length, 1, config.model.hidden_size, dtype=dtype, device="meta")
        with (
            mock.patch.object(Router, "forward", balanced(Router.forward)),
            Messages(hidden, NEGLIGIBLE) as log,
        ):
            # The first step is different: ZeRO-3 learns the order of the layers in it.
            take_step()
            log.sent.clear()
            has_flat = config.deepspeed.zero_stage == 1 and config.precision.bf16
            calls = calls_after_norm(engine) if has_flat else Counter()
            result = take_step()
        assert not result.skipped
        assert calls.pop(WAIT, 0) == has_flat
        assert has_flat <= calls.total() <= 20, calls  # experts gather four flat tensors
        engine._engine.destroy()
        place = Place(mesh.pp.rank, mesh.cp.rank)
        return place, [(each, axis_of(each, mesh)) for each in log.sent]


def representatives(name: str) -> list[int]:
    """The first rank, the last one of each of its groups, and all stages."""
    world = WORLDS[name]
    config = config_of(ALL_LAYOUTS[name], world)
    axes = axis_groups(world, **config.axis_sizes)
    own = {axis: next(ranks for ranks in axes[axis] if 0 in ranks) for axis in AXES}
    ends = (own[axis][-1] for axis in ("tp", "cp", "ulysses", "ep", "dp"))
    return sorted({0, *own["pp"], *ends})


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> JobResults:
    names = dict.fromkeys(params["name"] for _, params in selected(request))
    return run_jobs(1, simulations(names))


def simulations(names: Iterable[str]) -> Jobs:
    return Jobs((name, functools.partial(simulate, name, representatives(name))) for name in names)


@pytest.mark.parametrize("name", CASES)
def test_ranks_of_a_group_communicate_in_the_same_order(name: str, outcomes: JobResults) -> None:
    (found,) = outcomes.of(name)
    orders: dict[tuple[int, ...], dict[int, list[Message]]] = defaultdict(dict)
    for rank, (_, rows) in found.items():
        for message, _ in rows:
            if message.operation != "send":
                orders[message.ranks].setdefault(rank, []).append(message)
    for ranks, by_rank in orders.items():
        assert by_rank.keys() == found.keys() & {*ranks}
        first, *others = by_rank.values()
        assert all(other == first for other in others)
    assert any(len(by_rank) > 1 for by_rank in orders.values())


@pytest.mark.parametrize("name", CASES)
def test_a_step_sends_no_more_bytes_than_planned(name: str, outcomes: JobResults) -> None:
    world = WORLDS[name]
    config = config_of(ALL_LAYOUTS[name], world)
    dp_size = config.parallel.data_parallel_size(world)
    run = PlannedRun.of(config, memory_inputs(config, dp_size, "cpu"))
    (found,) = outcomes.of(name)
    for place, rows in found.values():
        planned: Counter[str] = Counter()
        for each in step_traffic(run, *place):
            if each.size > NEGLIGIBLE * each.messages:
                planned[each.operation] += bytes_in_messages(each)
        sent: Counter[str] = Counter()
        for message, _ in rows:
            sent[message.operation] += message.size
        assert sent.keys() == planned.keys()
        for operation, size in sent.items():
            assert size == pytest.approx(planned[operation], rel=PADDING), operation


@pytest.mark.parametrize("name", CASES)
def test_collectives_are_those_of_the_table(name: str, outcomes: JobResults) -> None:
    (found,) = outcomes.of(name)
    assert table_of(name, found) == golden()[name]


def golden() -> dict[str, str]:
    """The lines of each layout."""
    blocks = GOLDEN.read_text(encoding="utf-8").strip().split("\n\n")
    return {block.partition(" on ")[0].removeprefix("# "): block for block in blocks}


def table_of(name: str, found: dict[int, tuple[Place, Rows]]) -> str:
    """What the first rank of each stage sends, one line for each message or repeated block."""
    lines = [f"# {name} on {WORLDS[name]} ranks"]
    stages: dict[int, Rows] = {}
    for _, (place, rows) in sorted(found.items()):
        stages.setdefault(place.pp_rank, rows)
    for pp_rank, rows in stages.items():
        lines += [f"stage {pp_rank}"] * (len(stages) > 1)
        lines += [f"  {line}" for line in folded([described(*row) for row in rows])]
    return "\n".join(lines)


def described(message: Message, axis: str) -> str:
    mode = " async" if message.is_asynchronous else ""
    return f"{message.operation} {axis} {message.size}{mode}"


def folded(lines: list[str]) -> list[str]:
    """Lines in which repeated blocks are written once, with their number."""
    out = []
    at = 0
    while at < len(lines):
        length = 1
        times = 1
        for size in range(1, (len(lines) - at) // 2 + 1):
            block = lines[at : at + size]
            number = 1
            while lines[at + number * size : at + (number + 1) * size] == block:
                number += 1
            if number > 1 and size * (number - 1) > length * (times - 1):
                length = size
                times = number
        block = lines[at : at + length]
        if times == 1 or length == 1:
            out.append(f"{times} x {block[0]}" if times > 1 else block[0])
        else:
            out += [f"{times} x", *(f"  {line}" for line in folded(block))]
        at += length * times
    return out


def main() -> None:
    """Writes the table again."""
    outcomes = run_jobs(1, simulations(WORLDS))
    tables = [table_of(name, outcomes.of(name)[0]) for name in WORLDS]
    GOLDEN.write_text("\n\n".join(tables) + "\n", encoding="utf-8")


if __name__ == "__main__":
    from tests.dist import test_collectives  # ranks find its functions by this name

    sys.exit(test_collectives.main())
