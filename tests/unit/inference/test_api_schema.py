"""Request bodies of PUT /api: defaults, fields and validation."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from megatron_ds.config.problems import UserError
from megatron_ds.inference.serving.api_schema import Defaults, GenerationRequest, read
from tests.problems import codes, raises_problem
from tests.tables import tables

TABLES = tables(__file__)

FIELDS = {field.name for field in dataclasses.fields(GenerationRequest)}
GOOD: dict[str, Any] = {"prompts": ["Hello"]}


def read_fields(defaults: Defaults | None = None, **given: Any) -> GenerationRequest:
    return read(json.dumps({**GOOD, **given}).encode(), defaults or Defaults())


def test_defaults_are_those_of_megatron() -> None:
    zero = dict.fromkeys(("top_n_logprobs", "top_k", "top_p", "top_p_decay", "top_p_bound"), 0)
    absent = dict.fromkeys(("tokens_to_generate", "random_seed", "beam_width", "stop_token"))
    one = {"temperature": 1.0, "length_penalty": 1.0}
    off = {name: False for name in FIELDS if name not in {*GOOD, *zero, *absent, *one}}

    assert vars(read_fields()) == {"prompts": ("Hello",), **zero, **absent, **one, **off}
    assert Defaults().tokens_to_generate == 64


def test_every_field_is_read() -> None:
    flags = ("logprobs", "add_BOS", "stop_on_eol", "prevent_newline_after_colon", "no_log")
    sampling = {"prompts": ["a", ""], "tokens_to_generate": 3, "top_n_logprobs": 10}
    sampling |= {"top_p": 0.5, "top_p_decay": 0.9, "top_p_bound": 0.5, "temperature": 100}
    sampling |= {"random_seed": 2**63 - 1, **dict.fromkeys(flags, True)}
    other_sampling = {"stop_on_double_eol": True, "top_k": 1000}
    beams = {"beam_width": 2, "stop_token": 5, "length_penalty": -0.5}
    for given in (sampling, other_sampling, beams):
        request = read_fields(**given)
        for name, value in given.items():
            assert getattr(request, name) == (tuple(value) if name == "prompts" else value)
    assert {*sampling, *other_sampling, *beams} == FIELDS


def test_top_k_in_a_request_disables_the_default_top_p_and_vice_versa() -> None:
    nucleus = Defaults(top_p=0.9)
    top = Defaults(temperature=0.5, top_k=7)

    assert read_fields(nucleus).top_p == 0.9
    assert (read_fields(nucleus, top_k=3).top_k, read_fields(nucleus, top_k=3).top_p) == (3, 0.0)
    assert (read_fields(top, top_p=0.1).top_k, read_fields(top, top_p=0.1).top_p) == (0, 0.1)
    assert read_fields(top).temperature == 0.5


INVALID_BODIES: dict[str, list[bytes]] = {
    "request-not-json": [
        b"",
        b"{",
        b"\xff\xfe\x00",
        b'{"prompts": ["\xe9"]}',
        b"[" * 100_000,
        b'{"prompts": ["a"], "temperature": NaN}',
        b'{"prompts": ["a"], "random_seed": ' + b"9" * 5000 + b"}",
    ],
    "request-field-repeated": [
        b'{"prompts": ["a"], "prompts": ["b"]}',
        b"{%b}" % b",".join(b'"%d": 0' % (number % 100_000) for number in range(100_001)),
    ],
    "request-not-json-object": [b"[]", b"null", b'"prompts"'],
    "request-field-missing": [b"{}"],
    "request-value-invalid": [b'{"prompts": ["\\ud800"]}'],
}


@pytest.mark.parametrize("code", INVALID_BODIES)
def test_invalid_bodies_are_rejected(code: str) -> None:
    for body in INVALID_BODIES[code]:
        with raises_problem(code):
            read(body, Defaults())


INVALID_VALUES: dict[str, list[Any]] = TABLES["invalid_values"]
INVALID_VALUES |= {"top_p": [1.5], "logprobs": [1], "top_n_logprobs": [11], "stop_on_eol": [1]}
INVALID_VALUES |= {"add_BOS": ["yes"], "beam_width": [0], "length_penalty": ["1"]}


@pytest.mark.parametrize("name", INVALID_VALUES)
def test_invalid_values_are_rejected(name: str) -> None:
    for value in INVALID_VALUES[name]:
        is_entry = name == "prompts" and isinstance(value, list) and len(value) == 1
        shown = json.dumps(value[0] if is_entry else value)[:50]
        with raises_problem("request-value-invalid", name, contains=shown):
            read_fields(**{name: value})


def test_a_seed_of_the_server_is_the_default_of_requests() -> None:
    defaults = Defaults(seed=7)
    body = {"prompts": ["a"]}
    for more, seed in (({}, 7), ({"random_seed": 0}, 0)):
        assert read(json.dumps(body | more).encode(), defaults).random_seed == seed


CONTRADICTIONS: list[tuple[dict[str, Any], str, str]] = TABLES["contradictions"]


@pytest.mark.parametrize(("given", "code", "name"), CONTRADICTIONS)
def test_contradicting_fields_are_rejected(given: dict[str, Any], code: str, name: str) -> None:
    """Claim (serving): contradicting fields of a request are rejected"""
    with pytest.raises(UserError) as raised:
        read_fields(**given)

    assert any(problem.code == code and name in problem.fields for problem in raised.value.problems)


@pytest.mark.parametrize(
    ("name", "suggestion"),
    [
        ("max_len", "tokens_to_generate"),
        ("sentences", "prompts"),
        ("temprature", "temperature"),
        ("zzz", "prompts, tokens_to_generate"),
    ],
)
def test_unknown_fields_are_rejected_with_a_suggestion(name: str, suggestion: str) -> None:
    with raises_problem("request-field-unknown", contains=suggestion) as raised:
        read_fields(**{name: 1})
    assert name in str(raised.problem)


def test_all_invalid_fields_are_reported_at_once() -> None:
    with pytest.raises(UserError) as raised:
        read_fields(prompts=1, top_k="a", tempature=3)

    invalid = "request-value-invalid"
    assert codes(raised.value.problems) == [invalid, invalid, "request-field-unknown"]


def test_each_invalid_prompt_is_named() -> None:
    with pytest.raises(UserError) as raised:
        read_fields(prompts=["a", 5, "b", ["c"], None])
    places = [str(problem).split()[0] for problem in raised.value.problems]
    assert places == ["prompts[1]", "prompts[3]", "prompts[4]"]


def test_messages_are_short() -> None:
    with raises_problem("request-value-invalid") as raised:
        read_fields(temperature="x" * 100_000)
    assert len(str(raised.problem)) < 200
    with pytest.raises(UserError) as many:
        read_fields(**{f"no{number}": 1 for number in range(100_000)})
    assert len(str(many.value)) < 10_000
