"""Which universal checkpoint --load selects, and what is read from it."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_ds.checkpoint.manager import CheckpointManager
from megatron_ds.checkpoint.metadata import MANIFEST, RUN, manifest_text
from megatron_ds.checkpoint.universal.folders import POINTER, list_universal
from megatron_ds.checkpoint.universal.reader import UniversalStates
from megatron_ds.checkpoint.universal.writer import UniversalContent, write_states
from megatron_ds.config import CheckpointConfig
from megatron_ds.engine.states.state_reader import MASTER, TensorReader
from megatron_ds.fileio.atomic import FileRecord
from megatron_ds.parallel.weights import ShardSpec
from tests.problems import codes, raises_problem
from tests.unit.checkpoint.fakes import Managers, flip_a_bit, load, save, state_at

STEPS = 4
SPEC = ShardSpec(0, (4, 2))


class Given:
    """States of two parameters; implements `StateReader`."""

    shapes: Mapping[str, tuple[int, ...]] = {"embedding.word.weight": (8, 3), "weight": (6, 5)}
    counters: Mapping[str, int] = {"global_steps": STEPS, "global_samples": 12, "skipped_steps": 0}
    loss_scaler = None

    def state_names(self, name: str) -> tuple[str, ...]:
        return ("exp_avg",)

    def steps(self, name: str) -> int | None:
        return STEPS

    def tensor(self, name: str, kind: str) -> TensorReader:
        return TensorReader.of(full(name, kind))


def full(name: str, kind: str) -> Tensor:
    shape = Given.shapes[name]
    values = torch.arange(float(torch.Size(shape).numel())).view(shape)
    return values + (100.0 if kind == MASTER else 0.0)


def write_universal(path: Path, run: Path | None) -> None:
    """A universal checkpoint with the run.json of a checkpoint; None: without any."""
    path.mkdir()
    optimizer: dict[str, Any] = {"param_groups": [{"lr": 0.1, "params": [0, 1]}]}
    content = UniversalContent(
        {"weight": SPEC}, 7, frozenset(), {**Given.counters, "param_shapes": []}, optimizer
    )
    records = write_states(path, Given(), content, lambda name, size: None)
    if run is not None:
        shutil.copyfile(run / RUN, path / RUN)
        records[RUN] = FileRecord.of((path / RUN).read_bytes())
        (path / MANIFEST).write_text(manifest_text(records))


@pytest.fixture
def saved(checkpoints: CheckpointManager, folder: Path) -> Path:
    """A --save folder with checkpoints of iterations 3 and 5, and a universal one of each."""
    save(checkpoints, 3, 5)
    for name in ("global_step3", "global_step5"):
        write_universal(folder / f"{name}_universal", folder / name)
    return folder


def test_states_are_those_that_were_written(tmp_path: Path) -> None:
    write_universal(tmp_path / "universal", None)
    states = UniversalStates(tmp_path / "universal")

    assert states.shapes == {"embedding.word.weight": (7, 3), "weight": (6, 5)}
    assert states.counters == Given.counters
    assert states.loss_scaler is None
    for kind in (MASTER, *states.state_names("weight")):
        expected = full("weight", kind)
        tensor = states.tensor("weight", kind)
        assert torch.equal(tensor.read(), expected)
        columns = (1, [range(2), range(4, 5)])
        assert torch.equal(tensor.read(range(2, 5), columns), expected[2:5][:, [0, 1, 4]])
    assert states.bytes_read == 4 * 2 * (30 + 9)
    table = states.tensor("embedding.word.weight", MASTER).read(range(5, 10))
    assert table.shape == (5, 3)
    assert torch.equal(table[:2], full("embedding.word.weight", MASTER)[5:7])
    assert not table[2:].any()  # padding
    assert states.steps("weight") == STEPS
    alone = UniversalStates(tmp_path / "universal", has_optimizer=False)
    assert (alone.state_names("weight"), alone.steps("weight")) == ((), None)


def test_sharding_is_declared_beside_the_tensors(tmp_path: Path) -> None:
    write_universal(tmp_path / "universal", None)
    found = torch.load(tmp_path / "universal/zero/weight/fp32.pt", weights_only=False)
    assert (found["cat_dim"], found["sub_param_shape"].shape) == (0, ((4, 2), 5))
    table = torch.load(tmp_path / "universal/zero/embedding.word.weight/fp32.pt")
    assert table.keys() == {"param", "vocab_tensor"}


def test_a_file_without_a_tensor_is_rejected(tmp_path: Path) -> None:
    write_universal(tmp_path / "universal", None)
    torch.save({"other": 1}, tmp_path / "universal/zero/weight/fp32.pt")
    with raises_problem("tensor-file-unreadable", contains="weight/fp32.pt"):
        _ = UniversalStates(tmp_path / "universal").shapes


def selected(manager: Managers, **options: Any) -> str:
    found = manager(**options).restoring.select()
    return found.path.name


def test_the_flag_selects_universal_checkpoints(saved: Path, manager: Managers) -> None:
    """Claim (checkpoints): `--universal-checkpoint` selects a universal checkpoint, but never one
    that the run has left behind"""
    assert selected(manager) == "global_step5"
    assert selected(manager, universal_checkpoint=True) == "global_step5_universal"
    assert selected(manager, ckpt_step=3) == "global_step3"
    assert selected(manager, universal_checkpoint=True, ckpt_step=3) == "global_step3_universal"
    (saved / POINTER).write_text("global_step3_universal")
    # Checkpoint 5 is one that the run has saved since.
    assert selected(manager, universal_checkpoint=True) == "global_step5"
    shutil.rmtree(saved / "global_step5")
    assert selected(manager, universal_checkpoint=True) == "global_step3_universal"


def test_one_is_recognized_without_the_flag(saved: Path, manager: Managers) -> None:
    assert selected(manager, load=str(saved / "global_step3_universal")) == "global_step3_universal"
    for path in ("global_step3", "global_step5", "global_step5_universal"):
        shutil.rmtree(saved / path)
    assert selected(manager) == "global_step3_universal"


def test_a_run_continues_from_one(saved: Path, manager: Managers, logged: list[str]) -> None:
    pointer = saved / "latest"
    before = pointer.read_text()
    checkpoints = manager(universal_checkpoint=True)
    state, engine = load(checkpoints)
    assert state == state_at(5)
    assert engine.loaded is None
    assert isinstance(engine.resharded, UniversalStates)
    assert any("from the universal checkpoint global_step5_universal" in line for line in logged)
    checkpoints.saving.start_branch(checkpoints.restoring.select())
    assert pointer.read_text() == before
    load(manager(universal_checkpoint=True, finetune=True, save=str(saved.parent / "new")))


def test_a_damaged_one_is_rejected(saved: Path, manager: Managers) -> None:
    path = saved / "global_step5_universal/zero/weight/exp_avg.pt"
    flip_a_bit(path)
    with raises_problem("checkpoint-damaged", contains="exp_avg.pt"):
        manager(universal_checkpoint=True).restoring.select()
    path.unlink()
    with raises_problem("checkpoint-damaged", contains="exp_avg.pt"):
        manager(universal_checkpoint=True).restoring.select()


def test_one_of_deepspeeds_converter_uses_the_run_of_its_source(
    saved: Path, manager: Managers
) -> None:
    shutil.rmtree(saved / "global_step5_universal")
    write_universal(saved / "global_step5_universal", None)
    assert selected(manager, universal_checkpoint=True) == "global_step5_universal"
    assert list_universal(saved)[0].name == "global_step5_universal"


def test_one_checkpoint_can_be_named_if_it_is_universal(saved: Path) -> None:
    options = CheckpointConfig(load=str(saved / "global_step3"))
    assert codes(options.problems()) == ["load-is-one-checkpoint"]
    options = CheckpointConfig(load=str(saved / "global_step3_universal"))
    assert codes(options.problems()) == []
