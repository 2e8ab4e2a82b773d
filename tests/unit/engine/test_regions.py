"""Marks of a step: their regions, and that they change nothing and leave nothing behind."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ds.config import ModelConfig, ProfilingConfig
from megatron_ds.engine.device_batches import DeviceBatches
from megatron_ds.engine.measures import COARSE, StepTimers
from megatron_ds.engine.regions import COLLECTIVES, mark_collectives, mark_layers, mark_passes
from megatron_ds.model.gpt import GPTModel
from megatron_ds.parallel.mesh import Mesh
from tests.unit.model.dense import TINY, build_model, gradients

CONFIG = ModelConfig(**TINY, vocab_size=90, seq_length=16, make_vocab_size_divisible_by=2)


class Regions:
    """What was opened, each inside what was open."""

    def __init__(self) -> None:
        self.paths: list[str] = []
        self._open: list[str] = []

    @contextmanager
    def open(self, name: str) -> Iterator[None]:
        self._open.append(name)
        self.paths.append("/".join(self._open))
        try:
            yield
        finally:
            assert self._open.pop() == name


def train(model: GPTModel) -> dict[str, Tensor]:
    """The gradients of a step, and its loss."""
    model.zero_grad()
    tokens = torch.arange(24).view(2, 12)
    loss = model(tokens, tokens.roll(-1)).mean()
    loss.backward()
    return gradients(model) | {"loss": loss.detach()}


def attributes(model: GPTModel) -> list[dict[str, Any]]:
    return [dict(vars(module)) for module in model.modules()]


@pytest.mark.parametrize("recompute", [None, "full", "selective"])
def test_layers_are_marked_in_both_passes(recompute: str | None) -> None:
    """Claim (logging): outside its steps a profile leaves functions and modules as they are, and
    imports no profiler before"""
    model = build_model(CONFIG, recompute)
    regions = Regions()
    before = attributes(model)
    expected = train(model)
    with mark_layers(model, regions.open):
        found = train(model)
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    marked = attributes(model)
    unmarked = len(regions.paths)
    assert [set(one) for one in marked] == [set(one) for one in before]
    train(model)
    assert len(regions.paths) == unmarked

    forward = [path for path in regions.paths if "backward" not in path]
    layer = [f"{{0}}/{part}" for part in ("attention", "attention", "attention", "MLP")]
    layers = [name.format(f"layer {n}") for n in range(2) for name in ("{0}", *layer)]
    assert forward == ["embedding", *layers, "final norm", "head"]
    backward = [path for path in regions.paths if path.endswith("backward")]
    parts = ["{0}", "{0}/MLP backward", "{0}/attention backward"]
    layers = [part.format(f"layer {n} backward") for n in (1, 0) for part in parts]
    assert backward == ["head backward", "final norm backward", *layers, "embedding backward"]
    recomputed = [path for path in regions.paths if " backward/layer 0" in path]
    assert len(recomputed) == (5 if recompute == "full" else 0)


class Engine:
    """As DeepSpeed's, of which only these are called."""

    def forward(self) -> str:
        return "loss"

    def backward(self, loss: str) -> None:
        assert loss == "loss"
        dist.all_reduce(torch.ones(1))

    def step(self) -> None:
        self.forward()  # as a recomputation


def run(engine: Engine) -> None:
    engine.backward(engine.forward())
    engine.step()


def test_passes_are_marked_and_nothing_is_left() -> None:
    engine = Engine()
    regions = Regions()
    read = DeviceBatches.__next__
    engine.backward = lambda loss: None  # type: ignore[method-assign]
    own = dict(vars(engine))
    with mark_passes(engine, regions.open):
        run(engine)
        assert DeviceBatches.__next__ is not read
    assert vars(engine) == own
    assert DeviceBatches.__next__ is read
    passes = ["forward-compute", "backward-compute", "optimizer", "optimizer/forward-compute"]
    assert regions.paths == passes


def test_collectives_are_marked_by_axis(one_process: None) -> None:
    """Claim (logging): outside its steps a profile leaves functions and modules as they are, and
    imports no profiler before"""
    regions = Regions()
    x = torch.ones(2)
    functions = [getattr(dist, name) for name in COLLECTIVES]
    with mark_collectives(Mesh.build(1), regions.open):
        dist.all_reduce(x, dist.ReduceOp.SUM, dist.group.WORLD)
        work = dist.broadcast(x, src=0, async_op=True)
        work.wait()
        assert work.is_completed()
        dist.all_gather_object([None], 1)
    names = ["all_reduce", "broadcast", "broadcast", "all_gather_object"]
    assert regions.paths == [f"{name}[tp]" for name in names]
    assert [getattr(dist, name) for name in COLLECTIVES] == functions


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        (0, set()),
        (1, {*COARSE, "step", "communication"}),
        (2, {*COARSE, "step", "communication", "all_reduce[tp]"}),
    ],
)
def test_steps_that_end_an_interval_are_timed(
    one_process: None, level: int, expected: set[str]
) -> None:
    """Claim (logging): steps that end no log interval are not timed"""
    options = ProfilingConfig(timing_log_level=level)
    timers = StepTimers(options, interval=2, is_compiled=False)
    engine = Engine()
    mesh = Mesh.build(1)
    for iteration in (1, 2, 3):
        with timers.measuring(engine, mesh, iteration):
            assert bool(vars(engine)) == (level > 0 and iteration == 2)
            run(engine)
    times = timers.take()
    assert set(times) == expected
    assert all(time > 0 for time in times.values())
    assert set(timers.take().values()) <= {0.0}


def test_compiled_code_keeps_its_collectives(one_process: None) -> None:
    options = ProfilingConfig(timing_log_level=2)
    timers = StepTimers(options, interval=1, is_compiled=True)
    mesh = Mesh.build(1)
    all_reduce = dist.all_reduce
    with timers.measuring(Engine(), mesh, 1):
        assert dist.all_reduce is all_reduce


def test_instructions_of_a_pipeline_are_marked() -> None:
    from deepspeed.runtime.pipe import schedule

    regions = Regions()
    calls = list[str]()
    kinds = {"sent": schedule.SendActivation, "step": schedule.OptimizerStep}
    original = {kind: lambda self, name=name: calls.append(name) for name, kind in kinds.items()}
    engine = SimpleNamespace(_INSTRUCTION_MAP=original)
    with mark_passes(engine, regions.open):
        for kind in kinds.values():
            engine._INSTRUCTION_MAP[kind](engine)
    assert engine._INSTRUCTION_MAP is original
    assert (regions.paths, calls) == (["forward-send", "optimizer"], ["sent", "step"])
