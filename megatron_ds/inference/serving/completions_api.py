"""OpenAI's `POST /v1/completions`: requests to jobs, results to responses and events.

Follows the reference of the API (platform.openai.com/docs/api-reference/completions); `top_k` is an
addition of other servers. As there, the end-of-document token is not part of a text, but it has a
log-probability.
"""

from __future__ import annotations

import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from megatron_ds.config.problems import Problem, raise_if_any, user_error
from megatron_ds.inference.generation.sampling_params import SamplingParams
from megatron_ds.inference.generation.sequences import Scores, TextSequence
from megatron_ds.inference.generation.token_text import TokenText
from megatron_ds.inference.serving.api_schema import (
    MAX_PROMPTS,
    Defaults,
    InvalidPart,
    flag_field,
    integer_field,
    invalid_entries,
    is_text,
    neutral_fields,
    number_field,
    openai_error,
    read_fields,
    request_field,
)
from megatron_ds.inference.serving.megatron_api import by_text
from megatron_ds.inference.serving.scheduler import Finished, NewToken
from megatron_ds.inference.serving.service import GenerationJob, TextGenerationService, random_seed

DEFAULT_NEW_TOKENS = 16
MAX_STOPS = 4
MAX_TOP = 20
"""Most probable tokens, with their log-probabilities."""


def _is_ids(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(type(token) is int and token >= 0 for token in value)
    )


def _is_prompt(value: Any) -> bool:
    if is_text(value) or _is_ids(value):
        return True
    is_list = isinstance(value, list) and 1 <= len(value) <= MAX_PROMPTS
    return is_list and (all(map(is_text, value)) or all(map(_is_ids, value)))


def _invalid_prompts(value: Any) -> Iterator[InvalidPart]:
    """Invalid prompts. The type of the first entry decides what all entries must be: strings, ids,
    or lists of ids."""
    first = value[0] if isinstance(value, list) and value else None
    if isinstance(first, str):
        yield from invalid_entries(value, "a string of valid Unicode", is_text, MAX_PROMPTS)
    elif isinstance(first, list):
        yield from invalid_entries(value, "a list of ids", _is_ids, MAX_PROMPTS)
    elif isinstance(value, list):
        yield from invalid_entries(value, "an id", lambda entry: _is_ids([entry]), len(value))


def _is_stop_string(value: Any) -> bool:
    return is_text(value) and bool(value)


def _is_stop(value: Any) -> bool:
    strings = value if isinstance(value, list) else [value]
    return len(strings) <= MAX_STOPS and all(map(_is_stop_string, strings))


def _is_stream_options(value: Any) -> bool:
    keys = value.keys() if isinstance(value, dict) else {""}
    return keys <= {"include_usage"} and all(isinstance(flag, bool) for flag in value.values())


@dataclass(frozen=True)
class OpenAiRequest:
    """Fields of both kinds of requests; null means the default."""

    model: str | None = request_field(None, "a string", lambda value: isinstance(value, str))
    temperature: float = number_field(0, 100, 1.0)
    top_p: float = number_field(0, 1, 1.0)
    top_k: int = integer_field(-1, 1000, 0)
    n: int = integer_field(1, 128, 1)
    stream: bool = flag_field()
    stream_options: dict[str, bool] | None = request_field(
        None, 'an object such as {"include_usage": true}', _is_stream_options
    )
    stop: Any = request_field(
        (),
        f"a string or a list of up to {MAX_STOPS} strings, none of them empty",
        _is_stop,
        lambda value: invalid_entries(value, "a string, not empty", _is_stop_string, MAX_STOPS),
    )
    seed: int | None = integer_field(0, 2**63 - 1, None)

    def problems(self) -> Iterator[Problem]:
        if self.stream_options and not self.stream:
            yield Problem("request-field-needs-another", "stream_options", "stream")


Request = TypeVar("Request", bound=OpenAiRequest)


@dataclass(frozen=True)
class CompletionRequest(OpenAiRequest):
    """A request, validated as far as possible without tokenizer and model."""

    prompt: Any = request_field(
        "",
        f"a string, a list of 1 to {MAX_PROMPTS} strings, ids, or a list of lists of ids",
        _is_prompt,
        _invalid_prompts,
    )
    max_tokens: int = integer_field(0, 2**31 - 1, DEFAULT_NEW_TOKENS)
    best_of: int | None = integer_field(1, 128, None)
    logprobs: int | None = integer_field(0, MAX_TOP, None)
    echo: bool = flag_field()

    def problems(self) -> Iterator[Problem]:
        yield from super().problems()
        if self.best_of not in (None, self.n):
            yield Problem("best-of-is-not-n", "best_of", "n", best_of=self.best_of, n=self.n)
        if self.max_tokens == 0 and not (self.echo and self.logprobs is not None):
            yield Problem("completion-without-tokens", "max_tokens")


