"""Preprocessing and cleaning on two nodes of Ray have the bytes of one machine after faults."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.cluster.ray_nodes import ON_LOOPBACK
from tests.fork_server import DEADLINE, REPOSITORY
from tests.preprocess_runs import output_files, remove_output

INSTALLED = REPOSITORY / "build" / "ray"
SHARDS = 6
PREPROCESS = REPOSITORY / "tools" / "preprocess_data.py"


class RayNodes:
    """Two nodes in processes of their own."""

    def __init__(self, folder: Path) -> None:
        self.environment = {
            **os.environ,
            **ON_LOOPBACK,
            "PYTHONPATH": str(INSTALLED),
            "OMP_NUM_THREADS": "1",
        }
        with (folder / "nodes.log").open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, Path(__file__).with_name("ray_nodes.py")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=self.environment,
            )
        assert self._process.stdout is not None
        words = self._process.stdout.readline().split()
        assert words, (folder / "nodes.log").read_text()
        self.address, *pids = words
        self.raylets = [psutil.Process(int(pid)) for pid in pids]
        self.processes = psutil.Process(self._process.pid).children(recursive=True)

    def remove_second(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("remove\n")
        self._process.stdin.flush()
        assert self._process.stdout.readline() == "removed\n"

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(DEADLINE)


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayNodes]:
    if not INSTALLED.is_dir():
        pytest.skip("Ray is not installed in build/ray (make test-cluster)")
    nodes = RayNodes(tmp_path_factory.mktemp("nodes"))
    yield nodes
    nodes.end()
    left = [process for process in nodes.processes if process.is_running()]
    assert not left


def corpus(folder: Path) -> list[str]:
    """Some seconds of work. Returns the flags of a run."""
    lines = (f'{{"text": "{n % 100} {n % 7}"}}\n' for n in range(200_000))
    (folder / "in.jsonl").write_text("broken\n" + "".join(lines) + "the last one\n")
    files = ["--input", "in.jsonl", "--output-prefix", "out", "--append-eod"]
    return [str(PREPROCESS), *files, "--tokenizer-type", "NullTokenizer", "--vocab-size", "100"]


def start(nodes: RayNodes, folder: Path, command: list[str]) -> subprocess.Popen[str]:
    more = ["--ray", nodes.address, "--num-shards", str(SHARDS)]
    return subprocess.Popen(
        [sys.executable, *command, *more],
        cwd=folder,
        env=nodes.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> str:
    stdout, stderr = process.communicate(timeout=DEADLINE)
    assert process.returncode == 0, stderr
    return stdout + stderr


def wait_for(found: Callable[[], object]) -> None:
    end = time.monotonic() + DEADLINE
    while not found():
        assert time.monotonic() < end
        time.sleep(0.01)


def shard_processes(raylet: psutil.Process) -> list[psutil.Process]:
    """The processes of shards that run on a node."""
    running = []
    for process in raylet.children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if "--shard" in process.cmdline():
                running.append(process)
    return running


def complete_shards(folder: Path) -> int:
    return len(list((folder / "out.shards.work").glob("*.progress.json")))


def run_alone(folder: Path, command: list[str]) -> dict[str, bytes]:
    """The files of one process. They are removed."""
    subprocess.run([sys.executable, *command], cwd=folder, check=True, capture_output=True)
    wanted = output_files(folder)
    remove_output(folder)
    return wanted


def test_preprocessing_survives_its_workers_nodes_and_driver(
    nodes: RayNodes, tmp_path: Path
) -> None:
    """First the driver is killed, then a worker, then a node."""
    command = corpus(tmp_path)
    wanted = run_alone(tmp_path, command)
    driver = start(nodes, tmp_path, command)
    wait_for(lambda: complete_shards(tmp_path))
    driver.kill()
    driver.communicate()
    wait_for(lambda: not any(map(shard_processes, nodes.raylets)))  # they end with the driver
    kept = complete_shards(tmp_path)
    assert output_files(tmp_path).keys().isdisjoint(wanted)
    driver = start(nodes, tmp_path, command)
    wait_for(lambda: shard_processes(nodes.raylets[1]))
    for process in shard_processes(nodes.raylets[1]):
        process.kill()
    wait_for(lambda: shard_processes(nodes.raylets[1]))
    nodes.remove_second()
    log = finish(driver)
    assert f"{SHARDS - kept} shards on 2 nodes" in log
    assert "200000 documents" in log
    assert output_files(tmp_path) == wanted
    shutil.rmtree(tmp_path)
