"""Schema of `PUT /api`: parses and validates a request body. Loads no torch.

Fields and limits follow Megatron's text generation server. In addition, unknown
fields, values of a wrong type and fields without an effect are errors.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from megatron_ds.config.data_files import read_table
from megatron_ds.config.fields import option_field
from megatron_ds.config.problems import Problem, UserError, raise_if_any, user_error
from megatron_ds.inference.generation.sampling_params import CandidateOptions

MAX_PROMPTS = 128
MAX_PROBLEMS = 20
"""Problems in one response."""
MAX_VALUE_CHARS = 60
"""Characters of a value in messages."""
SURROGATE = re.compile("[\ud800-\udfff]")
"""Surrogates, which JSON can express in a string and UTF-8 cannot; `json` joins pairs."""
FIELDS = read_table(__file__, "request_fields.toml")
SAMPLING_ONLY: list[str] = FIELDS["sampling_only"]


@dataclass(frozen=True)
class Defaults(CandidateOptions):
    """Values for requests that do not set them."""

    tokens_to_generate: int = option_field(
        64, flag="out-seq-length", aliases=("tokens-to-generate",), minimum=1
    )
    """Maximum number of new tokens per prompt."""
    seed: int | None = option_field(None, minimum=0)
    """random_seed of requests that do not set one, whose texts are then the same each time."""


class InvalidPart(NamedTuple):
    """A part of a field's value that makes it invalid."""

    path: str
    """Path of the part below the field, such as `[2].content`."""
    expected: str
    """Valid values, for messages."""
    value: Any
    """The invalid value; `MISSING` if it is absent."""


MISSING = object()


def _nothing_invalid(value: Any) -> Iterator[InvalidPart]:
    return iter(())


def _is_any(value: Any) -> bool:
    return True


def request_field(
    default: Any,
    expected: str,
    is_valid: Callable[[Any], bool],
    find_invalid: Callable[[Any], Iterator[InvalidPart]] = _nothing_invalid,
) -> Any:
    """A field of a request.

    Args:
        default: Value if a request does not set it.
        expected: Valid values, for messages.
        is_valid: Whether a value is one of them. Types are compared exactly: bool is a subclass of
            int.
        find_invalid: The parts of an invalid value that messages name; none for the value itself.
    """
    metadata = {"expected": expected, "is_valid": is_valid, "find_invalid": find_invalid}
    return dataclasses.field(default=default, metadata=metadata)


def integer_field(low: int, high: int, default: int | None) -> Any:
    def is_valid(value: Any) -> bool:
        return type(value) is int and low <= value <= high

    return request_field(default, f"an integer from {low} to {high}", is_valid)


def number_field(
    low: float, high: float, default: float, *, is_open: bool = False, hint: str = ""
) -> Any:
    """A number; `is_open` excludes `low` itself."""

    def is_valid(value: Any) -> bool:
        is_number = type(value) in (int, float) and low <= value <= high
        return is_number and not (is_open and value == low)

    bounds = f"{'above' if is_open else 'from'} {low} to {high}"
    return request_field(default, f"a number {bounds}{hint}", is_valid)


def flag_field() -> Any:
    return request_field(False, "true or false", lambda value: isinstance(value, bool))


def is_text(value: Any) -> bool:
    """Whether a value is a string of valid Unicode."""
    return isinstance(value, str) and not SURROGATE.search(value)


def invalid_entries(
    value: Any, expected: str, is_valid: Callable[[Any], bool], limit: int
) -> Iterator[InvalidPart]:
    """The invalid entries of a list; empty if `value` is not a list or has more entries than the
    limit."""
    if isinstance(value, list) and len(value) <= limit:
        for index, entry in enumerate(value):
            if not is_valid(entry):
                yield InvalidPart(f"[{index}]", expected, entry)


def _is_prompts(value: Any) -> bool:
    is_list = isinstance(value, list) and 1 <= len(value) <= MAX_PROMPTS
    return is_list and all(map(is_text, value))


