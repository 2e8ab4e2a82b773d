"""Jobs of Slurm continue after their time limit and the loss of a node, and never overlap."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cluster.cluster import SLOTS, Cluster, Node
from tests.e2e.runs import ENDLESS, REPOSITORY, Launcher, Settings, has_trained, losses, steps
from tests.e2e.runs import to_flags as flags_of
from tests.fork_server import DEADLINE

RunSettings = Callable[[str, Path], Settings]

EXAMPLE = REPOSITORY / "examples" / "slurm" / "pretrain_gpt.sbatch"
TOOL = REPOSITORY / "tools" / "slurm.py"
PACED = """
import time
from pathlib import Path
from megatron_ds.extend import Callback, Extensions, pretrain

class Pace(Callback):
    def after_step(self, state, result):
        if Path({slow!r}).exists():
            time.sleep(1)

pretrain(Extensions(callbacks=[Pace()]))
"""
"""A program whose steps take a second while a file exists."""
ITERATIONS = 60
"""More than such a program takes until its job is interrupted for the second time. Slurm looks at
time limits twice a minute."""


def wait_for(
    node: Node, job: str, state: str, output: Path, reached: Callable[[], bool] = lambda: True
) -> None:
    """Waits until a job has a state of Slurm, such as `RUNNING`, and a condition holds."""
    end = time.monotonic() + DEADLINE
    while True:
        found = node.run("scontrol", "show", "job", job).output
        if f"JobState={state} " in found and reached():
            return
        assert time.monotonic() < end, f"{found}\n{output.read_text()}"
        assert state == "FAILED" or "JobState=FAILED" not in found, output.read_text()
        time.sleep(0.2)


def update(node: Node, job: str, **values: object) -> None:
    words = [f"{name}={value}" for name, value in values.items()]
    node.run("scontrol", "update", f"JobId={job}", *words).succeed()


@pytest.mark.proof
def test_tasks_of_an_array_never_train_one_run_at_the_same_time(
    slurm: None, cluster: Cluster, run_settings: RunSettings
) -> None:
    """The example for sbatch, on one node for each of two tasks.

    Claim (command-line): tasks of a job array with one `--save` never train at the same time: one
    trains, the other ends with an error
    """
    node = cluster.nodes[0]
    save = cluster.shared / "array"
    stop = cluster.shared / "stop"
    output = cluster.shared / "array.%a"
    settings = {**run_settings("data", save), "train_iters": ENDLESS}
    settings |= {"load": save, "kill_switch_path": stop}
    size = ["--nodes", 1, "--ntasks-per-node", SLOTS, "--gpus-per-node", 0, "--cpus-per-task", 1]
    options = [*size, "--array=1-2", "--parsable", "--chdir", REPOSITORY, "--output", output]
    command = ["sbatch", *options, EXAMPLE, *flags_of(settings)]
    job = node.run(*command, environment={"PYTHON": sys.executable}).succeed().strip()
    tasks = {f"{job}_{number}": Path(str(output).replace("%a", str(number))) for number in (1, 2)}
    end = time.monotonic() + DEADLINE
    while not (failed := [task for task in tasks if "=FAILED" in show(node, task)]):
        shown = [path.read_text() if path.exists() else "" for path in tasks.values()]
        assert not all("consumed samples" in text for text in shown), "both train"
        assert time.monotonic() < end, "".join(shown)
        time.sleep(0.2)
    (trains,) = tasks.keys() - failed
    before = len(steps(save))
    wait_for(node, trains, "RUNNING", tasks[trains], has_trained(save, before + 1))
    stop.touch()
    wait_for(node, trains, "COMPLETED", tasks[trains])
    assert "[save-folder-in-use]" in tasks[failed[0]].read_text()
    assert "the run ended with status 1 " in tasks[failed[0]].read_text()
    assert [step["iteration"] for step in steps(save)] == list(range(1, len(steps(save)) + 1))


def show(node: Node, job: str) -> str:
    return node.run("scontrol", "show", "job", job).output


def test_a_run_survives_its_time_limit_and_the_loss_of_a_node(
    slurm: None, cluster: Cluster, run_settings: RunSettings, launcher: Launcher, tmp_path: Path
) -> None:
    """Claim (command-line): a job of `tools/slurm.py submit` saves before its time limit and is
    queued again; when a node is down, it continues on the other one from the newest checkpoint: the
    losses equal an uninterrupted run, bit for bit on the same nodes, and within 1e-5 on fewer"""
    node = cluster.nodes[0]
    save = cluster.shared / "a run"
    slow = cluster.shared / "slow"
    program = cluster.shared / "paced.py"
    program.write_text(PACED.format(slow=str(slow)))
    slow.touch()
    settings = {**run_settings("data", save), "train_iters": ITERATIONS, "save_interval": 10}
    size = ["--nodes", "1-2", "--ranks-per-node", SLOTS, "--gpus-per-node", 0, "--time", 60]
    options = [*size, "--program", program]
    tool = [sys.executable, TOOL]
    node.run(*tool, "submit", save, *options, *flags_of(settings)).succeed()
    job = json.loads((save / "slurm.jsonl").read_text())["job"]
    output = save / "slurm.out"
    wait_for(node, job, "RUNNING", output, has_trained(save))
    update(node, job, TimeLimit=2)  # of which 120 s are for the save
    launcher.start({**settings, "save": tmp_path}, ranks=2 * SLOTS).succeed()
    expected = losses(tmp_path)

    wait_for(node, job, "PENDING", output)
    limit = len(losses(save))
    assert losses(save) == expected[:limit]
    assert f"status 143 at iteration {limit}" in node.run(*tool, "status", save).succeed()

    # Slurm delays it by two minutes. Nodes refuse it in the second in which its last attempt ended.
    now = {"StartTime": "now+3", "TimeLimit": 60}
    update(node, job, **now)
    wait_for(node, job, "RUNNING", output, has_trained(save, limit + 1))
    node.run("scontrol", "update", "NodeName=node2", "State=DOWN", "Reason=lost").succeed()
    wait_for(node, job, "PENDING", output)
    slow.unlink()
    update(node, job, **now)
    wait_for(node, job, "COMPLETED", output)
    assert losses(save) == pytest.approx(expected, abs=1e-5)
    assert losses(save)[: limit + 1] == expected[: limit + 1]
    shown = node.run(*tool, "status", save).succeed()
    assert f"job {job}: COMPLETED, " in shown
    assert "2 restarts" in shown
    assert f"iteration {ITERATIONS} of {ITERATIONS}" in shown
    followed = node.run(*tool, "tail", save, "--lines", 1000).succeed()
    assert followed.count("4 processes on cpu") == 2
    assert followed.count("2 processes on cpu") == 1
    assert "the run is complete" in followed
