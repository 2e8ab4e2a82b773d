"""The completion scripts, run by the shells that are installed."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from megatron_ds.cli import completion
from megatron_ds.programs import PROGRAMS

ASK = {
    "bash": """
source "$0"
COMP_WORDS=(megatron-ds "$@")
COMP_CWORD=$#
_megatron_ds
printf '%s\\n' "${COMPREPLY[@]}"
""",
    "zsh": """
compdef() { :; }
compadd() { shift; for word in "$@"; do [[ $word = $words[CURRENT]* ]] && print -r -- $word; done; }
_files() { :; }
source "$0"
words=(megatron-ds "$@")
CURRENT=${#words}
_megatron_ds
true
""",
    "fish": 'source $argv[1]; complete -C (string join " " -- megatron-ds $argv[2..])',
}
"""Prints what may replace the last word."""


@pytest.fixture(scope="module", params=ASK)
def shell(request: pytest.FixtureRequest) -> str:
    if shutil.which(request.param) is None:
        pytest.skip(f"{request.param} is not installed")
    return str(request.param)


@pytest.fixture(scope="module")
def script(shell: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("completion") / shell
    path.write_text(completion.script(shell))
    return path


@pytest.mark.parametrize(
    ("words", "offered", "not_offered"),
    [
        (["pla"], {"plan"}, {"train"}),
        (["train", "--lr-decay-st"], {"--lr-decay-style"}, {"--lr"}),
        (["train", "--lr-decay-style", ""], {"cosine", "WSD"}, {"--lr"}),
        (["train", "--num-g"], {"--num-gpus"}, set()),
        (["plan", "--num-g"], set(), {"--num-gpus"}),
        (["slurm", ""], {"submit", "status"}, {"--nodes"}),
        (["slurm", "--nod"], {"--nodes"}, set()),
        (["completion", ""], {"bash", "zsh", "fish"}, set()),
        (["train", "--sav"], {"--save"}, {"--load"}),
    ],
)
def test_a_shell_completes_programs_flags_and_values(
    words: list[str], offered: set[str], not_offered: set[str], shell: str, script: Path
) -> None:
    """Claim (command-line): bash, zsh and fish complete programs, flags and values of flags"""
    command = {
        "bash": ["bash", "-c", ASK[shell], str(script), *words],
        "zsh": ["zsh", "-f", "-c", ASK[shell], str(script), *words],
        "fish": ["fish", "--no-config", "-c", ASK[shell], str(script), *words],
    }[shell]
    done = subprocess.run(
        command, cwd=script.parent, capture_output=True, text=True, check=True, timeout=60
    )
    answers = {line.split("\t")[0] for line in done.stdout.splitlines()}
    assert offered <= answers, (answers, done.stderr)
    assert not not_offered & answers


def test_every_program_and_every_flag_of_training_is_completed() -> None:
    by_program = {item.program: item for item in completion.completed()}
    assert [*by_program] == [*PROGRAMS]
    assert all("--help" in item.flags for item in by_program.values())
    assert len(by_program["train"].flags) > 300
