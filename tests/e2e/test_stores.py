"""Runs whose --save and --load are URLs of an S3 server, on two ranks as two nodes.

The ranks have staging folders of their own, so that each sees only what it has written or what was
in the store.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from megatron_ds.checkpoint.metadata import MANIFEST, iteration_of, list_checkpoints
from megatron_ds.fileio.object_store import ObjectStore
from tests.e2e.runs import RANKS, SCHEDULE, Launcher, Run, Settings, assert_equal_runs
from tests.object_server import BUCKET, s3_server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, str]]:
    with (
        s3_server(tmp_path_factory.mktemp("s3") / "log") as variables,
        pytest.MonkeyPatch.context() as patch,
    ):
        for name, value in variables.items():
            patch.setenv(name, value)
        yield variables


@pytest.fixture
def url(server: Mapping[str, str], tmp_path: Path) -> str:
    return f"s3://{BUCKET}/{tmp_path.name}"


@pytest.fixture
def settings(base: Settings, url: str, tmp_path: Path) -> Settings:
    staging = tmp_path / "staging-$RANK"
    return {**base, **SCHEDULE, "save": url, "load": url, "checkpoint_staging_dir": staging}


def downloaded(url: str, folder: Path) -> Path:
    """A copy of all files of a store."""
    store = ObjectStore(url)
    sizes = store.sizes()
    assert not [name for name in sizes if name.endswith(".pointer-pending")]
    for name, size in sizes.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        store.download(name, folder / name, size)
    return folder


@pytest.mark.smoke
def test_a_killed_run_resumes_from_the_store_on_new_nodes(
    launcher: Launcher, settings: Settings, url: str, uninterrupted: Path, tmp_path: Path
) -> None:
    """Claim (checkpoints): a run on two nodes without a shared folder, killed, resumes bit for bit
    from S3 on new nodes"""
    crashed = launcher.start(settings, ranks=RANKS, fault="iteration:6:kill-all").wait()
    assert set(crashed.codes) == {-9}
    assert f"successfully saved checkpoint at iteration       4 to {url}\n" in crashed.output
    for folder in tmp_path.glob("staging-*"):
        shutil.rmtree(folder)
    output = launcher.start(settings, ranks=RANKS).succeed()
    assert f"loading checkpoint from {url} at iteration 4\n" in output
    assert f"from {url} to 2 nodes in " in output
    copy = downloaded(url, tmp_path / "copy")
    assert {path.name for path in list_checkpoints(copy)} == {
        "global_step2",
        "global_step4",
        "global_step6",
    }
    assert_equal_runs(copy, uninterrupted)
    assert not (copy / "run.lock").exists()
    # Each node has the tensors of the newest checkpoint that its rank has written, and no others.
    for rank in range(RANKS):
        (staged,) = (tmp_path / f"staging-{rank}").iterdir()
        tensors = {path.name for path in staged.rglob("*_optim_states.pt")}
        assert tensors == {f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"}
        assert not list(staged.glob("global_step[24]/*.pt"))


def test_training_data_in_a_store_gives_the_run_of_local_files(
    launcher: Launcher, base: Settings, url: str, corpus: Path, uninterrupted: Path, tmp_path: Path
) -> None:
    """Each rank has a cache and an index cache of its own, as on two nodes.

    Claim (samples): a run of two ranks whose data is in an S3 store equals one of local files,
    checkpoints included
    """
    for end in (".bin", ".idx"):
        ObjectStore(url).upload(Path(f"{corpus}{end}"), f"{corpus.name}{end}")
    own = {"object_storage_cache_path": tmp_path / "cache-$RANK", "num_workers": 1}
    data = {"data_path": f"{url}/{corpus.name}", **own}
    launcher.start({**base, **SCHEDULE, **data, "save": tmp_path / "run"}, ranks=RANKS).succeed()
    assert_equal_runs(tmp_path / "run", uninterrupted)
    for rank in range(RANKS):
        assert list((tmp_path / f"cache-{rank}" / "index-cache").glob("*.npy"))


def newest_complete(url: str) -> int:
    folders = [Path(name).parent for name in ObjectStore(url).sizes() if name.endswith(MANIFEST)]
    return max(map(iteration_of, folders), default=0)


def start_upload(launcher: Launcher, settings: Settings, url: str, iteration: int) -> Run:
    """Starts a run and waits until it saves an iteration."""
    run = launcher.start(settings, ranks=RANKS)
    saving = f"saving checkpoint at iteration {iteration:7d} to {url}"
    run.wait_until(lambda: saving in run.output)
    return run


@pytest.mark.parametrize("kills", [2, pytest.param(5, marks=pytest.mark.proof)])
def test_kills_during_uploads_lose_no_checkpoint_and_change_no_bit(
    kills: int,
    launcher: Launcher,
    settings: Settings,
    url: str,
    uninterrupted: Path,
    tmp_path: Path,
) -> None:
    """One run is killed during uploads, one rank or all, and each time resumed.

    Claim (checkpoints): a run killed during uploads (twice in `make test`, five times in `make
    proofs`) loses no complete checkpoint of the store and equals an uninterrupted one
    """
    draw = random.Random(0)
    settings = {**settings, "save_interval": 1, "keep_last": 2, "async_save": True}
    for number in range(kills):
        complete = newest_complete(url)
        run = start_upload(launcher, settings, url, complete + 1)
        time.sleep(draw.uniform(0.0, 0.15))
        if number % 2:
            run.kill()
        else:
            os.kill(run.pids[draw.randrange(RANKS)], signal.SIGKILL)
            run.wait()
        loaded = f"loading checkpoint from {url} at iteration {complete}\n"
        assert (loaded in run.output) == (complete > 0)
        assert "[checkpoint-skipped]" not in run.output
        if number == kills // 2:
            shutil.rmtree(tmp_path / "staging-1")
    launcher.start(settings, ranks=RANKS).succeed()
    copy = downloaded(url, tmp_path / "copy")
    assert [path.name for path in list_checkpoints(copy)] == ["global_step6", "global_step5"]
    assert_equal_runs(copy, uninterrupted)
    assert not [path for path in copy.glob("global_step*") if not (path / MANIFEST).exists()]
