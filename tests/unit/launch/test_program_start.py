"""The first lines of the programs: without the environment, and at an early Ctrl-C.

Claim (command-line): without the environment, with too old a Python, or interrupted during its
imports, a program ends with one line
"""

from __future__ import annotations

import ast
import gc
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_ds.launch.process import program_start

REPOSITORY = Path(__file__).resolve().parents[3]
BEGIN = ("program_start.begin()", "import start_tool\n")
TASKS = REPOSITORY / "tasks" / "main.py"
PROGRAMS = [
    path
    for path in (
        REPOSITORY / "pretrain_gpt.py",
        TASKS,
        *sorted((REPOSITORY / "tools").rglob("*.py")),
    )
    if any(line in path.read_text(encoding="utf-8") for line in BEGIN)
    and path.name != "start_tool.py"
]


def test_every_program_for_users_begins_with_the_check() -> None:
    names = {path.name for path in PROGRAMS}
    others = {"start_tool.py"}
    assert names.isdisjoint(others)
    assert names | others == {path.name for path in (REPOSITORY / "tools").rglob("*.py")} | {
        "pretrain_gpt.py",
        TASKS.name,
    }


def test_an_old_python_can_read_the_programs() -> None:
    """It must get as far as the message."""
    for path in (*PROGRAMS, Path(program_start.__file__)):
        ast.parse(path.read_text(encoding="utf-8"), feature_version=(3, 8))


def test_an_old_python_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 9, 2, "final", 0))
    assert "3.11 or newer" in program_start.find_problem()
    assert "Python 3.9" in program_start.find_problem()


def test_a_process_of_several_names_its_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program_start, "PACKAGES", ("no_such_package",))
    monkeypatch.setattr("socket.gethostname", lambda: "node7")
    for name in program_start.SIZES:
        monkeypatch.delenv(name, raising=False)
    assert "node7" not in program_start.find_problem()
    monkeypatch.setenv("SLURM_NTASKS", "2")
    assert " on node7 lacks the packages no_such_package" in program_start.find_problem()


def test_programs_without_the_environment_say_so(tmp_path: Path) -> None:
    """Each in a Python without any package, from another folder."""
    for path in PROGRAMS:
        done = subprocess.run(
            [sys.executable, "-E", "-S", path], cwd=tmp_path, capture_output=True, text=True
        )
        assert done.returncode == 1, path
        assert "lacks the packages numpy" in done.stderr, path
        assert done.stderr.count("\n") == 1, path


@pytest.mark.parametrize("is_handled", [False, True])
def test_early_ctrl_c_ends_without_a_traceback(is_handled: bool) -> None:
    code = (
        "import signal, os; from megatron_ds.launch.process import program_start as p; p.begin();"
        f"{'p.finish();' if is_handled else ''} os.kill(os.getpid(), signal.SIGINT)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    if is_handled:
        assert "KeyboardInterrupt" in done.stderr
    else:
        assert (done.returncode, done.stderr) == (130, "-c: interrupted\n")


@pytest.mark.parametrize("was_enabled", [False, True])
def test_imports_run_without_garbage_collection(was_enabled: bool) -> None:
    before = gc.isenabled()
    try:
        (gc.enable if was_enabled else gc.disable)()
        with program_start.importing():
            assert not gc.isenabled()
        assert gc.isenabled() == was_enabled
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()
        (gc.enable if before else gc.disable)()
