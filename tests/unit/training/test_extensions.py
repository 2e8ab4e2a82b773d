"""Parts that a program brings: what is checked of them, and the public names."""

from __future__ import annotations

from typing import Any

import pytest
import torch.nn.functional as F

from megatron_ds.extend import Callback, Config, Extensions, Logger, TrainState
from tests import public_names


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
