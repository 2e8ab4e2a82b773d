"""A run that was suspended while another one took its --save folder.

Claim (checkpoints): a run that was suspended for so long that another one took its folder writes
nothing to it: no checkpoint, and no line of a log
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from megatron_ds.checkpoint.folders.run_lock import ELASTIC_HEARTBEAT_S, LOCK
from tests.e2e.runs import Launcher, Settings, steps

linux = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads states in /proc")


def is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


@linux
def test_a_run_that_lost_its_folder_writes_nothing_to_it(
    launcher: Launcher, base: Settings, tmp_path: Path
) -> None:
    settings = {**base, "global_batch_size": 4, "train_iters": 9, "save": tmp_path}
    settings |= {"save_interval": 2, "record_every": 1, "metrics_csv": tmp_path / "steps.csv"}
    # The lock of a run that torchrun restarts is taken after five seconds of silence, not sixty.
    environment = {"TORCHELASTIC_RUN_ID": "a run"}
    run = launcher.start(settings, ranks=2, fault="iteration:4:stop", environment=environment)
    run.wait_until(lambda: all(map(is_stopped, run.pids)))
    owner = json.loads((tmp_path / LOCK).read_bytes())
    (tmp_path / LOCK).write_text(json.dumps({**owner, "nonce": "of another run"}))
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    time.sleep(2.5 * ELASTIC_HEARTBEAT_S)
    os.killpg(run.pids[0], signal.SIGCONT)
    result = run.wait()
    assert "[save-folder-lost]" in result.output
    assert result.codes == (5, 5)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    assert [step["iteration"] for step in steps(tmp_path)] == [1, 2, 3]