@dataclass(frozen=True)
class GenerationRequest:
    """A request, validated as far as possible without tokenizer and model."""

    prompts: tuple[str, ...] = request_field(
        (),
        f"a list of 1 to {MAX_PROMPTS} strings of valid Unicode",
        _is_prompts,
        lambda value: invalid_entries(value, "a string of valid Unicode", is_text, MAX_PROMPTS),
    )
    tokens_to_generate: int | None = integer_field(0, 2**31 - 1, None)
    """None: the default number, limited by the maximal length of a text."""
    logprobs: bool = flag_field()
    top_n_logprobs: int = integer_field(0, 10, 0)
    temperature: float = number_field(
        0, 100, 1.0, is_open=True, hint=" (top_k 1 always takes the most probable token)"
    )
    top_k: int = integer_field(0, 1000, 0)
    top_p: float = number_field(0, 1, 0.0)
    top_p_decay: float = number_field(0, 1, 0.0)
    top_p_bound: float = number_field(0, 1, 0.0)
    add_BOS: bool = flag_field()
    stop_on_eol: bool = flag_field()
    stop_on_double_eol: bool = flag_field()
    prevent_newline_after_colon: bool = flag_field()
    random_seed: int | None = integer_field(0, 2**63 - 1, None)
    no_log: bool = flag_field()
    beam_width: int | None = integer_field(1, 128, None)
    stop_token: int | None = integer_field(0, 2**31 - 1, None)
    length_penalty: float = number_field(-10, 10, 1.0)


def read(body: bytes, defaults: Defaults) -> GenerationRequest:
    """Parses and validates a request.

    Raises:
        UserError: With all problems, at most `MAX_PROBLEMS`.
    """
    fields = read_fields(body, GenerationRequest, "prompts")
    raise_if_any([*_sampling_problems(fields), *_beam_problems(fields)])
    candidates = {
        "random_seed": defaults.seed,
        "temperature": defaults.temperature,
        # Setting top_k in a request disables the server's default top_p, and vice versa.
        "top_k": 0 if fields.get("top_p") else defaults.top_k,
        "top_p": 0.0 if fields.get("top_k") else defaults.top_p,
    }
    return GenerationRequest(**{**candidates, **fields, "prompts": tuple(fields["prompts"])})


@functools.cache
def neutral_fields() -> Mapping[str, Mapping[str, Any]]:
    """The metadata of the fields of OpenAI's API that have no effect."""
    fields = dict[str, dict[str, Any]]()
    for name in FIELDS["any"].split():
        fields[name] = {"is_valid": _is_any}
    for name, values in FIELDS["values"].items():
        shown = " or ".join(map(_as_json, [*values, None]))
        expected = f"{shown} (others are not supported)"
        fields[name] = {"expected": expected, "is_valid": values.__contains__}
    return fields


def openai_error(message: str, status: int, codes: Sequence[str] = ()) -> dict[str, Any]:
    """The JSON object of an error in OpenAI's APIs."""
    error_type = "invalid_request_error" if status < 500 else "server_error"
    code = codes[0] if codes else None
    return {"error": {"message": message, "type": error_type, "param": None, "code": code}}


def read_fields(
    body: bytes,
    request: type[Any],
    required: str,
    *,
    null_is_default: bool = False,
    neutral: Mapping[str, Mapping[str, Any]] | None = None,
) -> dict[str, Any]:
    """The fields of a request, each valid by itself.

    Args:
        body: A JSON object.
        request: Dataclass of the fields, made by the functions of this module.
        required: Field without a default.
        null_is_default: Whether null is the same as no value.
        neutral: Metadata of fields that have no effect.

    Raises:
        UserError: With all problems, at most `MAX_PROBLEMS`.
    """
    fields = _read_object(body)
    if null_is_default:
        fields = {name: value for name, value in fields.items() if value is not None}
    known = {item.name: item.metadata for item in dataclasses.fields(request)}
    neutral = neutral or {}
    problems = _field_problems(fields, {**known, **neutral}, required)
    raise_if_any(itertools.islice(problems, MAX_PROBLEMS))
    return {name: value for name, value in fields.items() if name in known}


