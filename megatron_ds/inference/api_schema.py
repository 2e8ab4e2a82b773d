"""Schema of `PUT /api`: parses and validates a request body. Loads no torch.

The fields and their limits are those of Megatron's text generation server. In addition, unknown
fields, values of a wrong type and fields without an effect are errors.
"""

from __future__ import annotations

import difflib
import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_ds.config.fields import option_field
from megatron_ds.config.problems import Problem, UserError, raise_if_any, user_error

MAX_BODY = 8 * 2**20
"""Bytes."""
MAX_PROMPTS = 128
MAX_PROBLEMS = 20
"""Problems in one response."""
MAX_VALUE_CHARS = 60
"""Characters of a value in messages."""
RENAMED_FIELDS = {
    "max_len": "tokens_to_generate",
    "sentences": "prompts",
    "prompt": "prompts",
    "max_tokens": "tokens_to_generate",
    "max_new_tokens": "tokens_to_generate",
    "seed": "random_seed",
}
"""Fields of older and other servers, and their names here."""
SAMPLING_ONLY = (
    "logprobs", "top_n_logprobs", "temperature", "top_k", "top_p", "top_p_decay", "top_p_bound",
    "stop_on_eol", "stop_on_double_eol", "random_seed",
)  # fmt: skip


@dataclass(frozen=True)
class Defaults:
    """Values for requests that do not set them."""

    tokens_to_generate: int = option_field(
        64,
        "maximum number of new tokens per prompt",
        flag="out-seq-length",
        aliases=("tokens-to-generate",),
        minimum=1,
    )
    temperature: float = option_field(
        1.0, "sampling temperature; values below 1 favor probable tokens", above=0
    )
    top_k: int = option_field(0, "sample from the N most probable tokens; 0 disables", minimum=0)
    top_p: float = option_field(
        0.0,
        "sample from the smallest set of tokens with at least this total probability; 0 disables",
        minimum=0,
        maximum=1,
    )


@dataclass(frozen=True)
class GenerationRequest:
    """A request, validated as far as possible without tokenizer and model."""

    prompts: tuple[str, ...]
    tokens_to_generate: int | None
    """None: the default number, limited by the maximal length of a text."""
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

    def expected(self, value: object) -> str | None:
        # bool is a subclass of int.
        is_integer = isinstance(value, int) and not isinstance(value, bool)
        if is_integer and self.low <= value <= self.high:  # type: ignore[operator]
            return None
        return f"an integer from {self.low} to {self.high}"


@dataclass(frozen=True)
class _Number:
    low: float
    high: float
    is_open: bool = False
    """Whether `low` itself is excluded."""

    def expected(self, value: object) -> str | None:
        if isinstance(value, int | float) and not isinstance(value, bool):
            is_above = self.low < value if self.is_open else self.low <= value
            if is_above and value <= self.high:
                return None
        above = "above " if self.is_open else "from "
        return f"a number {above}{self.low:g} to {self.high:g}"


class _Bool:
    def expected(self, value: object) -> str | None:
        return None if isinstance(value, bool) else "true or false"


class _Strings:
    def expected(self, value: object) -> str | None:
        is_valid = (
            isinstance(value, list)
            and 1 <= len(value) <= MAX_PROMPTS
            and all(isinstance(text, str) and _is_unicode(text) for text in value)
        )
        return None if is_valid else f"a list of 1 to {MAX_PROMPTS} strings of valid Unicode"


