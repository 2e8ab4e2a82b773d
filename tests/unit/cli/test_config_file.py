"""Files of --config: every value survives, precedence, and errors with file and line."""

from __future__ import annotations

import dataclasses
import shlex
from pathlib import Path

import pytest

from megatron_ds.cli import yaml_size
from megatron_ds.cli.arguments import build_config, parse
from megatron_ds.config import Config, yaml_file
from megatron_ds.config.problems import Problem
from tests.problems import codes
from tests.tables import tables

TABLES = tables(__file__)

BASE = (
    "--num-layers 2 --hidden-size 8 --num-attention-heads 2 --seq-length 8 --micro-batch-size 2 "
    "--lr 1e-3 --train-iters 4 --data-path x --tokenizer-type NullTokenizer --vocab-size 9 "
)


def built(line: str) -> tuple[Config, list[Problem], list[Problem]]:
    """Configuration, problems and warnings of a command line."""
    warnings: list[Problem] = []
    config, problems = build_config(shlex.split(line), world_size=1, warn=warnings.append)
    return config, problems, warnings


def written(folder: Path, content: str, name: str = "run.yaml") -> Path:
    path = folder / name
    path.write_text(content, encoding="utf-8")
    return path


@pytest.mark.parametrize("line", TABLES["settings"])
def test_a_written_file_repeats_the_settings(line: str, tmp_path: Path) -> None:
    """Claim (deepspeed): `--print-config` and `--config` are inverse to each other, for all types
    of values"""
    config, problems, warnings = built(BASE + line)
    path = written(tmp_path, yaml_file.dump(config))
    again, problems_again, warnings_again = built(f"--config {path}")

    runtime = dataclasses.replace(again.runtime, config=None)
    given = again.given - {"config"}
    assert dataclasses.replace(again, runtime=runtime, given=given) == config
    assert codes(problems_again) == codes(problems)
    assert len(warnings_again) == len(warnings)
    assert yaml_file.dump(again) == path.read_text("utf-8")


def test_flags_override_files_and_files_earlier_ones(tmp_path: Path) -> None:
    first = written(tmp_path, "lr: 1\nmin_lr: 0.1\nbf16: true\nsplit: 1,1,1\nseed: 5\n", "a.yaml")
    second = written(
        tmp_path, "min-lr: 0.2\nbf16: false\nsplit: null\ndefaults: {seed: 6, log-interval: 7}\n"
    )
    line = BASE.replace("--lr 1e-3", "--lr 2")
    config, problems, warnings = built(f"{line} --config {first} {second}")

    assert not problems
    assert not warnings
    assert (config.optimizer.lr, config.schedule.min_lr, config.runtime.seed) == (2, 0.2, 5)
    assert not config.precision.bf16
    assert config.data.split is None
    assert config.logging.log_interval == 7
    assert {"seed", "min_lr", "lr"} <= config.given
    assert config.given.isdisjoint({"log_interval", "split"})


def test_problems_name_file_and_line(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        "hiden-size: 64\n"
        "bf16: maybe\n"
        "lr: abc\n"
        "lr: 3\n"
        "config: x\n"
        "model:\n"
        "  a: 1\n"
        "weight-decay: -3\n"
        "lr-decay-style: cosin\n",
    )
    _, problems, _ = built(f"{BASE} --config {path}")

    located = {each.code: str(each) for each in problems}
    for code, line in TABLES["problems"].items():
        assert f"{path}:{line}" in located.pop(code)
    assert "--hidden-size" in str(problems)
    assert not located


@pytest.mark.parametrize(("content", "code", "contains"), TABLES["unreadable"])
def test_a_file_that_sets_nothing_is_the_only_problem(
    content: str | None, code: str, contains: str, tmp_path: Path
) -> None:
    """Without the settings that it would have made, which are missing."""
    path = tmp_path / "run.yaml" if content is None else written(tmp_path, content)
    _, (problem,), _ = built(f"--config {path} --lr 1")
    assert problem.code == code
    assert contains in str(problem)


