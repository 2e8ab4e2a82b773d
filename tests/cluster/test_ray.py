"""Preprocessing and cleaning on two nodes of Ray have the bytes of one machine after faults."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from megatron_ds.config.problems import counted
from tests.cleaning_runs import corpus
from tests.cluster.ray_cluster import IS_INSTALLED, RayNodes, has_ended
from tests.fork_server import DEADLINE, REPOSITORY
from tests.preprocess_runs import output_files, remove_output
from tests.problems import printed_codes

SHARDS = 6
DOCUMENTS = 100_000
PREPROCESS = [
    str(REPOSITORY / "tools" / "preprocess_data.py"),
    "--input",
    "in.jsonl",
    "--append-eod",
    "--tokenizer-type",
    "NullTokenizer",
    "--vocab-size",
    "100",
]
CLEAN = str(REPOSITORY / "tools" / "openwebtext" / "clean.py")


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayNodes]:
    if not IS_INSTALLED:
        pytest.skip("Ray is not installed in build/ray (make test-cluster)")
    nodes = RayNodes(tmp_path_factory.mktemp("nodes"))
    yield nodes
    nodes.end()
    assert not [each for each in nodes.processes if not has_ended(each)]


def start(
    nodes: RayNodes, folder: Path, command: Sequence[str], *more: str
) -> subprocess.Popen[str]:
    """Starts a driver. Later flags override earlier ones."""
    return subprocess.Popen(
        [sys.executable, *command, "--ray", nodes.address, "--num-shards", str(SHARDS), *more],
        cwd=folder,
        env=nodes.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for(found: Callable[[], object]) -> None:
    end = time.monotonic() + DEADLINE
    while not found():
        assert time.monotonic() < end
        time.sleep(0.01)


def shard_processes(*raylets: psutil.Process) -> list[psutil.Process]:
    """The processes of shards that run on nodes."""
    running = []
    for process in (child for raylet in raylets for child in raylet.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            if "--shard" in process.cmdline():
                running.append(process)
    return running


def complete_shards(folder: Path) -> int:
    return len(list(folder.glob("out*.shards.work/*.progress.json")))


def run_alone(folder: Path, command: Sequence[str]) -> dict[str, bytes]:
    """The files of one process. They are removed."""
    subprocess.run([sys.executable, *command], cwd=folder, check=True, capture_output=True)
    wanted = output_files(folder)
    remove_output(folder)
    return wanted


def kill_driver_and_process(
    nodes: RayNodes, folder: Path, command: Sequence[str]
) -> tuple[subprocess.Popen[str], int]:
    """Kills the driver once a shard is complete, repeats it, and kills a process of a shard.

    Returns:
        The second driver, and the number of shards that the first one has completed.
    """
    driver = start(nodes, folder, command)
    wait_for(lambda: complete_shards(folder))
    driver.kill()
    driver.communicate()
    wait_for(lambda: not shard_processes(*nodes.raylets))  # they end with the driver
    kept = complete_shards(folder)
    assert 0 < kept < SHARDS
    driver = start(nodes, folder, command)
    wait_for(lambda: shard_processes(nodes.raylets[1]))
    for process in shard_processes(nodes.raylets[1]):
        process.kill()
    return driver, kept


def finish(driver: subprocess.Popen[str], kept: int) -> str:
    """Waits for the driver, which must have run only the shards that were missing."""
    stdout, stderr = driver.communicate(timeout=DEADLINE)
    assert driver.returncode == 0, stderr
    assert f"{counted(SHARDS - kept, 'shard')} on 2 nodes" in stderr
    return stdout


@pytest.mark.proof
def test_cleaning_survives_its_driver_and_workers(nodes: RayNodes, tmp_path: Path) -> None:
    """Exact and near duplicates are those of one process, also across shards.

    Claim (cleaning): so it does on two nodes of Ray, when the driver and a process are killed
    """
    corpus(tmp_path)
    command = [
        CLEAN,
        "--input",
        "in.jsonl",
        "--output",
        "out.jsonl.gz",
        "--min-chars",
        "15",
        "--stages",
        "length",
        "exact",
        "near",
        "--dropped-output",
        "out.dropped.jsonl",
        "--report",
        "out.json",
    ]
    wanted = run_alone(tmp_path, command)
    assert {"out.jsonl.gz", "out.dropped.jsonl", "out.json", "out.jsonl.gz.quarantine"} == {*wanted}
    driver, kept = kill_driver_and_process(nodes, tmp_path, command)
    assert "near: 200 in, 99 out" in finish(driver, kept)
    assert output_files(tmp_path) == wanted


def test_errors_name_their_cause(nodes: RayNodes, tmp_path: Path) -> None:
    """A cluster that is not there, a node that is too small, and a shard that fails."""
    (tmp_path / "in.jsonl").write_text('{"text": "1 2"}\n' * 9 + "broken\n")
    command = [*PREPROCESS, "--fail-on-bad-document"]
    wrong = {
        "ray-not-reached": ["--ray", "127.0.0.1:1", "--output-prefix", "out1"],
        "ray-workers-exceed-node": ["--workers", "2", "--output-prefix", "out2"],
        "ray-task-failed": ["--output-prefix", "out3"],
    }
    drivers = {code: start(nodes, tmp_path, command, *more) for code, more in wrong.items()}
    for code, driver in drivers.items():
        errors = driver.communicate(timeout=DEADLINE)[1]
        assert driver.returncode == 1, errors
        assert printed_codes(errors)[-1] == code, errors
    assert "in.jsonl:10: " in errors
    assert not list(tmp_path.glob("out?_*"))


def test_preprocessing_survives_its_driver_workers_and_nodes(
    nodes: RayNodes, tmp_path: Path
) -> None:
    """The second node is lost for good.

    Claim (data): so it does on two nodes of Ray, when the driver, a process and a node are killed
    """
    lines = (f'{{"text": "{n % 100} {n % 7}"}}\n' for n in range(DOCUMENTS))
    (tmp_path / "in.jsonl").write_text("broken\n" + "".join(lines) + "the last one\n")
    command = [*PREPROCESS, "--output-prefix", "out"]
    wanted = run_alone(tmp_path, command)
    driver, kept = kill_driver_and_process(nodes, tmp_path, command)
    wait_for(lambda: shard_processes(nodes.raylets[1]))
    nodes.remove_second()
    assert f"{DOCUMENTS} documents" in finish(driver, kept)
    assert output_files(tmp_path) == wanted
