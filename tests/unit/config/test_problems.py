"""Problems with codes, and the catalogue of all messages."""

from __future__ import annotations

import pickle
import re

import pytest

from megatron_ds.config.problems import Problem, UserError, option, raise_if_any
from tests.problems import raises_problem
from tools import make_messages

PROBLEM = Problem("not-positive", f"{option('seq_length')} 0: must be positive", "seq_length")


def test_the_catalogue_is_current() -> None:
    """If this fails, run `python tools/make_messages.py` and read the difference."""
    assert make_messages.OUTPUT.read_text(encoding="utf-8") == make_messages.catalogue()


def test_a_code_is_one_kind_of_problem() -> None:
    for code, entries in make_messages.messages().items():
        assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", code), code
        assert len(entries) == 1, "\n".join(["one code, several messages:", *sorted(entries)])


def test_a_problem_is_its_message_with_the_default_flag() -> None:
    assert PROBLEM == "--seq-length 0: must be positive"
    assert (PROBLEM.code, PROBLEM.fields) == ("not-positive", ("seq_length",))


def test_a_problem_is_rendered_with_the_flags_of_a_tool() -> None:
    text = PROBLEM.render({"seq_length": "--length"}.__getitem__)

    assert text == "--length 0: must be positive [not-positive]"


def test_an_error_passes_a_process_boundary_with_its_problems() -> None:
    error = pickle.loads(pickle.dumps(UserError(PROBLEM)))

    assert error.problems[0].render() == PROBLEM.render()


def test_all_problems_are_raised_at_once() -> None:
    raise_if_any([])
    with pytest.raises(UserError) as raised:
        raise_if_any([PROBLEM, Problem("other", "another")])

    assert raised.value.problems == (PROBLEM, "another")


def test_an_expected_problem_is_compared_by_code_and_fields() -> None:
    with raises_problem("not-positive", "seq_length", contains="0"):
        raise UserError(PROBLEM)
