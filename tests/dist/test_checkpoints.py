"""Checkpoints of two ranks, on a file system that is slow and shows files late."""

from __future__ import annotations

import builtins
import dataclasses
import io
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import distributed_c10d

from megatron_ds.checkpoint.files import local_files
from megatron_ds.checkpoint.files.collective_io import CollectiveIO
from megatron_ds.checkpoint.folders.folder_checks import claimed_folders
from megatron_ds.checkpoint.folders.run_lock import LOCK
from megatron_ds.checkpoint.local.checkpoints import LocalCheckpoints
from megatron_ds.checkpoint.location import RunFolders
from megatron_ds.checkpoint.manager import CheckpointManager
from megatron_ds.checkpoint.metadata import check_names, read_manifest
from megatron_ds.checkpoint.run_checkpoints import RunCheckpoints, StoredTokenizer
from megatron_ds.config import CheckpointConfig
from megatron_ds.engine.deepspeed import checkpoint_io
from megatron_ds.fileio.atomic import FileRecord
from megatron_ds.tokenizer import TokenizerFingerprint
from megatron_ds.train_state import TrainState
from tests.dist.engine_harness import build, prepare
from tests.dist.parity_cases import Case, config_of
from tests.distributed import run_ranks
from tests.faults import before_call
from tests.problems import raises_problem

GROUP_TIMEOUT_S = 1.0
"""Timeout of the training's process groups."""
SLOW_S = 1.8
OF_RANK_1 = "zero_pp_rank_1_mp_rank_00_optim_states.pt"


@dataclass(frozen=True)
class Seen:
    """What one rank observed."""

    seconds: float
    read_during_save: list[str]
    read_to_select: list[str]
    loaded: TrainState | None


Saved = tuple[Path, list[Seen]]
"""Folder of the checkpoints, and what each rank observed."""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    folder = tmp_path_factory.mktemp("saved")
    return folder, run_ranks(_save_and_load, 2, str(folder))


def _save_and_load(rank: int, folder: str) -> Seen:
    meshes = prepare()
    config = config_of(Case(2, 1, 1, 1, "rope", "adamw"))
    options = CheckpointConfig(save=folder, load=folder)
    config = dataclasses.replace(config, checkpoint=options)
    engine = build(config, meshes[1])
    ranks = CollectiveIO()
    _claim_folders_that_cannot_be_used(Path(folder), ranks)
    with claimed_folders(RunFolders.local(options), ranks, print):
        assert all(ranks.run_on_all((Path(folder) / LOCK).exists))
    fingerprint = TokenizerFingerprint("Kind", {}, vocab_size=2, eod=1)
    tokenizer = StoredTokenizer(fingerprint, {"vocab_file/vocab.txt": b"a"} if rank == 0 else {})
    folders = RunFolders.local(options)
    run = RunCheckpoints(config, meshes[1], lambda line: None, ranks, folders, tokenizer)
    manager = CheckpointManager(run)
    own_group = ranks._group
    for group in list(distributed_c10d._world.pg_map):
        if group is not own_group:
            distributed_c10d._set_pg_timeout(timedelta(seconds=GROUP_TIMEOUT_S), group)

    def wait(*_: Any) -> None:
        time.sleep(SLOW_S)

    if rank == 0:  # its listings lag, and its disk is slow at the end
        _hide_from_listings(OF_RANK_1)
        before_call(
            local_files, "write_atomically", wait, lambda path, *_: path.name == "manifest.json"
        )
    else:
        before_call(checkpoint_io, "write_tensors", wait)
    opened = _record_reads()
    start = time.monotonic()
    manager.saving.save(engine, TrainState(iteration=3))
    seconds = time.monotonic() - start
    read = sorted(opened)
    opened.clear()
    found = manager.restoring.select()
    return Seen(seconds, read, sorted({*opened}), found and manager.restoring.load(engine, found))


def _claim_folders_that_cannot_be_used(folder: Path, ranks: CollectiveIO) -> None:
    """Every rank has the first one's error."""
    file = folder.with_name("file")
    locked = folder.with_name("locked")
    ranks.run_on_rank0(file.touch)
    ranks.run_on_rank0(lambda: (locked / LOCK).mkdir(parents=True))
    for save, code in ((file / "saved", "not-created"), (locked, "not-writable")):
        options = CheckpointConfig(save=str(save))
        with (
            raises_problem(f"save-folder-{code}", "save"),
            claimed_folders(RunFolders.local(options), ranks, print),
        ):
            pass
    local = CheckpointConfig(save=str(folder), local_checkpoint_dir=str(file / "local"))
    with raises_problem("local-checkpoint-folder-not-writable", "local_checkpoint_dir"):
        LocalCheckpoints.open(local, ranks, print)


def _hide_from_listings(name: str) -> None:
    def visible(listing: Callable[..., Any]) -> Callable[..., Any]:
        def list_others(*arguments: Any, **keywords: Any) -> Any:
            entries = listing(*arguments, **keywords)
            return [each for each in entries if Path(each).name != name]

        return list_others

    os.listdir = visible(os.listdir)
    for method in ("iterdir", "glob", "rglob"):
        setattr(Path, method, visible(getattr(Path, method)))


def _record_reads() -> list[str]:
    """The names of the files that this process opens for reading, as it opens them."""
    opened: list[str] = []
    open_file = builtins.open

    def recording(path: Any, mode: str = "r", *rest: Any, **keywords: Any) -> Any:
        if "r" in mode and isinstance(path, str | Path):
            opened.append(Path(path).name)
        return open_file(path, mode, *rest, **keywords)

    builtins.open = recording
    io.open = recording  # type: ignore[assignment]
    return opened


def test_the_manifest_lists_what_every_rank_wrote(saved: Saved) -> None:
    """Although the first rank's listings lack a file of the other rank, at the save and after.

    Claim (checkpoints): a manifest lists what every rank wrote, on a file system whose listings
    lag, and no file is read back
    """
    folder, ranks = saved
    path = folder / "global_step3"
    files = read_manifest(path)
    written = {str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()}
    written.remove("manifest.json")
    assert files.keys() == written
    assert OF_RANK_1 in files
    for name, record in files.items():
        assert record == FileRecord.of((path / name).read_bytes()), name
    assert check_names(path) is None
    assert [seen.loaded for seen in ranks] == [TrainState(iteration=3)] * 2


def test_no_file_of_a_save_is_read_back(saved: Saved) -> None:
    for seen in saved[1]:
        assert not [name for name in seen.read_during_save if name.endswith((".pt", ".json"))]


def test_one_rank_judges_a_checkpoint_and_each_verifies_what_it_loads(saved: Saved) -> None:
    """The manifest is read by the first rank; run.json, which has the state, by all."""
    _, (first, second) = saved
    own = "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    pointers = {"latest", "latest_checkpointed_iteration.txt", "latest_universal"}
    assert {*first.read_to_select} - pointers == {
        "manifest.json",
        "mp_rank_00_model_states.pt",
        "run.json",
        "vocab.txt",
        own,
    }
    assert second.read_to_select == ["run.json", OF_RANK_1]


def test_a_disk_slower_than_the_timeout_of_collectives_does_not_end_the_run(saved: Saved) -> None:
    """The second rank's tensors and the first rank's manifest take longer than the timeout.

    Claim (checkpoints): a disk slower than the timeout of collectives does not end a run
    """
    _, ranks = saved
    assert all(seen.seconds > 2 * SLOW_S > GROUP_TIMEOUT_S for seen in ranks)
