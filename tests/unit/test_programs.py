"""The table of programs, the files of tools/ that start them, and `python -m megatron_ds`."""

from __future__ import annotations

import ast
import pkgutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import pytest

from megatron_ds import __main__ as console
from megatron_ds import programs
from megatron_ds.launch import local_ranks
from megatron_ds.launch.exit_codes import ExitCode
from megatron_ds.programs import PROGRAMS, shown_name, start_words, training_words
from tests.import_graph import REPOSITORY, imports, tree

TOOLS = REPOSITORY / "tools"
TRAIN = "train"
"""pretrain_gpt.py, which is not in tools/."""
IN_TOOLS = [name for name in PROGRAMS if name != TRAIN]
MOST_LINES = 30
"""Of a file that starts a program, with its docstring."""


def started(path: Path) -> bool:
    """Whether a file of tools/ starts a program: neither a link nor what all of them import."""
    return not path.is_symlink() and path.name != "start_tool.py"


def test_each_file_of_tools_is_in_the_table() -> None:
    files = {str(path.relative_to(REPOSITORY)) for path in TOOLS.glob("*.py") if started(path)}
    assert {PROGRAMS[name].file for name in IN_TOOLS} == files
    assert PROGRAMS[TRAIN].file == "pretrain_gpt.py"


@pytest.mark.parametrize("name", IN_TOOLS)
def test_a_file_of_tools_only_starts_the_program(name: str) -> None:
    program = PROGRAMS[name]
    path = REPOSITORY / program.file
    assert set(imports(path)) - {"__future__", "__future__.annotations"} == {
        "start_tool",
        program.module,
        f"{program.module}.main",
    }
    assert not any(isinstance(node, ast.FunctionDef | ast.ClassDef) for node in tree(path).body)
    assert len(path.read_text(encoding="utf-8").splitlines()) <= MOST_LINES


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_starts_by_its_name(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Claim (command-line): `python -m megatron_ds NAME` starts each program, whose messages have
    this name
    """
    monkeypatch.setattr(sys, "argv", [console.__file__, name])
    status: object
    try:
        status = console.main([name, "--help"])
    except SystemExit as end:
        status = end.code
    usage, _, _ = capsys.readouterr().out.partition("\n")
    assert not status
    assert usage.startswith("usage: ")
    assert f" {console.CONSOLE} {name} " in usage


def test_the_overview_has_a_sentence_for_each_program_and_imports_none(tmp_path: Path) -> None:
    code = (
        "import sys; from megatron_ds.__main__ import main; main([]); "
        "sys.exit(any(name in sys.modules for name in ('torch', 'megatron_ds.training.run')))"
    )
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = [{str(REPOSITORY)!r}]; {code}"],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
    )
    rows = [line.split(maxsplit=1) for line in done.stdout.splitlines()[3:]]
    assert [name for name, _ in rows] == list(PROGRAMS)
    assert all(sentence.endswith(".") for _, sentence in rows)


def test_an_unknown_program_is_refused_with_a_similar_name(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert console.main(["plam"]) == ExitCode.BAD_SETTINGS
    printed = capsys.readouterr().err
    assert "[unknown-command]" in printed
    assert "'plan'" in printed


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["/usr/bin/megatron-ds", "slurm"], "megatron-ds slurm status"),
        ([console.__file__, "slurm"], "megatron-ds slurm status"),
        (["/usr/bin/megatron-ds"], "slurm.py status"),
        (["/usr/bin/megatron-ds", "run.yaml"], "slurm.py status"),
        (["tools/slurm.py", "slurm"], "slurm.py status"),
        (["/elsewhere/__main__.py", "slurm"], "slurm.py status"),
    ],
)
def test_messages_have_the_name_by_which_a_program_was_called(
    words: list[str], shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", words)
    assert shown_name("slurm.py status") == shown


def test_an_installed_package_has_the_command() -> None:
    """Its entry point in setup.py, and how a program is started again without the repository."""
    (entry,) = [
        ast.literal_eval(keyword.value)["console_scripts"]
        for node in ast.walk(ast.parse((REPOSITORY / "setup.py").read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        for keyword in node.keywords
        if keyword.arg == "entry_points"
    ]
    name, _, function = entry[0].partition(" = ")
    assert (name, pkgutil.resolve_name(function)) == (console.CONSOLE, console.main)


def test_a_program_is_started_again_by_its_file_or_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert start_words("plan") == [str(TOOLS / "plan.py")]
    monkeypatch.setattr(programs, "REPOSITORY", tmp_path)
    assert start_words("plan") == ["-m", "megatron_ds", "plan"]


def test_a_number_of_ranks_is_taken_from_the_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Claim (command-line): `megatron-ds train --num-gpus N` starts N ranks on this machine"""
    commands: list[Sequence[str]] = []

    def replaced(words: Sequence[str]) -> NoReturn:
        commands.append(words)
        raise SystemExit(0)

    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(local_ranks, "become", replaced)
    for words in (["--num-gpus", "2", "--lr", "1"], ["--lr", "1", "--num_gpus=2"]):
        with pytest.raises(SystemExit):
            console.main(["train", *words])
    first, second = commands
    assert first == second
    assert first[:3] == [sys.executable, "-m", "torch.distributed.run"]
    assert first[-6:] == ["2", "-m", "megatron_ds", "train", "--lr", "1"]


@pytest.mark.parametrize("value", ["two", "0", "-1", ""])
def test_a_wrong_number_of_ranks_is_refused(
    value: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit) as end:
        console.main(["train", "--num-gpus", value])
    assert end.value.code == ExitCode.BAD_SETTINGS
    assert "[bad-rank-count]" in capsys.readouterr().err


def test_ranks_are_not_started_by_ranks(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit) as end:
        console.main(["train", "--num-gpus", "2"])
    assert end.value.code == ExitCode.BAD_SETTINGS
    assert "[ranks-started-twice]" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("launcher", "installed"),
    [
        ("python", "python -m megatron_ds train"),
        ("torchrun --nproc_per_node 2", "torchrun --nproc_per_node 2 -m megatron_ds train"),
        ("deepspeed --num_gpus 2", "deepspeed --num_gpus 2 --module megatron_ds train"),
    ],
)
def test_a_shown_command_starts_the_file_or_the_module(
    launcher: str, installed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert training_words(launcher.split()) == [*launcher.split(), "pretrain_gpt.py"]
    monkeypatch.setattr(programs, "REPOSITORY", tmp_path)
    assert " ".join(training_words(launcher.split())) == installed
