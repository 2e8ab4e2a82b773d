"""Checks that follow from the declaration of option fields."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest

from megatron_ds.config.fields import (
    ANY_VALUE,
    UNSET_FLOAT,
    UNSET_INT,
    field_problems,
    ineffective,
    option_field,
    when,
)
from tests.problems import codes, fields


@dataclass(frozen=True)
class Options:
    size: int = option_field(UNSET_INT, "size", required=True, minimum=1)
    rate: float = option_field(UNSET_FLOAT, "rate", required=True, minimum=0)
    dropout: float = option_field(0.1, "dropout", minimum=0, below=1)
    share: float = option_field(0.5, "share", above=0, maximum=1)
    lengths: tuple[int, ...] | None = option_field(None, "lengths", nargs="*", minimum=1)
    kind: str = option_field("adam", "kind", choices=("adam", "sgd"))
    beta: float = option_field(0.9, "beta", only_with=when(kind="adam"))
    fp16: bool = option_field(False, "fp16")
    scale: float | None = option_field(None, "scale", only_with=when(fp16=True))
    window: int = option_field(10, "window", only_with=(when(fp16=True), when(scale=None)))
    folder: str | None = option_field(None, "folder")
    interval: int | None = option_field(None, "interval", only_with=when(folder=ANY_VALUE))


VALID = {"size": 8, "rate": 0.0}


def problems(**values: object) -> list[tuple[str, tuple[str, ...]]]:
    found = list(field_problems(Options(**{**VALID, **values})))
    return list(zip(codes(found), fields(found), strict=True))


def test_valid_options_have_no_problem():
    assert problems() == []
    assert problems(share=1.0, dropout=0.0, lengths=(1, 2), folder="x", interval=1) == []


@pytest.mark.parametrize(
    ("values", "code"),
    [
        ({"size": UNSET_INT}, "required"),
        ({"rate": UNSET_FLOAT}, "required"),
        ({"size": -1}, "out-of-range"),
        ({"rate": -1e-9}, "out-of-range"),
        ({"rate": math.inf}, "not-finite"),
        ({"dropout": 1.0}, "out-of-range"),
        ({"share": 0.0}, "out-of-range"),
        ({"lengths": (3, 0)}, "out-of-range"),
        ({"kind": "rmsprop"}, "invalid-choice"),
    ],
)
def test_each_declared_check_names_its_field(values, code):
    ((found, names),) = problems(**values)
    assert (found, names[0]) == (code, next(iter(values)))


def test_unset_value_that_was_given_is_out_of_range():
    found = list(field_problems(Options(size=0, rate=math.nan), given={"size", "rate"}))
    assert codes(found) == ["out-of-range", "not-finite"]


def test_only_given_flags_are_reported_as_ineffective():
    options = Options(kind="sgd")
    assert list(ineffective(options, ())) == []
    found = list(ineffective(options, {"beta", "scale", "window"}))
    assert codes(found) == ["no-effect", "no-effect"]
    assert fields(found) == [("beta",), ("scale", "window")]
    assert fields(ineffective(Options(fp16=True, scale=1.0), {"scale", "window"})) == [("window",)]
