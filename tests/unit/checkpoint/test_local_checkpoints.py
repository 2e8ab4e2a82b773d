"""Local checkpoints of one process, which lose files."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_ds.checkpoint.files.collective_io import CollectiveIO
from megatron_ds.checkpoint.local.checkpoints import LocalCheckpoints
from megatron_ds.checkpoint.local.nodes import TOKEN, Nodes
from megatron_ds.checkpoint.location import RunFolders
from megatron_ds.checkpoint.manager import CheckpointManager
from megatron_ds.checkpoint.run_checkpoints import RunCheckpoints, StoredTokenizer
from megatron_ds.config import Config
from megatron_ds.fileio.probe_files import ABANDONED_S
from megatron_ds.parallel.mesh import Mesh
from megatron_ds.tokenizer import TokenizerFingerprint
from tests.problems import printed_codes
from tests.unit.checkpoint.fakes import FakeEngine, load, save, state_at

Start = Callable[..., CheckpointManager]


@pytest.fixture
def start(one_process: None, config: Config, logged: list[str], tmp_path: Path) -> Start:
    """start(**options): a run in RUN with local checkpoints."""

    def build(**changed: Any) -> CheckpointManager:
        places = {name: str(tmp_path / "run") for name in ("save", "load")}
        places["local_checkpoint_dir"] = str(tmp_path / "node")
        options = dataclasses.replace(config.checkpoint, **{**places, **changed})
        ranks = CollectiveIO()
        local = LocalCheckpoints.open(options, ranks, lambda found: logged.append(found.render()))
        run = RunCheckpoints(
            dataclasses.replace(config, checkpoint=options),
            Mesh.build(1),
            logged.append,
            ranks,
            RunFolders.local(options),
            tokenizer=StoredTokenizer(TokenizerFingerprint("Null", {}, 8, 7), {"vocab.txt": b"a"}),
            local=local,
        )
        return CheckpointManager(run)

    return build


@pytest.fixture
def manager(start: Start) -> CheckpointManager:
    return start()


@pytest.mark.parametrize("name", ["run.json", "model_states.pt", "tokenizer/vocab.txt"])
@pytest.mark.parametrize("is_lost", [True, False], ids=["lost", "truncated"])
def test_a_checkpoint_without_a_file_leaves_the_one_before_it(
    name: str, is_lost: bool, manager: CheckpointManager, logged: list[str], tmp_path: Path
) -> None:
    engine = FakeEngine()
    for iteration in (2, 4):
        engine.content = f"of iteration {iteration}"
        manager.saving.save_local(engine, state_at(iteration))
    file = tmp_path / "node" / "global_step4" / name
    content = file.read_bytes()
    file.unlink()
    if not is_lost:
        file.write_bytes(content[:-1])
    state, engine = load(manager)
    assert (state, engine.content) == (state_at(2), "of iteration 2")


@pytest.mark.parametrize(
    ("first", "options"),
    [
        ("{}/run", {"load": "{}/run/"}),
        ("{}/run", {"save": "./run", "load": "run"}),
        ("run", {"save": "{}/run"}),
        ("{}/link", {"load": "{}/below/../run"}),
    ],
)
def test_a_folder_spelled_differently_is_the_same_run(
    first: str,
    options: dict[str, str],
    start: Start,
    logged: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Claim (checkpoints): local checkpoints are used however the `--save` folder is spelled on the
    restart, and a warning names newer ones that are not"""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "below").mkdir()
    (tmp_path / "link").symlink_to("run")
    place = first.format(tmp_path)
    manager = start(save=place, load=place)
    save(manager, 2)
    manager.saving.save_local(FakeEngine(), state_at(4))
    again = {name: value.format(tmp_path) for name, value in options.items()}
    assert load(start(**again))[0] == state_at(4)
    assert "local-checkpoints-unused" not in printed_codes("\n".join(logged))


@pytest.mark.parametrize("options", [{"save": "other"}, {"finetune": True}, {"ckpt_step": 2}])
def test_newer_local_checkpoints_that_are_not_used_are_a_warning(
    options: dict[str, Any], start: Start, logged: list[str], tmp_path: Path
) -> None:
    """Claim (checkpoints): local checkpoints are used however the `--save` folder is spelled on the
    restart, and a warning names newer ones that are not"""
    manager = start()
    save(manager, 2)
    manager.saving.save_local(FakeEngine(), state_at(4))
    if "save" in options:
        options = {"save": str(tmp_path / "other")}
    assert load(start(**options))[1].content != "of iteration 4"
    assert any("[local-checkpoints-unused]" in line and "global_step4" in line for line in logged)


@pytest.mark.parametrize("ahead", [0.0, 3 * ABANDONED_S, -3 * ABANDONED_S])
def test_runs_that_start_at_once_find_their_nodes(
    ahead: float, one_process: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another run looks for its nodes by the same folder; a third one was killed long ago. The
    clock of the host is days ahead of the folder's, or behind."""
    killed = tmp_path / f"{TOKEN}killed-0"
    killed.touch()
    now = time.time()
    os.utime(killed, (0, now - 2 * ABANDONED_S))
    monkeypatch.setattr(time, "time", lambda: now + ahead)
    ranks = CollectiveIO()
    on_all: Callable[..., list[Any]] = ranks.run_on_all

    class Agreement(CollectiveIO):
        def run_on_all(self, run: Callable[[], Any]) -> list[Any]:
            done = on_all(run)
            Nodes.sharing(tmp_path, ranks)
            return done

    assert Nodes.sharing(tmp_path, Agreement()).members == ((0,),)
    assert not list(tmp_path.iterdir())
