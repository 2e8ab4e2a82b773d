"""Shell completion, as the shells compute it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from megatron_ds.cli import arguments
from megatron_ds.cli.completion import SHELLS, completion, with_training_flags
from megatron_ds.cli.flags import FlagTable, training_flags
from tests.pages.flags import tool_tables
from tests.problems import printed_codes


def completed(folder: Path, *lines: str) -> list[list[str]]:
    """What bash offers for the last word of each line."""
    if shutil.which("bash") is None:
        pytest.skip("bash is not installed")
    commands = {"explain": training_flags()}
    code = [
        completion(training_flags(), "bash"),
        completion(FlagTable("ds_config.py", (), ()), "bash", commands),
    ]
    (folder / "code").write_text("\n".join(code))
    script = """
        eval "$(cat code)"
        while read -ra COMP_WORDS; do
          COMP_CWORD=$((${#COMP_WORDS[@]} - 1)) COMPREPLY=()
          read -ra spec <<< "$(complete -p "${COMP_WORDS[0]}")"
          "${spec[-2]}"
          echo "${COMPREPLY[@]}"
        done
        """
    command, text = ["bash", "--norc", "-c", script], "\n".join(lines) + "\n"
    shown = subprocess.check_output(
        command, cwd=folder, input=text, stderr=subprocess.DEVNULL, text=True, timeout=60
    )
    return [line.split() for line in shown.splitlines()]


def test_bash_completes_flags_values_and_files(tmp_path: Path) -> None:
    (tmp_path / "corpus_text.bin").touch()
    cases = {
        "deepspeed --num_gpus 4 pretrain_gpt.py --micro": ["--micro-batch-size"],
        "pretrain_gpt.py --lr 3 --zero-st": ["--zero-stage"],
        "python ./pretrain_gpt.py --lr-decay-style c": ["constant", "cosine"],
        "torchrun --nproc-per-node 2 a/pretrain_gpt.py --data-path 1 corp": ["corpus_text.bin"],
        "python tools/ds_config.py exp": ["explain"],
        "python tools/ds_config.py explain --micro": ["--micro-batch-size"],
        "python other.py --micro": [],
        "torchrun --nproc": [],
    }
    assert completed(tmp_path, *cases) == list(cases.values())


@pytest.mark.parametrize("shell", SHELLS)
def test_the_code_of_every_program_is_valid(shell: str, tmp_path: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    tables, commands = [training_flags()], dict[str, FlagTable]()
    for program, table in tool_tables().items():
        _, _, command = program.partition(" ")
        if command:
            commands[command] = with_training_flags(table)
        else:
            tables.append(table)
    code = [completion(table, shell) for table in tables]
    code.append(completion(FlagTable("ds_config.py", (), ()), shell, commands))
    (tmp_path / "code").write_text("\n".join(code))
    subprocess.run([shell, "-n", "code"], cwd=tmp_path, check=True, timeout=60)


def test_the_code_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        arguments.parse(["--lr", "x", "--print-completion", "bash"])
    assert end.value.code == 0
    assert capsys.readouterr().out == completion(training_flags(), "bash") + "\n"


@pytest.mark.parametrize("shell", [["fish"], []])
def test_other_shells_are_an_error(shell: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        arguments.parse(["--print-completion", *shell])
    assert end.value.code == 2
    assert printed_codes(capsys.readouterr().err) == ["completion-of-no-shell"]