@dataclass(frozen=True)
class CompletionJob(GenerationJob):
    """A job, and what its response needs."""

    echo: bool = False
    include_usage: bool = False


@dataclass(frozen=True)
class CompletionsApi:
    """Serves OpenAI's clients."""

    service: TextGenerationService
    defaults: Defaults
    names: tuple[str, ...]
    """Names of the model."""
    created: int = 0
    """Time of the save, in seconds since 1970."""

    def read(self, body: bytes) -> CompletionJob:
        """
        Raises:
            UserError: If the request is invalid or does not fit the tokenizer or the model.
        """
        request = self.request(body, CompletionRequest, "prompt")
        raise_if_any(request.problems())
        prompts = request.prompt
        if isinstance(prompts, str) or _is_ids(prompts):
            prompts = [prompts]
        prompts = [prompt or [self.service.tokenizer.prefix] for prompt in prompts]
        return self.job(request, prompts, request.max_tokens, request.logprobs, echo=request.echo)

    def request(self, body: bytes, request_type: type[Request], required: str) -> Request:
        """A request, with the server's defaults.

        Raises:
            UserError: If a field is invalid, or the model another one.
        """
        neutral = neutral_fields()
        fields = read_fields(body, request_type, required, null_is_default=True, neutral=neutral)
        defaults = self.defaults
        candidates = {
            "seed": defaults.seed,
            "temperature": defaults.temperature,
            "top_k": defaults.top_k,
            "top_p": defaults.top_p or 1.0,  # 0 is off only there
        }
        request = request_type(**{**candidates, **fields})
        if request.model not in (None, *self.names):
            raise user_error("model-not-served", model=request.model, name=", ".join(self.names))
        return request

    def job(
        self,
        request: OpenAiRequest,
        prompts: Sequence[str | list[int]],
        max_tokens: int | None,
        logprobs: int | None,
        *,
        echo: bool = False,
    ) -> CompletionJob:
        """
        Args:
            request: A valid request.
            prompts: Its prompts, as text or ids.
            max_tokens: Maximum number of new tokens; None for as many as fit.
            logprobs: Number of most probable tokens with log-probabilities; None for none at all.
            echo: Return the prompts, too.
        """
        if len(prompts) * request.n > MAX_PROMPTS:
            count = len(prompts) * request.n
            raise user_error("too-many-texts-in-request", count=count, limit=MAX_PROMPTS)
        ids = self.service.encode_prompts(prompts, max_tokens)
        is_greedy = request.temperature == 0
        sampling = SamplingParams(
            temperature=1.0 if is_greedy else request.temperature,
            top_k=max(0, request.top_k),
            # 0 takes the most probable token.
            top_p=max(request.top_p, sys.float_info.min),
            greedy=is_greedy,
            seed=random_seed() if request.seed is None else request.seed,
        )
        return CompletionJob(
            ids,
            self.service.max_length if max_tokens is None else max_tokens,
            sampling,
            samples=request.n,
            logprobs=logprobs is not None,
            prompt_logprobs=logprobs is not None and echo,
            top_n=logprobs or 0,
            stops=(request.stop,) if isinstance(request.stop, str) else tuple(request.stop),
            stream=request.stream,
            echo=echo,
            include_usage=(request.stream_options or {}).get("include_usage", False),
        )

    def response(self, job: GenerationJob, finished: Finished) -> dict[str, Any]:
        """The JSON object of all texts."""
        assert isinstance(job, CompletionJob)
        sequences = [item for item in finished.result if isinstance(item, TextSequence)]
        choices = [self._choice(job, index, sequence) for index, sequence in enumerate(sequences)]
        new = sum(len(sequence.new_ids) for sequence in sequences)
        return {**self._head(), "choices": choices, "usage": _usage(job, new)}

    def events(self, job: GenerationJob) -> CompletionEvents:
        """The server-sent events of a job."""
        assert isinstance(job, CompletionJob)
        return CompletionEvents(self, job)

    def models(self) -> dict[str, Any]:
        """The list of models."""
        model = {"object": "model", "created": self.created, "owned_by": "megatron_ds"}
        model |= {"max_model_len": self.service.max_length}
        return {"object": "list", "data": [{"id": name, **model} for name in self.names]}

    error = staticmethod(openai_error)

    def _head(self) -> dict[str, Any]:
        return {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": self.names[0],
        }

    def _choice(self, job: CompletionJob, index: int, sequence: TextSequence) -> dict[str, Any]:
        decode = self.service.tokenizer.decode
        ids = sequence.ids[: sequence.prompt_length]
        prompt = ids if job.echo else []
        text = TokenText(decode, job.stops, ids)
        new = "".join(map(text.add, self.without_end(sequence.new_ids))) + text.finish()
        logprobs = None
        if job.logprobs:
            scores = sequence.scores
            first = [None] if job.echo else []
            logprobs = self.logprobs_of(
                [*prompt, *sequence.new_ids], [*first, *scores.logprobs], [*first, *scores.top]
            )
        return {
            "index": index,
            "text": decode(self.service.tokenizer.without_bos(prompt)) + new if prompt else new,
            "logprobs": logprobs,
            "finish_reason": "stop" if sequence.ended_itself else "length",
        }

    def without_end(self, ids: list[int]) -> list[int]:
        return ids[:-1] if {*ids[-1:]} & self.service.tokenizer.ends else ids

    def logprobs_of(
        self,
        ids: Sequence[int],
        logprobs: Sequence[float | None],
        tops: Sequence[Sequence[tuple[int, float]] | None],
        offset: int = 0,
    ) -> dict[str, Any]:
        """The tokens with their log-probabilities, and the most probable ones with the chosen."""
        decode = self.service.tokenizer.decode
        tokens = [decode([token_id]) for token_id in ids]
        places = []
        start = offset
        for token in tokens:
            places.append(start)
            start += len(token)
        top = [
            None if best is None or logprob is None else by_text(decode, [*best, (chosen, logprob)])
            for best, logprob, chosen in zip(tops, logprobs, ids, strict=True)
        ]
        return {
            "tokens": tokens,
            "token_logprobs": list(logprobs),
            "top_logprobs": top,
            "text_offset": places,
        }