@pytest.mark.parametrize(
    ("last", "fits"),
    [
        ("data-path: [a, b, c, d, e]", True),
        ("data-path: [a, b, c, d, e, f]", False),
        ("data-path: &a [b]\nlr: *a", True),
        ("data-path: &a [b, c]\nlr: *a", False),
        ("data-path: &a [[], []]\nlr: *a", False),
        ("? &a [b, c, d]\n: *a", False),
    ],
)
def test_a_file_has_a_limit_of_values_with_those_of_its_aliases(
    last: str, fits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With ten: the mapping, the two of `seed`, and the key and the list that follow."""
    monkeypatch.setattr(yaml_size, "MOST_VALUES", 10)
    path = written(tmp_path, f"seed: 5\n{last}")
    _, problems, _ = built(f"--config {path}")
    assert ("config-file-unreadable" not in codes(problems)) is fits


@pytest.mark.parametrize(
    "text",
    [
        "data-path: &a [x, *a]",
        "stages: [&a {lr: 1, stages: [*a]}]",
        f"data-path: {'[' * 21}{']' * 21}",
        f"data-path: {'[' * 500}{']' * 500}",
    ],
)
def test_what_is_too_deep_is_unreadable(text: str, tmp_path: Path) -> None:
    _, (problem,), _ = built(f"--config {written(tmp_path, text)}")
    assert problem.code == "config-file-unreadable"
    stages = text.removeprefix("stages: ").removeprefix("data-path: ")
    _, problems, _ = built(f"{BASE} --stages {shlex.quote(stages)}")
    assert "stages-unreadable" in codes(problems)


def test_a_setting_in_place_of_a_file_names_its_flag() -> None:
    _, (problem,), _ = built(f"{BASE} --config lr=1e-3")
    assert "--lr 1e-3" in str(problem)


def test_origins_are_those_of_the_values_in_effect(tmp_path: Path) -> None:
    first = written(
        tmp_path, "lr: 1\nmin-lr: 2\nglu-activation: swiglu\nhidden-size: 8\n", "a.yaml"
    )
    second = written(tmp_path, "min-lr: null\ndefaults: {seed: 6, log-interval: 7}\n")
    config, problems, _ = built(f"{BASE.replace('--hidden-size 8', '')} --config {first} {second}")
    assert not problems
    assert config.model.ffn_hidden_size == 32
    assert config.origins == {
        "activation": f"set in {first}:3",
        "hidden_size": f"set in {first}:4",
        "ffn_hidden_size": f"set in {first}",
    }


@pytest.mark.parametrize(
    ("content", "code"), [("lr: {a: 1}", "config-file-nested"), ("defaults: 5", "unknown-flag")]
)
def test_a_mapping_in_the_wrong_place_is_one_problem(
    content: str, code: str, tmp_path: Path
) -> None:
    line = BASE.replace("--lr 1e-3", "" if "lr" in content else "--lr 1")
    assert codes(built(f"{line} --config {written(tmp_path, content)}")[1]) == [code]


def test_a_contradiction_names_the_line_of_the_file(tmp_path: Path) -> None:
    path = written(tmp_path, "\nfp16: true\n")
    _, problems, _ = built(f"{BASE} --bf16 --config {path}")
    assert [f"--fp16 is set in {path}:2" in str(each) for each in problems] == [True]


def test_print_config_prints_a_file_and_ends(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match=r"^0$"):
        parse([*shlex.split(BASE), "--print-config"])
    first = capsys.readouterr().out
    path = written(tmp_path, first)
    with pytest.raises(SystemExit, match=r"^0$"):
        parse(["--config", str(path), "--print-config"])
    assert capsys.readouterr().out == first
    assert "\nnum-layers: 2\n" in first
    assert "\n  moe-router-topk: " not in first  # without an effect
    assert "\n  adam-beta1: 0.9\n" in first
