"""The node with rank 0, the store of the ranks and the lock of --save is lost in any phase."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from megatron_ds.checkpoint.metadata import check_names, list_checkpoints
from tests.cluster.agents import Agents, uninterrupted
from tests.cluster.cluster import Cluster
from tests.cluster.test_elastic import documented_command
from tests.e2e.runs import Launcher, Settings, losses, steps

LAST = 12
SAVE_INTERVAL = 4
EVAL_INTERVAL = 6


@dataclass(frozen=True)
class Phase:
    """A phase of a run.

    Attributes:
        line: Printed at its beginning, by the rank that prints; "" if `save` tells.
        save: Iteration of the checkpoint that is being written.
        fault: Slows the phase down.
        async_save: With --async-save.
    """

    line: str = ""
    save: int = 0
    fault: str = "iteration:1+:pause"
    async_save: bool = False

    def has_begun(self, output: str, folder: Path) -> bool:
        if self.line:
            return self.line in output
        return any(folder.glob(f".incomplete-global_step{self.save}-*"))


PHASES = {
    "the start": Phase("DeepSpeed info: "),
    "the index build": Phase("> building train"),
    "the start of the engine": Phase("number of parameters"),
    "the first save": Phase(save=4, fault="before-rename:4:pause"),
    "an asynchronous save": Phase(save=8, fault="before-rename:8:pause", async_save=True),
    "an evaluation": Phase("evaluation micro-batch 2", fault="evaluation:1+:pause"),
    "the last save": Phase(save=12, fault="before-rename:12:pause"),
}


@pytest.mark.proof
@pytest.mark.parametrize("name", PHASES)
def test_the_other_node_ends_the_run_when_the_first_one_is_lost(
    name: str, cluster: Cluster, base: Settings, launcher: Launcher, tmp_path: Path
) -> None:
    first, second = cluster.nodes
    phase = PHASES[name]
    save = cluster.shared / name.replace(" ", "-")
    settings = {**base, "global_batch_size": 8, "train_iters": LAST, "host_timeout": 10}
    settings |= {"save": save, "load": save, "save_interval": SAVE_INTERVAL}
    settings |= {"eval_interval": EVAL_INTERVAL, "eval_iters": 8, "async_save": phase.async_save}
    settings |= {"distributed_timeout_minutes": 3}
    command = documented_command(ranks=1, restarts=3)
    agents = Agents(cluster, command, settings, variables={"FAULT": phase.fault})
    outputs = [agents.start(first), agents.start(second)]
    agents.wait_for(lambda: phase.has_begun("".join(read() for read in outputs), save))
    first.kill()
    lost_at = time.monotonic()
    before = outputs[1]().count("start-up (s)")
    agents.wait_for(lambda: outputs[1]().count("start-up (s)") > before)
    waited = time.monotonic() - lost_at
    assert agents.wait_for_end() == [-9, 0]
    print(f"{name}: the other node has trained after {waited:.1f} s")
    first.set_link(is_up=True)
    assert waited < 120
    assert [step["iteration"] for step in steps(save)] == list(range(1, LAST + 1))
    for path in list_checkpoints(save):
        assert check_names(path) is None
    assert {path.name for path in save.glob(".*")} == set()
    expected = uninterrupted(launcher, settings, tmp_path / "whole")
    difference = np.abs(np.subtract(losses(save), expected)).max()
    print(f"{name}: the losses of {LAST} iterations differ by up to {difference:.1e}")
    assert difference < 1e-5