class CompletionEvents:
    """The events of a job: one for each part of a text whose characters are complete."""

    def __init__(self, api: CompletionsApi, job: CompletionJob) -> None:
        self._api = api
        self._job = job
        self._head = api._head()
        decode = api.service.tokenizer.decode
        self._prompts = job.repeated_prompts
        prompts = self._prompts
        self._echoed = [not job.echo] * len(prompts)
        self._texts = [TokenText(decode, job.stops, prompt) for prompt in prompts]
        self._tokens: list[list[NewToken]] = [[] for _ in prompts]
        self._offsets = [0] * len(prompts)
        self._new = 0

    def of_token(self, token: NewToken) -> Iterator[dict[str, Any]]:
        """The event of a token: its addition to a text."""
        yield from self._echo(token.index, token.prompt_scores)
        self._new += 1
        self._tokens[token.index].append(token)
        is_end = token.id in self._api.service.tokenizer.ends
        part = "" if is_end else self._texts[token.index].add(token.id)
        if part:
            yield self._event(token.index, part, None)

    def of_end(self, finished: Finished) -> Iterator[dict[str, Any]]:
        """The last events: the rest of the texts, and why they ended."""
        for index, sequence in enumerate(finished.result):
            assert isinstance(sequence, TextSequence)
            yield from self._echo(index, sequence.scores)
            reason = "stop" if sequence.ended_itself else "length"
            yield self._event(index, self._texts[index].finish(), reason)
        if self._job.include_usage:
            yield {**self._head, "choices": [], "usage": _usage(self._job, self._new)}

    def _echo(self, index: int, scores: Scores | None) -> Iterator[dict[str, Any]]:
        """The prompt, once, if it is wanted."""
        if self._echoed[index]:
            return
        self._echoed[index] = True
        ids = self._prompts[index]
        if scores is not None:
            values = zip(ids, [None, *scores.logprobs], [[], *scores.top], strict=True)
            self._tokens[index] = [NewToken(index, *entry) for entry in values]
        yield self._event(index, self._api.service.tokenizer.decode(ids), None)

    def _event(self, index: int, text: str, reason: str | None) -> dict[str, Any]:
        tokens = self._tokens[index]
        self._tokens[index] = []
        logprobs = None
        if self._job.logprobs:
            logprobs = self._api.logprobs_of(
                [token.id for token in tokens],
                [token.logprob for token in tokens],
                [token.top for token in tokens],
                self._offsets[index],
            )
            self._offsets[index] += sum(map(len, logprobs["tokens"]))
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}
        return {**self._head, "choices": [choice]}


def _usage(job: GenerationJob, new: int) -> dict[str, int]:
    prompt = sum(map(len, job.prompts))
    return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}