FIELDS: Mapping[str, _Int | _Number | _Bool | _Strings] = {
    "prompts": _Strings(),
    "tokens_to_generate": _Int(0, 2**31 - 1),
    "logprobs": _Bool(),
    "top_n_logprobs": _Int(0, 10),
    "temperature": _Number(0, 100, is_open=True),
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
    """Parses and validates a request.

    Raises:
        UserError: With all problems, at most `MAX_PROBLEMS`.
    """
    given = _read_object(body)
    raise_if_any(itertools.islice(_field_problems(given), MAX_PROBLEMS))
    raise_if_any([*_sampling_problems(given), *_beam_problems(given)])
    return _with_defaults(given, defaults)


def body_too_long(limit: int) -> UserError:
    return user_error("request-too-long", limit=limit)


def _read_object(body: bytes) -> dict[str, Any]:
    if len(body) > MAX_BODY:
        raise body_too_long(MAX_BODY)
    try:
        given = json.loads(
            body, parse_constant=_reject_constant, object_pairs_hook=_reject_repetition
        )
    except UserError:
        raise
    except (ValueError, RecursionError) as error:
        raise user_error("request-not-json", error=error) from None
    if not isinstance(given, dict):
        raise user_error("request-not-json-object")
    return given


def _reject_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def _reject_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        repeated = next(name for name in names if names.count(name) > 1)
        raise user_error("request-field-repeated", as_json=_as_json(repeated))
    return found


def _field_problems(given: Mapping[str, Any]) -> Iterator[Problem]:
    if "prompts" not in given:
        yield Problem("request-field-missing")
    for name, value in given.items():
        if name not in FIELDS:
            yield Problem(
                "request-field-unknown", as_json=_as_json(name), field_hint=_field_hint(name)
            )
            continue
        expected = FIELDS[name].expected(value)
        if expected is not None:
            yield Problem(
                "request-value-invalid", name, name=name, expected=expected, as_json=_as_json(value)
            )


def _field_hint(name: str) -> str:
    if name in RENAMED_FIELDS:
        return f"; it is called {RENAMED_FIELDS[name]} here"
    similar = difflib.get_close_matches(name[:100], FIELDS, n=1, cutoff=0.6)
    return f"; did you mean {similar[0]}?" if similar else f" (known are {', '.join(FIELDS)})"


def _sampling_problems(given: Mapping[str, Any]) -> Iterator[Problem]:
    if "" in given["prompts"] and not given.get("add_BOS"):
        yield Problem("empty-prompt-needs-bos")
    for first, second in (("top_k", "top_p"), ("stop_on_eol", "stop_on_double_eol")):
        if given.get(first) and given.get(second):
            yield Problem("request-fields-exclusive", first, second, first=first, second=second)
    for name, needed in (
        ("top_p_decay", "top_p"),
        ("top_p_bound", "top_p"),
        ("top_p_bound", "top_p_decay"),
        ("top_n_logprobs", "logprobs"),
    ):
        if given.get(name) and not given.get(needed):
            yield Problem("request-field-needs-another", name, needed, name=name, needed=needed)
    if given.get("top_p") and given.get("top_p_bound", 0) > given["top_p"]:
        yield Problem("top-p-bound-above-top-p", bound=given["top_p_bound"], top_p=given["top_p"])


def _beam_problems(given: Mapping[str, Any]) -> Iterator[Problem]:
    scores_only = given.get("tokens_to_generate") == 0
    if "beam_width" not in given:
        if scores_only and not given.get("logprobs"):
            yield Problem("scoring-without-logprobs")
        beam_only = [name for name in ("stop_token", "length_penalty") if name in given]
        if beam_only:
            yield Problem(
                "request-fields-only-for-beam-search", *beam_only, beam_only=", ".join(beam_only)
            )
        return
    if scores_only:
        yield Problem("beam-search-without-new-tokens")
    if len(given["prompts"]) > 1:
        yield Problem("beam-search-with-several-prompts", num_given=len(given["prompts"]))
    sampling_only = [name for name in SAMPLING_ONLY if given.get(name)]
    if sampling_only:
        yield Problem(
            "request-fields-not-for-beam-search",
            *sampling_only,
            sampling_only=", ".join(sampling_only),
        )


def _with_defaults(given: Mapping[str, Any], defaults: Defaults) -> GenerationRequest:
    # Setting top_k in a request disables the server's default top_p, and vice versa.
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


def _is_unicode(text: str) -> bool:
    """Whether a text has no lone surrogate, which JSON can express but UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _as_json(value: object) -> str:
    """A value for messages, shortened."""
    try:
        text = json.dumps(value)
    except RecursionError:
        return "a deeply nested value"
    return text if len(text) <= MAX_VALUE_CHARS else f"{text[: MAX_VALUE_CHARS - 3]}..."
