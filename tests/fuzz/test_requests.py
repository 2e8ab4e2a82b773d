"""Any bytes as the body of a request for text: a checked query, or an error in words."""

from __future__ import annotations

import json
import math
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from megatron_ds.inference.api_schema import FIELDS, Defaults, GenerationRequest, read
from tests.fuzz.fuzz_helpers import FUZZ, JSON, REFUSED, read_or_refuse

GOOD: dict[str, Any] = {
    "prompts": ["a", "b"],
    "tokens_to_generate": 5,
    "temperature": 0.5,
    "top_p": 0.9,
    "logprobs": True,
    "random_seed": 1,
}


def check(body: bytes, *named: str) -> None:
    query = read_or_refuse(lambda: read(body, Defaults()), "the body", "there", *named)
    if query is REFUSED:
        return
    assert isinstance(query, GenerationRequest)
    assert query.prompts
    assert all(isinstance(prompt, str) for prompt in query.prompts)
    assert 0 < query.temperature <= 100
    assert math.isfinite(query.length_penalty)
    assert query.random_seed is None or query.random_seed >= 0


@given(body=st.binary(max_size=40) | st.text(max_size=20).map(lambda text: text.encode("utf-16")))
@FUZZ
def test_any_bytes(body: bytes) -> None:
    check(body)


@given(value=JSON)
@FUZZ
def test_any_json(value: object) -> None:
    check(json.dumps(value).encode(), "prompts")


@given(fields=st.dictionaries(st.sampled_from([*FIELDS, "max_len", "x"]), JSON, max_size=3))
@FUZZ
def test_any_value_in_any_field(fields: dict[str, object]) -> None:
    check(json.dumps({**GOOD, **fields}).encode(), *fields, *GOOD)


@given(at=st.integers(0, len(json.dumps(GOOD)) - 1), new=st.integers(0, 255))
@FUZZ
def test_one_byte_changed(at: int, new: int) -> None:
    body = bytearray(json.dumps(GOOD).encode())
    body[at] = new
    check(bytes(body), *FIELDS)
