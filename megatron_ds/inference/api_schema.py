"""What a body of `PUT /api` may say: from bytes to a checked query. Loads no torch.

The fields and their limits are those of Megatron's text generation server. What is wrong there and
answered with a shrug is an error here: an unknown field, a number where a truth value belongs, a
field that has no effect beside another.
"""

from __future__ import annotations

import difflib
import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_ds.config.fields import option_field

MAX_BODY = 8 * 2**20
"""Bytes."""
MAX_PROMPTS = 128
MAX_PROBLEMS = 20
"""Named in one answer."""
REPLACED = {
    "max_len": "tokens_to_generate",
    "sentences": "prompts",
    "prompt": "prompts",
    "max_tokens": "tokens_to_generate",
    "max_new_tokens": "tokens_to_generate",
    "seed": "random_seed",
}
"""Names of older servers and of others, and what they are called here."""
NOT_WITH_BEAMS = (
    "logprobs", "top_n_logprobs", "temperature", "top_k", "top_p", "top_p_decay", "top_p_bound",
    "stop_on_eol", "stop_on_double_eol", "random_seed",
)  # fmt: skip


@dataclass(frozen=True)
class Defaults:
    """Values for requests that do not set them."""

    tokens_to_generate: int = option_field(
        64,
        "new tokens per prompt, as far as the sequence has room",
        flag="out-seq-length",
        aliases=("tokens-to-generate",),
        minimum=1,
    )
    temperature: float = option_field(
        1.0, "divides the logits; below 1 favors probable tokens", above=0
    )
    top_k: int = option_field(0, "sample from the N most probable tokens; 0 is off", minimum=0)
    top_p: float = option_field(
        0.0,
        "sample from the fewest tokens with at least this total probability; 0 is off",
        minimum=0,
        maximum=1,
    )


@dataclass(frozen=True)
class GenerationRequest:
    """A checked request, as far as it can be checked without tokenizer and model."""

    prompts: tuple[str, ...]
    tokens_to_generate: int | None
    """None: as many as the defaults say and the model's length leaves room for."""
    logprobs: bool
    top_n_logprobs: int
    temperature: float
    top_k: int
    top_p: float
    top_p_decay: float
    top_p_bound: float
    add_BOS: bool
    stop_on_eol: bool
    stop_on_double_eol: bool
    prevent_newline_after_colon: bool
    random_seed: int | None
    no_log: bool
    beam_width: int | None
    stop_token: int | None
    length_penalty: float


@dataclass(frozen=True)
class _Int:
    low: int
    high: int

    def problem(self, value: object) -> str | None:
        # True and False are numbers to Python.
        whole = value if isinstance(value, int) and not isinstance(value, bool) else None
        if whole is not None and self.low <= whole <= self.high:
            return None
        return f"must be a whole number from {self.low} to {self.high}"


@dataclass(frozen=True)
class _Number:
    low: float
    high: float
    without_low: bool = False

    def problem(self, value: object) -> str | None:
        if isinstance(value, int | float) and not isinstance(value, bool):
            above = self.low < value if self.without_low else self.low <= value
            if above and value <= self.high:
                return None
        more = "more than " if self.without_low else ""
        return f"must be a number from {more}{self.low:g} to {self.high:g}"


class _Bool:
    def problem(self, value: object) -> str | None:
        return None if isinstance(value, bool) else "must be true or false"


class _Strings:
    def problem(self, value: object) -> str | None:
        if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
            return "must be a list of strings"
        if not 1 <= len(value) <= MAX_PROMPTS:
            return f"must be a list of 1 to {MAX_PROMPTS} strings"
        for number, text in enumerate(value, start=1):
            try:
                text.encode()
            except UnicodeEncodeError:
                return f"must be text, but prompt {number} holds half a surrogate pair"
        return None


FIELDS: Mapping[str, _Int | _Number | _Bool | _Strings] = {
    "prompts": _Strings(),
    "tokens_to_generate": _Int(0, 2**31 - 1),
    "logprobs": _Bool(),
    "top_n_logprobs": _Int(0, 10),
    "temperature": _Number(0, 100, without_low=True),
    "top_k": _Int(0, 1000),
    "top_p": _Number(0, 1),
    "top_p_decay": _Number(0, 1),
    "top_p_bound": _Number(0, 1),
    "add_BOS": _Bool(),
    "stop_on_eol": _Bool(),
    "stop_on_double_eol": _Bool(),
    "prevent_newline_after_colon": _Bool(),
    "random_seed": _Int(0, 2**63 - 1),
    "no_log": _Bool(),
    "beam_width": _Int(1, 128),
    "stop_token": _Int(0, 2**31 - 1),
    "length_penalty": _Number(-10, 10),
}


