"""Local checkpoints of one process, which lose files."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_ds.checkpoint.local_copies import LocalCheckpoints
from megatron_ds.checkpoint.manager import CheckpointManager, StoredTokenizer
from megatron_ds.checkpoint.nodes import ABANDONED_S, TOKEN, Nodes
from megatron_ds.checkpoint.rank_agreement import RankAgreement
from megatron_ds.config import Config
from megatron_ds.parallel.mesh import Mesh
from megatron_ds.tokenizer import TokenizerFingerprint
from tests.unit.checkpoint.fakes import FakeEngine, load, state_at


@pytest.fixture
def manager(
    one_process: None, config: Config, logged: list[str], tmp_path: Path
) -> CheckpointManager:
    places = {name: str(tmp_path / "run") for name in ("save", "load")}
    options = dataclasses.replace(
        config.checkpoint, **places, local_checkpoint_dir=str(tmp_path / "node")
    )
    ranks = RankAgreement()
    local = LocalCheckpoints.open(options, ranks, lambda problem: logged.append(problem.render()))
    return CheckpointManager(
        dataclasses.replace(config, checkpoint=options),
        Mesh.build(1),
        logged.append,
        ranks,
        tokenizer=StoredTokenizer(TokenizerFingerprint("Null", {}, 8, 7), {"vocab.txt": b"a"}),
        local=local,
    )


@pytest.mark.parametrize("name", ["run.json", "model_states.pt", "tokenizer/vocab.txt"])
@pytest.mark.parametrize("is_lost", [True, False], ids=["lost", "truncated"])
def test_a_checkpoint_without_a_file_leaves_the_one_before_it(
    name: str, is_lost: bool, manager: CheckpointManager, logged: list[str], tmp_path: Path
) -> None:
    engine = FakeEngine()
    for iteration in (2, 4):
        engine.content = f"of iteration {iteration}"
        manager.save_local(engine, state_at(iteration))  # type: ignore[arg-type]
    file = tmp_path / "node" / "global_step4" / name
    content = file.read_bytes()
    file.unlink()
    if not is_lost:
        file.write_bytes(content[:-1])
    state, engine = load(manager)
    assert (state, engine.content) == (state_at(2), "of iteration 2")


def test_runs_that_start_at_once_find_their_nodes(one_process: None, tmp_path: Path) -> None:
    """Another run looks for its nodes by the same folder; a third one was killed long ago."""
    killed = tmp_path / f"{TOKEN}killed-0"
    killed.touch()
    os.utime(killed, (0, time.time() - 2 * ABANDONED_S))
    ranks = RankAgreement()
    on_all: Callable[..., list[Any]] = ranks.on_all

    class Agreement(RankAgreement):
        def on_all(self, run: Callable[[], Any]) -> list[Any]:
            done = on_all(run)
            Nodes.sharing(tmp_path, ranks)
            return done

    assert Nodes.sharing(tmp_path, Agreement()).members == ((0,),)
    assert not list(tmp_path.iterdir())
