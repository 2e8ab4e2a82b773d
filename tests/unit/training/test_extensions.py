"""Parts that a program brings: what is checked of them, and the public names."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch.nn.functional as F

from megatron_ds.extend import (
    Callback,
    Config,
    Extensions,
    Logger,
    RunControl,
    StepResult,
    TrainState,
)
from megatron_ds.train_state import StepPlan
from tests import public_names
from tests.problems import raises_problem


class OwnLogger(Logger):
    def __init__(self, config: Config, state: TrainState) -> None:
        pass


def test_public_names_are_frozen() -> None:
    """If this fails, programs of users may: `python -m tests.public_names` accepts the change.

    Claim (extension): the public names and their arguments are frozen
    """
    assert public_names.GOLDEN.read_text() == public_names.public_names()


def test_parts_with_the_arguments_of_their_fields_are_accepted() -> None:
    loggers = [OwnLogger, lambda *_: OwnLogger(*_), lambda config, state, more=1: Logger()]
    extensions = Extensions(loss=F.cross_entropy, loggers=loggers, callbacks=[Callback()])
    assert [*extensions.problems()] == []


@pytest.mark.parametrize(
    ("field", "value", "code"),
    [
        ("callbacks", [Callback], "extension-of-other-type"),
        ("callbacks", [print], "extension-of-other-type"),
        ("loggers", [Logger()], "extension-of-other-type"),
        ("loggers", [Logger], "extension-with-other-arguments"),
        ("loggers", [lambda config: Logger()], "extension-with-other-arguments"),
        ("layer", lambda: None, "extension-with-other-arguments"),
        ("loss", 1.0, "extension-of-other-type"),
        ("loss", lambda logits, *, labels: logits, "extension-with-other-arguments"),
    ],
)
def test_other_parts_are_problems(field: str, value: Any, code: str) -> None:
    """Claim (extension): a part of the wrong type or with other arguments is reported before the
    start, with all other problems"""
    (problem,) = Extensions(**{field: value}).problems()
    assert problem.code == code


@pytest.mark.parametrize("value", [-0.1, float("inf"), float("nan")])
def test_a_factor_that_is_no_factor_is_refused(value: float) -> None:
    control = RunControl()
    with raises_problem("bad-learning-rate-factor"):
        control.learning_rate_factor = value
    assert control.learning_rate_factor == 1.0


def test_figures_are_taken_once_and_have_names_of_their_own() -> None:
    control = RunControl()
    control.log(mine=1, other=2.5)
    control.log(mine=3)
    assert control.take_figures() == {"mine": 3.0, "other": 2.5}
    assert control.take_figures() == {}
    with raises_problem("figure-name-taken", contains="lm_loss"):
        control.log(lm_loss=1.0)


def test_a_factor_is_kept_by_steps_stages_and_files() -> None:
    state = TrainState(iteration=3, learning_rate_factor=0.1)
    plan = StepPlan(4, 8, 1, lr=1.0, weight_decay=0.0, seq_length=2)
    after = state.advance(plan, StepResult(loss=1.0, grad_norm=None))
    for one in (
        after,
        after.next_stage(),
        TrainState.from_dict(json.loads(json.dumps(after.to_dict()))),
    ):
        assert one.learning_rate_factor == 0.1
    assert state.restarted().learning_rate_factor == 1.0
    assert "learning_rate_factor" not in TrainState().to_dict()
