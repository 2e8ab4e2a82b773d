"""Filling an engine from a checkpoint of another layout: what is read, and what is rejected."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from megatron_ds.engine.deepspeed.partitions import ParameterPlace
from megatron_ds.engine.states import resharding
from megatron_ds.engine.states.flats import Part
from megatron_ds.engine.states.resharding import Resharding
from megatron_ds.engine.states.state_reader import MASTER, Columns, TensorReader, part_of
from megatron_ds.parallel.mesh import Mesh
from megatron_ds.parallel.sharding import mark_sharded
from megatron_ds.parallel.weights import ShardSpec
from tests.problems import raises_problem

SHAPES = {"fc.weight": (7, 6), "fc.bias": (7,), "embedding.word.weight": (10, 4)}


class States:
    """Random full tensors; records what is read."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], steps: int | None = 3) -> None:
        self.shapes = shapes
        self._steps = steps
        self.counters = {"global_steps": 5}
        self.loss_scaler = None
        self.values = {
            (name, kind): torch.rand(shape)
            for name, shape in shapes.items()
            for kind in (MASTER, "exp_avg", "exp_avg_sq")
        }
        self.reads: list[int] = []

    def state_names(self, name: str) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq") if self._steps is not None else ()

    def steps(self, name: str) -> int | None:
        return self._steps

    def tensor(self, name: str, kind: str) -> TensorReader:
        full = self.values[name, kind]

        def load(rows: range, columns: Columns | None) -> torch.Tensor:
            found = part_of(full, rows, columns)
            self.reads.append(found.numel())
            return found

        return TensorReader(tuple(full.shape), full.dtype, load)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 7)
        self.embedding = nn.Module()
        self.embedding.word = nn.Embedding(10, 4)
        mark_sharded(self.fc.weight, ShardSpec(1, (6,)))
        mark_sharded(self.embedding.word.weight, ShardSpec(0, (10,)))


def engine_of(model: nn.Module) -> Any:
    optimizer = torch.optim.AdamW(model.parameters())
    return SimpleNamespace(module=model, basic_optimizer=optimizer, optimizer=optimizer)


def reshard(engine: Any, source: States) -> None:
    Resharding(engine, 0, Mesh.single(), source).run()


def test_weights_moments_and_steps_are_those_of_the_checkpoint() -> None:
    model = Model()
    source = States(SHAPES)
    engine = engine_of(model)
    reshard(engine, source)
    for name, parameter in model.named_parameters():
        state = engine.basic_optimizer.state[parameter]
        assert torch.equal(parameter, source.values[name, MASTER])
        assert state.keys() == {"exp_avg", "exp_avg_sq", "step"}
        assert torch.equal(state["exp_avg"], source.values[name, "exp_avg"])
        assert torch.equal(state["exp_avg_sq"], source.values[name, "exp_avg_sq"])
        assert state["step"] == 3
    assert engine.global_steps == 5


@pytest.mark.parametrize("block", [1, 13, 10**6])
def test_every_element_is_read_once_in_blocks_of_rows(
    block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resharding, "BLOCK", block)
    source = States(SHAPES)
    reshard(engine_of(Model()), source)
    assert sum(source.reads) == 3 * sum(map(math.prod, SHAPES.values()))
    widest_row = max(math.prod(shape[1:]) for shape in SHAPES.values())
    assert max(source.reads) <= max(block, widest_row)


@pytest.mark.parametrize("block", [1, 13, 10**6])
@pytest.mark.parametrize("elements", [range(9, 40), range(31), range(13, 17), range(12, 42)])
def test_a_part_that_begins_inside_a_row_has_all_its_elements(
    elements: range, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resharding, "BLOCK", block)
    model = Model()
    source = States(SHAPES)
    filling = Resharding(engine_of(model), 0, Mesh.single(), source)
    place = ParameterPlace("fc.weight", SHAPES["fc.weight"], 0)
    part = Part(place, model.fc.weight, 0, elements)
    expected = source.values["fc.weight", MASTER].flatten()[elements.start : elements.stop]
    assert torch.equal(torch.cat(list(filling._blocks(part, MASTER))), expected)


def test_states_before_the_first_step_are_empty() -> None:
    model = Model()
    engine = engine_of(model)
    reshard(engine, States(SHAPES))
    reshard(engine, States(SHAPES, steps=None))
    assert not engine.basic_optimizer.state


def test_padding_of_the_vocabulary_may_differ() -> None:
    model = Model()
    reshard(engine_of(model), States({**SHAPES, "embedding.word.weight": (8, 4)}))
    assert model.embedding.word.weight[8:].count_nonzero() == 0
    assert model.embedding.word.weight[:8].count_nonzero() == 32


@pytest.mark.parametrize(
    "changed", [{"fc.weight": (6, 7)}, {"fc.bias": (8,)}, {"embedding.word.weight": (10, 5)}]
)
def test_another_shape_is_rejected(changed: dict[str, tuple[int, ...]]) -> None:
    with raises_problem("weights-shape-mismatch", contains=next(iter(changed))):
        reshard(engine_of(Model()), States({**SHAPES, **changed}))


def test_other_parameters_are_rejected() -> None:
    without_bias = {name: shape for name, shape in SHAPES.items() if name != "fc.bias"}
    with raises_problem("weights-names-mismatch", contains="fc.other") as raised:
        reshard(engine_of(Model()), States({**without_bias, "fc.other": (7,)}))
    assert "fc.bias" in str(raised.problem)
