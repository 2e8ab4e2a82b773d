from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from megatron_ds.launch.extension_locks import stale_locks

HOLD = """
import os, sys
os.open(sys.argv[1], os.O_CREAT | os.O_EXCL)
print("held", flush=True)
sys.stdin.read()
"""


def test_a_lock_nobody_holds_is_stale(tmp_path: Path) -> None:
    """A fresh lock of torch's default folder (one level deeper) is found too."""
    shallow, deep = tmp_path / "cpu_adam" / "lock", tmp_path / "py311_cpu" / "comm" / "lock"
    for lock in (shallow, deep):
        lock.parent.mkdir(parents=True)
        lock.touch()
    (tmp_path / "cpu_adam" / "main.o").touch()

    assert stale_locks(tmp_path) == sorted([shallow, deep])


def test_a_lock_in_use_is_not_stale_until_its_builder_is_killed(tmp_path: Path) -> None:
    lock = tmp_path / "cpu_adam" / "lock"
    lock.parent.mkdir()
    builder = subprocess.Popen(
        [sys.executable, "-S", "-c", HOLD, str(lock)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert builder.stdout is not None
        assert builder.stdout.readline() == "held\n"
        assert stale_locks(tmp_path) == []
    finally:
        builder.kill()
        builder.communicate()

    assert stale_locks(tmp_path) == [lock]


def test_a_missing_folder_has_no_locks(tmp_path: Path) -> None:
    assert stale_locks(tmp_path / "missing") == []
