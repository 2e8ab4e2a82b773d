"""Fills an engine with the states of a checkpoint that another layout saved.

Every rank reads the elements of its own flat tensors, in blocks: master weights and moments of the
optimizer, then the number of steps, and the states of layers. The engine keeps its settings. The
parameters in the precision of the run follow from the master weights as after a step. Knows no
files. Reads private attributes of the pinned DeepSpeed.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_ds.config.problems import user_error
from megatron_ds.engine.deepspeed import nvme_states
from megatron_ds.engine.states.flats import Flat, Part, own_flats
from megatron_ds.engine.states.state_reader import (
    MASTER,
    VOCABULARY_TABLES,
    StateReader,
    full_shape,
    join,
)
from megatron_ds.parallel.collectives import gather_objects
from megatron_ds.parallel.mesh import Mesh
from megatron_ds.parallel.sharding import expert_group, shard_spec, states_of

BLOCK = 2**22
"""Elements that are read at once, unless a row has more."""


class Resharding:
    """The filling of one engine.

    Args:
        engine: Engine of `deepspeed.initialize`.
        stage: ZeRO stage.
        mesh: Mesh of this process.
        source: The checkpoint.

    Raises:
        UserError: If the checkpoint has other parameters.
    """

    def __init__(self, engine: Any, stage: int, mesh: Mesh, source: StateReader) -> None:
        self._engine = engine
        self._stage = stage
        self._mesh = mesh
        self._source = source
        self._flats = list(own_flats(engine, stage, mesh))
        self._check_parameters()

    def run(self) -> None:
        """Fill the engine. Collective."""
        engine = self._engine
        optimizer = self._engine.optimizer
        if self._stage == 3:
            optimizer.checkpoint_event_prologue()
            self._fill_partitioned_parameters()
            optimizer.checkpoint_event_epilogue()
        else:
            engine.basic_optimizer.load_state_dict(self._new_state(range(0)))
            for flat in self._flats:
                self._fill(flat.master, MASTER, flat.parts)
            if self._stage > 0:
                optimizer.update_lp_params()
        for name, state in states_of(engine.module).items():
            state.copy_(self._source.tensor(name, MASTER).read())
        for name, value in self._source.counters.items():
            setattr(engine, name, value)

    def _fill_partitioned_parameters(self) -> None:
        optimizer = self._engine.optimizer
        on_disk = nvme_states.swapped_sizes(optimizer)
        optimizer._set_fp32_optimizer_param_groups()
        self._engine.basic_optimizer.load_state_dict(self._new_state(on_disk))
        optimizer._clear_fp32_optimizer_param_groups()
        for index, flat in enumerate(self._flats):
            if index not in on_disk:
                self._fill(flat.master, MASTER, flat.parts)
                optimizer._reassign_or_swap_out_partitioned_parameters(index)
                continue
            values = {}
            for key in (MASTER, *self._kinds(flat)):
                values[key] = torch.zeros(on_disk[index], dtype=flat.master.dtype)
                self._fill(values[key], key, flat.parts)
            nvme_states.store(optimizer, index, values.pop(MASTER), values)

    def _new_state(self, on_disk: Container[int]) -> dict[str, Any]:
        """A state dict for the optimizer, with states of the checkpoint.

        States that the optimizer has are filled in place.

        Args:
            on_disk: Flat tensors whose states are in files.
        """
        optimizer = self._engine.basic_optimizer
        states: dict[int, dict[str, Any]] = {}
        for index, flat in enumerate(self._flats):
            present: dict[str, Any] = optimizer.state.get(flat.master, {})
            state: dict[str, Any] = {}
            for key in self._kinds(flat):
                if index in on_disk:
                    state[key] = flat.master.new_empty(0)
                    continue
                state[key] = present[key] if key in present else torch.zeros_like(flat.master)
                self._fill(state[key], key, flat.parts)
            steps = self._source.steps(flat.names[0])
            if state and steps is not None:
                state["step"] = steps
            if state:
                states[index] = state
        return {"state": states, "param_groups": optimizer.state_dict()["param_groups"]}

    def _kinds(self, flat: Flat) -> tuple[str, ...]:
        return self._source.state_names(flat.names[0])

    def _fill(self, flat: Tensor, key: str, parts: Sequence[Part]) -> None:
        values = flat.detach().view(-1)
        for part in parts:
            position = part.position
            for block in self._blocks(part, key):
                values[position : position + block.numel()].copy_(block)
                position += block.numel()
            assert position == part.position + len(part.elements)

    def _blocks(self, part: Part, key: str) -> Iterator[Tensor]:
        """The elements of a part, one-dimensional, from few rows at a time."""
        shape = part.place.shape
        width = math.prod(shape[1:])
        step = max(1, BLOCK // width)
        last_row = -(-part.elements.stop // width)
        for start in range(part.elements.start // width, last_row, step):
            rows = range(start, min(start + step, last_row))
            first = rows.start * width
            block = self._read_rows(part, key, rows).flatten()
            yield block[max(part.elements.start - first, 0) : part.elements.stop - first]

    def _read_rows(self, part: Part, key: str, rows: range) -> Tensor:
        """Rows of this rank's shard."""
        name = part.place.name
        tp = self._mesh.tp
        spec = shard_spec(part.parameter)
        read = self._source.tensor(name, key).read
        if expert_group(part.parameter) is not None:
            first = self._mesh.ep.rank * part.place.shape[0]
            rows = range(first + rows.start, first + rows.stop)
        if spec is None:
            return read(rows)
        if spec.dim > 0:
            return read(rows, (spec.dim, spec.ranges(tp.rank, tp.size)))
        blocks = [read(span) for span in spec.full_indices(rows, tp.rank, tp.size)]
        return join(blocks)

    def _check_parameters(self) -> None:
        shapes = {
            name: full_shape(
                getattr(parameter, "ds_shape", parameter.shape),
                shard_spec(parameter),
                self._mesh.ep.size if expert_group(parameter) is not None else 1,
            )
            for name, parameter in self._engine.module.named_parameters()
        } | {name: tuple(state.shape) for name, state in states_of(self._engine.module).items()}
        stages = gather_objects(shapes, self._mesh.pp)
        expected_shapes = {name: shape for stage in stages for name, shape in stage.items()}
        saved = self._source.shapes
        if expected_shapes.keys() != saved.keys():
            raise user_error(
                "weights-names-mismatch",
                parameters=sorted(expected_shapes.keys() - saved.keys()),
                unknown=sorted(saved.keys() - expected_shapes.keys()),
            )
        for name, shape in expected_shapes.items():
            skipped = 1 if name in VOCABULARY_TABLES else 0
            if shape[skipped:] != saved[name][skipped:]:
                raise user_error(
                    "weights-shape-mismatch",
                    name=name,
                    shape=list(saved[name]),
                    expected=list(shape),
                )
