"""Reading a command line: spellings, values, and every problem at once."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ds.cli.arguments import build_config
from megatron_ds.cli.flags import training_flags
from megatron_ds.cli.scan import ParsedLine, scan
from megatron_ds.config import Config
from tests.problems import codes, fields
from tests.tables import tables

TABLES = tables(__file__, tuple)


def config_of(line: str) -> Config:
    return build_config(line.split(), world_size=1, warn=lambda _: None)[0]


def scan_of(line: str) -> ParsedLine:
    return scan(line.split(), training_flags())


VALID: list[tuple[str, dict[str, Any]]] = TABLES["valid"]


@pytest.mark.parametrize(("line", "values"), VALID)
def test_valid_line_gives_values_without_a_word(line: str, values: dict[str, Any]) -> None:
    found = scan_of(line)
    assert found.values == values
    assert list(map(type, found.values.values())) == list(map(type, values.values()))
    assert found.problems == found.warnings == []


@pytest.mark.parametrize(("line", "implied"), TABLES["forks"])
def test_spellings_of_one_fork_select_its_defaults(line: str, implied: dict[str, Any]) -> None:
    found = scan_of(line)
    assert found.implied == implied
    assert found.values.keys().isdisjoint(implied)
    warned = [each for each in found.warnings if each.code == "implied-defaults"]
    assert len(warned) == bool(implied)
    if "expert_interval" in implied:
        assert "--expert-interval 2 (else 1)" in str(warned[0])
    if "moe_router_topk" in implied:
        assert "--moe-router-topk 1 (else 2)" in str(warned[0])


def test_a_family_of_flags_is_ignored_by_the_beginning_of_their_names() -> None:
    found = scan_of("--inference-max-requests 8 --inference-dynamic-batching --rl-x 1 2 --lr 1")
    assert (found.values, found.problems) == ({"lr": 1.0}, [])
    assert codes(found.warnings) == ["ignored-flag"]
    assert "unknown-flag" in codes(scan_of("--inferenc 8").problems)


def test_words_of_unknown_flags_are_kept_as_they_are_written() -> None:
    line = scan(
        ["--lr", "1", "--pp=2", "x", "--name", "a=b", "--empty=", "-v"],
        training_flags(),
        keep_unknown=True,
    )
    assert (line.values, line.problems) == ({"lr": 1.0}, [])
    assert line.unknown == ["--pp=2", "x", "--name", "a=b", "--empty=", "-v"]


INVALID = TABLES["invalid"]


@pytest.mark.parametrize(("line", "code", "name", "shown"), INVALID)
def test_invalid_line_is_reported_with_field_and_value(
    line: str, code: str, name: str, shown: str
) -> None:
    (problem,) = scan_of(line).problems
    assert (problem.code, " ".join(problem.fields)) == (code, name)
    assert shown in str(problem)


def test_the_given_fields_are_recorded() -> None:
    given = config_of("--num-layers 2 --swiglu --use-flash-attn").given
    assert given == {"num_layers", "activation"}


def test_the_last_of_a_repeated_flag_applies_with_a_warning() -> None:
    line = scan_of("--lr 1e-3 --num-layers 2 --lr 2e-3 --num_layers 2")
    assert line.values == {"lr": 2e-3, "num_layers": 2}
    assert codes(line.warnings) == ["repeated-flag"]
    assert fields(line.warnings) == [("lr",)]
    assert line.problems == []


def test_a_value_that_differs_from_itself_contradicts_no_other() -> None:
    line = scan_of("--lr nan")
    assert (codes(line.warnings), line.problems) == ([], [])


def test_flags_without_effect_are_warnings_by_reason() -> None:
    line = scan_of(
        "--use-flash-attn --DDP-impl local --log-level info --logging-level 20 "
        "--recompute-method block"
    )
    assert codes(line.warnings) == ["ignored-flag"] * 4
    assert "--log-level, --logging-level" in str(line.warnings[2])
    assert (line.values, line.problems) == ({}, [])


@pytest.mark.parametrize("argument", ["\u2013\u2013num-workers", "\u2014lr", " "])
def test_dashes_and_escaped_spaces_are_explained(argument: str) -> None:
    def found(word: str) -> str:
        (problem,) = scan(["--lr", "1", word], training_flags()).problems
        assert problem.code == "unexpected-argument"
        return str(problem).replace(repr(word), "")

    assert found(argument) != found("word")


def test_all_problems_of_a_line_are_reported_at_once() -> None:
    """Claim (command-line): all errors of a command line are reported at once"""
    line = scan_of(
        "--num-layers two --lr-decay-style cos --hiden-size 8 --ds-sequence-parallel-fpdt --bf16 "
        "--micro-batch-size 2 --batch-size 4 --num-attention-heads 2.5 --hidden-size 9 --fp16 yes "
        "--seq-length 16 --weight-decay"
    )
    assert sorted(codes(line.problems)) == [*TABLES["problems"]]


VALUES = ("0", "-1", "2", "1e3", "nan", "inf", "", "1__0", "9" * 5000, "x", "-", "--", "\0", "é")


@given(
    flags=st.lists(st.sampled_from(sorted(training_flags().by_name)), max_size=4),
    values=st.lists(st.sampled_from(VALUES), min_size=8, max_size=8),
)
@settings(max_examples=150, deadline=None, derandomize=True, database=None)
def test_every_line_gives_a_configuration_and_problems(flags: list[str], values: list[str]) -> None:
    line = [word for pair in zip(flags, values, strict=False) for word in (f"--{pair[0]}", pair[1])]
    config, _ = build_config([*line, *values[4:6]], world_size=2, warn=lambda _: None)
    assert isinstance(config, Config)