def _read_object(body: bytes) -> dict[str, Any]:
    try:
        content = json.loads(
            body, parse_constant=_reject_constant, object_pairs_hook=_reject_repetition
        )
    except UserError:
        raise
    except (ValueError, RecursionError) as error:
        raise user_error("request-not-json", error=error) from None
    if not isinstance(content, dict):
        raise user_error("request-not-json-object")
    return content


def _reject_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def _reject_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict[str, Any]()
    for name, value in pairs:
        if name in fields:
            raise user_error("request-field-repeated", as_json=_as_json(name))
        fields[name] = value
    return fields


def _field_problems(
    fields: Mapping[str, Any], known: Mapping[str, Any], required: str
) -> Iterator[Problem]:
    if required not in fields:
        yield Problem("request-field-missing", required, name=required)
    for name, value in fields.items():
        if name not in known:
            hint = _field_hint(name, known)
            yield Problem("request-field-unknown", as_json=_as_json(name), field_hint=hint)
            continue
        if not known[name]["is_valid"](value):
            yield from _value_problems(name, value, known[name])


def _value_problems(name: str, value: Any, metadata: Mapping[str, Any]) -> Iterator[Problem]:
    """Problems of an invalid value: one for each invalid part, if the field has a function that
    finds them."""
    find_invalid = metadata.get("find_invalid", lambda value: ())
    whole = InvalidPart("", metadata.get("expected", ""), value)
    for part in list(itertools.islice(find_invalid(value), MAX_PROBLEMS)) or [whole]:
        path = f"{name}{part.path}"
        if part.value is MISSING:
            yield Problem("request-part-missing", name, name=path, expected=part.expected)
        else:
            values = {"expected": part.expected, "as_json": _as_json(part.value)}
            yield Problem("request-value-invalid", name, name=path, **values)


def _field_hint(name: str, known: Mapping[str, Any]) -> str:
    if (renamed := FIELDS["renamed"].get(name)) in known:
        return f"; it is called {renamed} here"
    similar = difflib.get_close_matches(name[:100], known, n=1, cutoff=0.6)
    return f"; did you mean {similar[0]}?" if similar else f" (known are {', '.join(known)})"


def _sampling_problems(fields: Mapping[str, Any]) -> Iterator[Problem]:
    if "" in fields["prompts"] and not fields.get("add_BOS"):
        yield Problem("empty-prompt-needs-bos")
    for first, second in FIELDS["exclusive"]:
        if fields.get(first) and fields.get(second):
            yield Problem("request-fields-exclusive", first, second)
    for name, needed in FIELDS["needed"]:
        if fields.get(name) and not fields.get(needed):
            yield Problem("request-field-needs-another", name, needed)
    if fields.get("top_p") and fields.get("top_p_bound", 0) > fields["top_p"]:
        yield Problem("top-p-bound-above-top-p", bound=fields["top_p_bound"], top_p=fields["top_p"])


def _beam_problems(fields: Mapping[str, Any]) -> Iterator[Problem]:
    scores_only = fields.get("tokens_to_generate") == 0
    if "beam_width" not in fields:
        if scores_only and not fields.get("logprobs"):
            yield Problem("scoring-without-logprobs")
        beam_only = [name for name in ("stop_token", "length_penalty") if name in fields]
        if beam_only:
            yield Problem(
                "request-fields-only-for-beam-search", *beam_only, beam_only=", ".join(beam_only)
            )
        return
    if scores_only:
        yield Problem("beam-search-without-new-tokens")
    if len(fields["prompts"]) > 1:
        yield Problem("beam-search-with-several-prompts", num_given=len(fields["prompts"]))
    sampling_only = [name for name in SAMPLING_ONLY if fields.get(name)]
    if sampling_only:
        yield Problem(
            "request-fields-not-for-beam-search",
            *sampling_only,
            sampling_only=", ".join(sampling_only),
        )


def _as_json(value: object) -> str:
    """A value for messages, shortened."""
    try:
        text = json.dumps(value)
    except RecursionError:
        return "a deeply nested value"
    return text if len(text) <= MAX_VALUE_CHARS else f"{text[: MAX_VALUE_CHARS - 3]}..."
