"""Preprocessing and cleaning as arrays of Slurm on two nodes have the bytes of one process."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.cluster import Cluster, find_obstacle, start_slurm
from tests.fork_server import REPOSITORY
from tests.preprocess_runs import output_files, remove_output

TASKS = 4
FLAGS = {
    "preprocess_data.py": "--output-prefix out --tokenizer-type NullTokenizer --vocab-size 100",
    "openwebtext/clean.py": "--output out.jsonl --stages exact",
}


@pytest.fixture(scope="module")
def slurm(cluster: Cluster) -> Cluster:
    if (obstacle := find_obstacle("slurmctld", "slurmd", "sbatch")) is not None:
        pytest.skip(obstacle)
    start_slurm(cluster)
    return cluster


@pytest.mark.parametrize("tool", FLAGS)
def test_an_array_has_the_bytes_of_one_process(slurm: Cluster, tool: str) -> None:
    """Each task is one shard, and the last to complete merges.

    Claim (data): an array of Slurm preprocesses and cleans with the bytes of one process
    """
    folder = slurm.shared
    lines = (json.dumps({"text": f"{n % 90} {n % 7}"}) + "\n" for n in range(2000))
    (folder / "in.jsonl").write_text("".join(lines))
    command = [sys.executable, REPOSITORY / "tools" / tool, "--input", "in.jsonl", "--workers", "1"]
    words = [*map(str, command), *FLAGS[tool].split()]
    subprocess.run(words, cwd=folder, check=True, capture_output=True)
    wanted = output_files(folder)
    remove_output(folder)
    wrapped = shlex.join([*words, "--shard", "auto"])
    array = f"--array=1-{TASKS}"
    slurm.nodes[0].run("sbatch", "--wait", array, f"--wrap={wrapped}").succeed()
    logs = [path.read_text() for path in Path(folder).glob("slurm-*.out")]
    assert len(logs) == TASKS, logs
    assert output_files(folder) == wanted
    for path in Path(folder).glob("slurm-*.out"):
        path.unlink()
    remove_output(folder)
