"""Request bodies of any bytes: a valid request or a UserError."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from megatron_ds.inference.api_schema import Defaults, GenerationRequest, read, read_fields
from megatron_ds.inference.completions_api import CompletionRequest
from tests.fuzz.fuzz_helpers import FUZZ_SETTINGS, JSON, REJECTED, read_or_error

FIELDS = [field.name for field in dataclasses.fields(GenerationRequest)]
COMPLETION_FIELDS = [field.name for field in dataclasses.fields(CompletionRequest)]
GOOD: dict[str, Any] = {"prompts": ["a", "b"], "tokens_to_generate": 5, "temperature": 0.5}
GOOD |= {"top_p": 0.9, "logprobs": True, "random_seed": 1}


def check(body: bytes, *names: str) -> None:
    """`names`: fields, one of which an error about a field must name."""
    request = read_or_error(lambda: read(body, Defaults()), "the body", "field", *names)
    if request is REJECTED:
        return
    assert isinstance(request, GenerationRequest)
    assert request.prompts
    assert all(isinstance(prompt, str) for prompt in request.prompts)
    assert 0 < request.temperature <= 100
    assert math.isfinite(request.length_penalty)
    assert request.random_seed is None or request.random_seed >= 0


@given(body=st.binary(max_size=40) | st.text(max_size=20).map(lambda text: text.encode("utf-16")))
@FUZZ_SETTINGS
def test_any_bytes(body: bytes) -> None:
    check(body)


@given(value=JSON)
@FUZZ_SETTINGS
def test_any_json(value: object) -> None:
    check(json.dumps(value).encode(), "prompts")


@given(fields=st.dictionaries(st.sampled_from([*FIELDS, "max_len", "x"]), JSON, max_size=3))
@FUZZ_SETTINGS
def test_any_value_in_any_field(fields: dict[str, object]) -> None:
    check(json.dumps({**GOOD, **fields}).encode(), *fields, *GOOD)


@given(at=st.integers(0, len(json.dumps(GOOD)) - 1), new=st.integers(0, 255))
@FUZZ_SETTINGS
def test_one_changed_byte(at: int, new: int) -> None:
    body = bytearray(json.dumps(GOOD).encode())
    body[at] = new
    check(bytes(body), *FIELDS)


@given(body=JSON | st.dictionaries(st.sampled_from(COMPLETION_FIELDS), JSON, max_size=4))
@FUZZ_SETTINGS
def test_any_completion(body: object) -> None:
    text = json.dumps(body).encode()

    def read_completion() -> CompletionRequest:
        fields = read_fields(text, CompletionRequest, "prompt", null_is_default=True)
        return CompletionRequest(**fields)

    request = read_or_error(read_completion, "the body", "field", *COMPLETION_FIELDS)
    if request is not REJECTED:
        assert isinstance(request, CompletionRequest)
        assert request.n >= 1
        assert 0 <= request.temperature <= 100
        list(request.problems())
