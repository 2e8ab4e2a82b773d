"""Stale locks of C++ extensions."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from megatron_ds.launch.extension_locks import find_stale_locks

HOLD = """
import os, sys
os.open(sys.argv[1], os.O_CREAT | os.O_EXCL)
print("held", flush=True)
sys.stdin.read()
"""


def test_lock_that_no_process_holds_is_stale(tmp_path: Path) -> None:
    """Also in torch's default folder, which has one level more."""
    shallow, deep = tmp_path / "cpu_adam" / "lock", tmp_path / "py311_cpu" / "comm" / "lock"
    for lock in (shallow, deep):
        lock.parent.mkdir(parents=True)
        lock.touch()
    (tmp_path / "cpu_adam" / "main.o").touch()

    assert find_stale_locks(tmp_path) == sorted([shallow, deep])


def test_lock_is_stale_once_its_builder_was_killed(tmp_path: Path) -> None:
    lock = tmp_path / "cpu_adam" / "lock"
    lock.parent.mkdir()
    command = [sys.executable, "-S", "-c", HOLD, str(lock)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    builder = subprocess.Popen(command, **pipes, text=True)
    try:
        assert (builder.stdout.readline(), find_stale_locks(tmp_path)) == ("held\n", [])
    finally:
        builder.kill()
        builder.communicate()

    assert find_stale_locks(tmp_path) == [lock]


def test_missing_folder_has_no_stale_locks(tmp_path: Path) -> None:
    assert find_stale_locks(tmp_path / "missing") == []