def read(body: bytes, defaults: Defaults) -> GenerationRequest:
    """Raises ValueError that names the problems."""
    given = _object(body)
    problems = list(itertools.islice(_field_problems(given), MAX_PROBLEMS))
    if not problems:
        problems = list(_contradictions(given))
    if problems:
        raise ValueError("; ".join(problems))
    return _query(given, defaults)


def _object(body: bytes) -> dict[str, Any]:
    if len(body) > MAX_BODY:
        raise ValueError(f"the body is longer than {MAX_BODY} bytes")
    try:
        given = json.loads(
            body, parse_constant=_refuse_constant, object_pairs_hook=_without_repetition
        )
    except UnicodeDecodeError as error:
        raise ValueError(f"the body is not UTF-8: {error}") from None
    except RecursionError:
        raise ValueError("the body is not a request: it is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"the body is not JSON: {error}") from None
    if not isinstance(given, dict):
        raise ValueError('the body must be a JSON object such as {"prompts": ["Hello"]}')
    return given


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the field {_shown(twice)} stands there twice")
    return found


def _field_problems(given: Mapping[str, Any]) -> Iterator[str]:
    if "prompts" not in given:
        yield "the field prompts is required"
    for name, value in given.items():
        if name in FIELDS:
            problem = FIELDS[name].problem(value)
            if problem is not None:
                yield f"{name} {problem}, not {_shown(value)}"
            continue
        near = difflib.get_close_matches(name[:100], FIELDS, n=1, cutoff=0.6)
        if name in REPLACED:
            yield f"there is no field {name}; it is called {REPLACED[name]} here"
        elif near:
            yield f"there is no field {_shown(name)}; did you mean {near[0]}?"
        else:
            yield f"there is no field {_shown(name)} (there are {', '.join(FIELDS)})"


def _contradictions(given: Mapping[str, Any]) -> Iterator[str]:
    if "" in given["prompts"] and not given.get("add_BOS"):
        yield "an empty prompt needs add_BOS: true"
    if given.get("top_k") and given.get("top_p"):
        yield "top_k and top_p exclude each other"
    for name in ("top_p_decay", "top_p_bound"):
        if given.get(name) and not given.get("top_p"):
            yield f"{name} has an effect only with top_p"
    if given.get("top_p") and given.get("top_p_bound", 0) > given["top_p"]:
        yield f"top_p_bound {given['top_p_bound']} is more than top_p {given['top_p']}"
    if given.get("top_p_bound") and not given.get("top_p_decay"):
        yield "top_p_bound has an effect only with top_p_decay"
    if given.get("stop_on_eol") and given.get("stop_on_double_eol"):
        yield "stop_on_eol and stop_on_double_eol exclude each other"
    if given.get("top_n_logprobs") and not given.get("logprobs"):
        yield "top_n_logprobs needs logprobs: true"
    scoring = given.get("tokens_to_generate") == 0
    if scoring and not given.get("logprobs") and "beam_width" not in given:
        yield "tokens_to_generate 0 only scores the prompts, which needs logprobs: true"
    if "beam_width" in given:
        if scoring:
            yield "beam_width needs tokens_to_generate of 1 or more"
        if len(given["prompts"]) > 1:
            yield f"beam_width takes one prompt, not {len(given['prompts'])}"
        useless = [name for name in NOT_WITH_BEAMS if given.get(name)]
        if useless:
            yield f"with beam_width there is no effect of {', '.join(useless)}"
    else:
        useless = [name for name in ("stop_token", "length_penalty") if name in given]
        if useless:
            yield f"only with beam_width there is an effect of {', '.join(useless)}"


def _query(given: Mapping[str, Any], defaults: Defaults) -> GenerationRequest:
    # What a request says of one kind of choice puts the server's default of the other aside.
    top_k = 0 if given.get("top_p") else defaults.top_k
    top_p = 0.0 if given.get("top_k") else defaults.top_p
    values: dict[str, Any] = {
        "tokens_to_generate": None,
        "top_n_logprobs": 0,
        "temperature": defaults.temperature,
        "top_k": top_k,
        "top_p": top_p,
        "top_p_decay": 0.0,
        "top_p_bound": 0.0,
        "random_seed": None,
        "beam_width": None,
        "stop_token": None,
        "length_penalty": 1.0,
        **{name: False for name, field in FIELDS.items() if isinstance(field, _Bool)},
        **given,
    }
    return GenerationRequest(**{**values, "prompts": tuple(given["prompts"])})


def _shown(value: object) -> str:
    """A value as JSON, not too long."""
    try:
        text = json.dumps(value)
    except RecursionError:
        return "a deep nest"
    return text if len(text) <= 60 else f"{text[:57]}..."
