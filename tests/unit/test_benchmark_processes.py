"""Programs of benchmarks end with the one that started them."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
START = """
import sys
from benchmarks.accelerator.processes import run
from benchmarks.gpu import end_by_signal

end_by_signal()
child = "import os, pathlib, sys, time; pathlib.Path(sys.argv[1]).write_text(str(os.getpid()))"
run(["-c", child + "; time.sleep(100)", sys.argv[1]])
"""
DEADLINE = 60.0


def wait_until(path: Path, *, exists: bool) -> None:
    end = time.monotonic() + DEADLINE
    while path.exists() != exists:
        assert time.monotonic() < end, f"{path} {'is missing' if exists else 'stays'}"
        time.sleep(0.05)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_program_ends_with_its_starter(number: signal.Signals, tmp_path: Path) -> None:
    file = tmp_path / "pid"
    with subprocess.Popen(
        [sys.executable, "-c", START, str(file)], cwd=REPOSITORY, stderr=subprocess.DEVNULL
    ) as starter:
        wait_until(file, exists=True)
        while not (pid := file.read_text(encoding="utf-8")):
            time.sleep(0.05)
        starter.send_signal(number)
        assert starter.wait(DEADLINE) != 0
    wait_until(Path("/proc", pid), exists=False)
