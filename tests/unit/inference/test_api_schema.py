"""Bodies of PUT /api: what is read, and each way in which they can be wrong."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ds.inference.api_schema import FIELDS, MAX_BODY, Defaults, GenerationRequest, read

GOOD: dict[str, Any] = {"prompts": ["Hello"]}


def read_fields(defaults: Defaults | None = None, **fields: Any) -> GenerationRequest:
    return read(json.dumps({**GOOD, **fields}).encode(), defaults or Defaults())


def problem_of(body: bytes | dict[str, Any]) -> str:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    with pytest.raises(ValueError) as error:
        read(data, Defaults())
    return str(error.value)


def test_absent_fields_are_megatrons_defaults() -> None:
    query = read_fields()

    assert query == GenerationRequest(
        prompts=("Hello",),
        tokens_to_generate=None,
        logprobs=False,
        top_n_logprobs=0,
        temperature=1.0,
        top_k=0,
        top_p=0.0,
        top_p_decay=0.0,
        top_p_bound=0.0,
        add_BOS=False,
        stop_on_eol=False,
        stop_on_double_eol=False,
        prevent_newline_after_colon=False,
        random_seed=None,
        no_log=False,
        beam_width=None,
        stop_token=None,
        length_penalty=1.0,
    )
    assert Defaults().tokens_to_generate == 64


def test_every_field_is_read() -> None:
    sampled = {
        "prompts": ["a", ""],
        "tokens_to_generate": 3,
        "logprobs": True,
        "top_n_logprobs": 10,
        "temperature": 100,
        "top_p": 0.5,
        "top_p_decay": 0.9,
        "top_p_bound": 0.5,
        "add_BOS": True,
        "stop_on_eol": True,
        "prevent_newline_after_colon": True,
        "random_seed": 2**63 - 1,
        "no_log": True,
    }
    others = {"stop_on_double_eol": True, "top_k": 1000}
    beams = {"beam_width": 2, "stop_token": 5, "length_penalty": -0.5}
    for fields in (sampled, others, beams):
        query = read_fields(**fields)
        for name, value in fields.items():
            assert getattr(query, name) == (tuple(value) if name == "prompts" else value)
    assert {*sampled, *others, *beams} == set(FIELDS)


def test_a_request_puts_the_servers_default_of_the_other_kind_aside() -> None:
    nucleus, top = Defaults(top_p=0.9), Defaults(temperature=0.5, top_k=7)

    assert read_fields(nucleus).top_p == 0.9
    assert (read_fields(nucleus, top_k=3).top_k, read_fields(nucleus, top_k=3).top_p) == (3, 0.0)
    assert (read_fields(top, top_p=0.1).top_k, read_fields(top, top_p=0.1).top_p) == (0, 0.1)
    assert read_fields(top).temperature == 0.5


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "the body is not JSON"),
        (b"{", "the body is not JSON"),
        (b"\xff\xfe\x00", "the body is not UTF-8"),
        (b'{"prompts": ["\xe9"]}', "the body is not UTF-8"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"prompts": ["a"], "temperature": NaN}', "NaN is no number of JSON"),
        (b'{"prompts": ["a"], "prompts": ["b"]}', 'the field "prompts" stands there twice'),
        (b'{"prompts": ["a"], "random_seed": ' + b"9" * 5000 + b"}", "the body is not JSON"),
        (b" " * (MAX_BODY + 1), "longer than"),
        (b"[]", "must be a JSON object"),
        (b"null", "must be a JSON object"),
        (b'"prompts"', "must be a JSON object"),
        (b"{}", "the field prompts is required"),
        (b'{"prompts": ["\\ud800"]}', "prompts must be text, but prompt 1 holds half"),
    ],
    ids=range(14),
)
def test_what_is_no_request_is_refused(body: bytes, words: str) -> None:
    assert words in problem_of(body)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"prompts": "a"}, "prompts must be a list of strings"),
        ({"prompts": [1]}, "prompts must be a list of strings"),
        ({"prompts": [["a"]]}, "prompts must be a list of strings"),
        ({"prompts": []}, "1 to 128"),
        ({"prompts": ["a"] * 129}, "1 to 128"),
        ({"prompts": ["a", ""]}, "an empty prompt needs add_BOS: true"),
        ({"tokens_to_generate": -1}, "tokens_to_generate must be a whole number from 0"),
        ({"tokens_to_generate": 1.0}, "must be a whole number"),
        ({"tokens_to_generate": True}, "must be a whole number"),
        ({"tokens_to_generate": "3"}, "must be a whole number"),
        ({"tokens_to_generate": None}, "must be a whole number"),
        ({"tokens_to_generate": 0}, "tokens_to_generate 0 only scores the prompts"),
        ({"logprobs": 1}, "logprobs must be true or false, not 1"),
        ({"top_n_logprobs": 11, "logprobs": True}, "from 0 to 10"),
        ({"top_n_logprobs": 1}, "top_n_logprobs needs logprobs: true"),
        ({"temperature": 0}, "temperature must be a number from more than 0 to 100, not 0"),
        ({"temperature": 100.1}, "temperature must be a number"),
        ({"temperature": "hot"}, 'temperature must be a number from more than 0 to 100, not "hot"'),
        ({"temperature": False}, "temperature must be a number"),
        ({"top_k": -1}, "top_k must be a whole number from 0 to 1000"),
        ({"top_k": 1001}, "top_k must be a whole number from 0 to 1000"),
        ({"top_k": 0.5}, "top_k must be a whole number"),
        ({"top_p": 1.5}, "top_p must be a number from 0 to 1"),
        ({"top_k": 1, "top_p": 0.1}, "top_k and top_p exclude each other"),
        ({"top_p_decay": 0.5}, "top_p_decay has an effect only with top_p"),
        ({"top_p_bound": 0.5}, "top_p_bound has an effect only with top_p"),
        ({"top_p": 0.5, "top_p_bound": 0.2}, "top_p_bound has an effect only with top_p_decay"),
        (
            {"top_p": 0.5, "top_p_decay": 0.5, "top_p_bound": 0.6},
            "top_p_bound 0.6 is more than top_p 0.5",
        ),
        ({"add_BOS": "yes"}, "add_BOS must be true or false"),
        ({"stop_on_eol": 1}, "stop_on_eol must be true or false"),
        ({"stop_on_eol": True, "stop_on_double_eol": True}, "exclude each other"),
        ({"random_seed": -1}, "random_seed must be a whole number from 0"),
        ({"random_seed": 2**63}, "random_seed must be a whole number"),
        ({"beam_width": 0}, "beam_width must be a whole number from 1 to 128"),
        ({"beam_width": 2, "prompts": ["a", "b"]}, "beam_width takes one prompt, not 2"),
        ({"beam_width": 2, "tokens_to_generate": 0}, "beam_width needs tokens_to_generate"),
        ({"beam_width": 2, "top_k": 3, "logprobs": True}, "no effect of logprobs, top_k"),
        ({"stop_token": 3}, "only with beam_width there is an effect of stop_token"),
        ({"length_penalty": "1"}, "length_penalty must be a number"),
        ({"max_len": 3}, "there is no field max_len; it is called tokens_to_generate here"),
        ({"sentences": ["a"]}, "it is called prompts here"),
        ({"temprature": 1}, 'there is no field "temprature"; did you mean temperature?'),
        ({"zzz": 1}, 'there is no field "zzz" (there are prompts, tokens_to_generate'),
    ],
    ids=str,
)
def test_a_wrong_field_is_named(fields: dict[str, Any], words: str) -> None:
    assert words in problem_of({**GOOD, **fields})


def test_all_wrong_fields_are_named_together() -> None:
    problem = problem_of({"prompts": 1, "top_k": "a", "tempature": 3})

    for words in ("prompts must", "top_k must", 'no field "tempature"'):
        assert words in problem


def test_a_long_wrong_value_is_cut_and_many_problems_are_not_all_told() -> None:
    assert len(problem_of({**GOOD, "temperature": "x" * 100_000})) < 200
    assert len(problem_of({f"no{number}": 1 for number in range(100_000)})) < 10_000


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=5,
)


@given(st.dictionaries(st.sampled_from([*FIELDS, "max_len", "x"]), JSON, max_size=4) | JSON)
@settings(max_examples=200, deadline=None, derandomize=True, database=None)
def test_any_json_is_a_query_or_an_error_in_words(body: Any) -> None:
    try:
        words = str(read(json.dumps(body).encode(), Defaults()))
    except ValueError as error:
        words = str(error)
    assert 10 < len(words) < 10_000
