"""The command line of pretrain_gpt.py: checks, help and version, and which rank reports."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from megatron_ds.cli import arguments
from megatron_ds.cli.arguments import build_config, parse
from megatron_ds.cli.flags import training_flags
from megatron_ds.cli.help import training_help
from megatron_ds.config.problems import Problem
from megatron_ds.engine.ds_config.merge import merge_file
from megatron_ds.launch.exit_codes import SettingsRejected
from megatron_ds.launch.software import version_text
from megatron_ds.launch.watch import liveness
from tests.problems import codes, printed_codes
from tests.tables import tables

TABLES = tables(__file__)

BASE = (
    "--num-layers=2 --num-attention-heads=2 --seq-length=8 --micro-batch-size=2 --lr=1e-3 "
    "--train-iters=4 --data-path=x --tokenizer-type=NullTokenizer --vocab-size=9"
)


def problems_of(line: str, world_size: int = 1) -> list[Problem]:
    return build_config(line.split(), world_size=world_size, warn=lambda _: None)[1]


@pytest.mark.parametrize("line", TABLES["unreadable_values"])
def test_problems_that_mention_an_unreadable_value_are_not_reported(line: str) -> None:
    problems = problems_of(f"{BASE} {line}", world_size=8)
    assert len(problems) == 1, problems


@pytest.mark.parametrize(("line", "field"), TABLES["unreadable_option_is_not_reported_as_missing"])
def test_unreadable_option_is_not_reported_as_missing(line: str, field: str) -> None:
    required = [problem.fields for problem in problems_of(line) if problem.code == "required"]
    assert required
    assert (field,) not in required


def test_problems_are_raised_for_a_message_about_all_hosts(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SettingsRejected) as raised:
        parse([*BASE.split(), "--seed=-1"], raises=True)
    printed = f"{raised.value}\n"
    assert capfd.readouterr() == ("", "")
    with pytest.raises(SystemExit):
        parse([*BASE.split(), "--seed=-1"])
    assert capfd.readouterr().err == f"pretrain_gpt.py: {printed}"
    assert [f"  - {problem}" for problem in raised.value.problems] == printed.splitlines()[1:]


def test_values_that_the_run_replaces_are_among_the_problems_of_a_rejected_command(
    capfd: pytest.CaptureFixture[str],
) -> None:
    line = f"{BASE} --hidden-size 8 --bf16 --zero-stage 0".split()
    assert parse(line, complete=merge_file).zero_stage == 1
    accepted = capfd.readouterr().err
    with pytest.raises(SystemExit):
        parse([*line, "--seed=-1"], complete=merge_file)
    rejected = capfd.readouterr().err
    code = "zero0-in-half-precision"
    assert [(text.count(code), "WARNING" in text) for text in (accepted, rejected)] == [
        (1, True),
        (1, False),
    ]
    assert "--zero-stage 1" in rejected


def test_value_is_checked_next_to_a_misspelt_flag() -> None:
    assert "out-of-range" in codes(problems_of("--num-layerz 2 --num-layers 0"))


NEEDED = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --micro-batch-size 2 "
    "--lr 1e-3 --tokenizer-type NullTokenizer --vocab-size 100 --data-path x --train-tokens 500000"
)
SCRIPT = TABLES["script"]
"""Lines of a shell script."""
REQUIRED = TABLES["required"]
"""Lines of the script without which the run would not do what the others request."""
DEPENDENT = {
    "--position-embedding-type": {"rotary_percent"},
    "--disable-bias-linear": {"add_qkv_bias"},
    "--lr-decay-style": {"lr_wsd_decay_samples", "lr_wsd_decay_style"},
    "--lr-warmup-samples": {"lr_warmup_init"},
    "--fp16": {"initial_loss_scale"},
    "--zero-stage": {"remote_device"},
    "--recompute-granularity": {
        "checkpoint_num_layers",
        "partition_activations",
        "contiguous_checkpointing",
        "profile_backward",
    },
    "--partition-activations": {"contiguous_checkpointing", "profile_backward"},
    "--save": {"save_interval", "keep_last"},
    "--load": {"ckpt_step"},
    "--tensorboard-dir": {"log_timers_to_tensorboard"},
}
"""The fields that have no effect without a line."""


@pytest.mark.parametrize("left_out", ["", *SCRIPT])
def test_lines_of_a_script_can_be_left_out(left_out: str) -> None:
    """Claim (command-line): any line of a script can be left out: flags that depend on it are
    warned of"""
    lines = " ".join([NEEDED, *(line for line in SCRIPT if line != left_out)])
    config, problems = build_config(
        lines.split(), world_size=2, warn=lambda _: None, complete=merge_file
    )
    flag = left_out.partition(" ")[0]
    assert set(codes(problems)) == ({REQUIRED[flag]} if flag in REQUIRED else set())
    ineffective = {name for warning in config.warnings() for name in warning.fields}
    assert problems or ineffective == DEPENDENT.get(flag, set())


def test_parse_exits_after_naming_all_problems(capsys: pytest.CaptureFixture[str]) -> None:
    line = "--hiden-size 9 --fp16 --bf16 --train-iters 10 --lr-warmup-iters 20"
    with pytest.raises(SystemExit) as ended:
        parse(line.split())
    assert ended.value.code == 2
    shown = printed_codes(capsys.readouterr().err)
    assert shown[0] == "unknown-flag"  # problems of the line precede those of values
    assert {"required", "mutually-exclusive", "warmup-not-shorter-than-decay"} <= set(shown)


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

    monkeypatch.setattr(liveness, "find_launchers", lambda: ("a launcher",))
    monkeypatch.setattr(arguments.time, "sleep", sleep)
    with pytest.raises(SystemExit) as end:
        parse([], rank=1)
    assert end.value.code == 2
    assert ("--lr " in capsys.readouterr().err) is not first_rank_reports


def test_help_and_version_exit_with_success(capsys: pytest.CaptureFixture[str]) -> None:
    table = training_flags()
    for words, text in (
        (["--lr", "x", "--help"], training_help(table)),
        (["--help-all"], training_help(table, every_flag=True)),
        (["-h", "--help-all"], training_help(table, every_flag=True)),
        (["--version"], version_text()),
    ):
        with pytest.raises(SystemExit) as ended:
            parse(words)
        assert ended.value.code == 0
        assert capsys.readouterr().out == text + "\n"
    shown = r"megatron_ds \d\S*, torch \d\S*, deepspeed \d\S*, Python 3\.\S+"
    assert re.fullmatch(shown, version_text())


def test_help_names_each_flag_once_with_its_default_in_80_columns() -> None:
    shown = training_help(training_flags(), every_flag=True)
    for flag in training_flags().own:
        assert len(re.findall(rf"^  --{flag.names[0]}\b(?!-)", shown, re.MULTILINE)) == 1, flag
    assert max(map(len, shown.splitlines())) <= 80
    for text in (
        "default: 0.02",
        "at least 1; no effect without --save)",
        "no effect without --fp16 or with --loss-scale)",
    ):
        assert text in " ".join(shown.split())
    assert "--micro_batch_size" not in shown


def test_the_short_help_has_the_required_flags_and_a_command_that_parses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = training_help(training_flags())
    listed = set(re.findall(r"^  --([\w-]+)", shown, re.MULTILINE))
    common = {flag.names[0] for flag in training_flags().own if flag.common}
    assert len(common) > 25
    assert listed - {"help-all", "version"} == common
    assert {flag.names[0] for flag in training_flags().own if flag.required} <= listed
    assert max(map(len, shown.splitlines())) <= 80
    _, _, command = shown.partition("  python pretrain_gpt.py ")
    words = shlex.split(command.partition("\n\n")[0].replace("\\\n", " "))
    for name in ("data/my_text_document.bin", "data/my_text_document.idx", "tokenizer/vocab.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "tokenizer" / "merges.txt").touch()
    monkeypatch.chdir(tmp_path)
    assert parse(words).model.num_layers == 4
