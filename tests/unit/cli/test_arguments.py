"""The command line of pretrain_gpt.py: checks, help and version, and which rank reports."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_ds.cli import arguments
from megatron_ds.cli.arguments import build_config, parse
from megatron_ds.cli.flags import training_flags
from megatron_ds.cli.help import training_help, version_text

REPOSITORY = Path(__file__).parents[3]
BASE = [
    "--num-layers=2",
    "--num-attention-heads=2",
    "--seq-length=8",
    "--micro-batch-size=2",
    "--lr=1e-3",
    "--train-iters=4",
    "--data-path=x",
    "--tokenizer-type=NullTokenizer",
    "--vocab-size=9",
]


def problems_of(line: str) -> str:
    return "\n".join(build_config(line.split(), world_size=1, warn=lambda _: None)[1])


def test_problems_of_values_follow_those_of_the_line() -> None:
    problems = problems_of("--hiden-size 9 --fp16 --bf16 --train-iters 10 --lr-warmup-iters 20")
    assert "--hiden-size" in problems.splitlines()[0]
    for flag in ("--num-layers", "--lr ", "--fp16", "--lr-warmup-iters"):
        assert flag in problems


@pytest.mark.parametrize(
    "line",
    [
        "--hidden-size 8 --tensor-model-parallel-size two --global-batch-size 8",
        "--hidden-size 8 --weight-decay-incr-style lineer --start-weight-decay 0",
        "--kv-channels x --hidden-size 66",
    ],
)
def test_problems_that_mention_an_unreadable_value_are_not_reported(line: str) -> None:
    flags = line.split()
    complete = [*(word for word in BASE if word not in flags), *flags]
    _, problems = build_config(complete, world_size=8, warn=lambda _: None)

    assert len(problems) == 1, problems


def test_consequences_of_an_unreadable_value_are_not_reported() -> None:
    problems = problems_of("--num-layers two --tokenizer-type GPT2BPE").splitlines()
    assert len([line for line in problems if "--num-layers" in line]) == 1
    assert len([line for line in problems if "--tokenizer-type" in line]) == 1


def test_a_misspelt_flag_is_not_reported_as_missing() -> None:
    assert not re.search(r"--hidden-size is", problems_of("--hiden-size 8"))
    problems = problems_of("--batch-sise 8 --num-layerz 2 --num-layers 0")
    assert not re.search(r"--micro-batch-size is", problems)
    assert "--num-layers 0" in problems


def test_parse_exits_after_naming_all_problems(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(["--num-layers", "2", "--hots"])
    assert ended.value.code == 2
    shown = capsys.readouterr().err
    assert "--hots" in shown
    assert "[unknown-flag]" in shown
    assert "--hidden-size" in shown
    assert "--lr " in shown


def test_only_the_first_rank_prints(capsys: pytest.CaptureFixture[str]) -> None:
    for line in ([], ["--use-flash-attn"], ["--help"], ["--version"]):
        with pytest.raises(SystemExit):
            parse(line, rank=1)
        assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("first_rank_reports", [True, False])
def test_a_launched_rank_reports_if_the_first_one_does_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], first_rank_reports: bool
) -> None:
    def sleep(seconds: float) -> None:
        if first_rank_reports:
            raise SystemExit  # as the handler of the launcher's signal does

    monkeypatch.setattr(arguments, "find_launchers", lambda: ("a launcher",))
    monkeypatch.setattr(arguments.time, "sleep", sleep)
    with pytest.raises(SystemExit) as end:
        parse([], rank=1)
    assert end.value.code == 2
    assert ("--lr " in capsys.readouterr().err) is not first_rank_reports


def test_help_and_version_exit_with_success(capsys: pytest.CaptureFixture[str]) -> None:
    table = training_flags()
    for words, text in (
        (["--lr", "x", "--help"], training_help(table)),
        (["--version"], version_text()),
    ):
        with pytest.raises(SystemExit) as ended:
            parse(words)
        assert ended.value.code == 0
        assert capsys.readouterr().out == text + "\n"


def test_help_names_each_flag_once_with_its_default_in_80_columns() -> None:
    shown = training_help(training_flags())
    for group in training_flags().groups:
        for flag in group.flags:
            assert len(re.findall(rf"^  --{flag.names[0]}\b(?!-)", shown, re.MULTILINE)) == 1, flag
    assert max(map(len, shown.splitlines())) <= 80
    assert "default: 0.02" in " ".join(shown.split())
    assert "--micro_batch_size" not in shown


def test_version_names_what_decides_the_numbers() -> None:
    assert re.fullmatch(
        r"megatron_ds \d\S*, torch \d\S*, deepspeed \d\S*, Python 3\.\S+", version_text()
    )


IMPORTS = """
import sys, runpy
sys.argv = ["pretrain_gpt.py", *sys.argv[1:]]
try:
    runpy.run_path("pretrain_gpt.py", run_name="__main__")
except SystemExit as ended:
    heavy = {"torch", "deepspeed", "transformers"} & set(sys.modules)
    print("ended", ended.code, sorted(heavy))
"""


@pytest.mark.parametrize(
    ("line", "code"), [("--help", 0), ("--version", 0), ("--num-layers two --fp17", 2)]
)
def test_help_and_argument_errors_import_neither_torch_nor_deepspeed(line: str, code: int) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", IMPORTS, *line.split()],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert ended.stdout.splitlines()[-1] == f"ended {code} []"
