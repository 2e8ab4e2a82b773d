"""OpenAI's `POST /v1/chat/completions`, for tokenizers with a chat template.

A conversation becomes the prompt of a completion, whose choices become messages. Follows
platform.openai.com/docs/api-reference/chat.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megatron_ds.config.problems import Problem, raise_if_any, user_error
from megatron_ds.inference.api_schema import (
    flag_field,
    integer_field,
    is_text,
    openai_error,
    request_field,
)
from megatron_ds.inference.completions_api import (
    MAX_TOP,
    CompletionEvents,
    CompletionJob,
    CompletionsApi,
    OpenAiRequest,
)
from megatron_ds.inference.scheduler import Finished, NewToken
from megatron_ds.inference.service import GenerationJob
from megatron_ds.tokenizer.chat_template import ChatTemplate


def _is_part(value: Any) -> bool:
    is_typed = isinstance(value, dict) and value.get("type") == "text"
    return is_typed and is_text(value.get("text"))


def _is_message(value: Any) -> bool:
    if not (isinstance(value, dict) and is_text(value.get("role"))):
        return False
    content = value.get("content")
    if isinstance(content, list):
        return all(map(_is_part, content))
    return is_text(content)


@dataclass(frozen=True)
class ChatRequest(OpenAiRequest):
    """A request, validated as far as possible without tokenizer and model."""

    messages: Any = request_field(
        (),
        'a list of objects such as {"role": "user", "content": "text"}',
        lambda value: isinstance(value, list) and bool(value) and all(map(_is_message, value)),
    )
    max_tokens: int | None = integer_field(1, 2**31 - 1, None)
    max_completion_tokens: int | None = integer_field(1, 2**31 - 1, None)
    logprobs: bool = flag_field()
    top_logprobs: int = integer_field(0, MAX_TOP, 0)

    def problems(self) -> Iterator[Problem]:
        yield from super().problems()
        if self.top_logprobs and not self.logprobs:
            names = {"name": "top_logprobs", "needed": "logprobs"}
            yield Problem("request-field-needs-another", *names.values(), **names)


@dataclass(frozen=True)
class ChatApi:
    """Serves OpenAI's clients."""

    completions: CompletionsApi
    template: ChatTemplate | None

    def read(self, body: bytes) -> CompletionJob:
        """
        Raises:
            UserError: If the request is invalid or there is no template.
        """
        if self.template is None:
            raise user_error("chat-template-missing", name=self.completions.names[0])
        request = self.completions.request(body, ChatRequest, "messages")
        raise_if_any(request.problems())
        messages = [dict(each) for each in request.messages]
        for message in messages:
            if isinstance(message["content"], list):
                message["content"] = "\n".join(part["text"] for part in message["content"])
        limit = request.max_completion_tokens or request.max_tokens
        top = request.top_logprobs if request.logprobs else None
        return self.completions.job(request, [self.template.render(messages)], limit, top)

    def response(self, job: GenerationJob, finished: Finished) -> dict[str, Any]:
        """The JSON object of all messages."""
        response = self.completions.response(job, finished)
        choices = [_choice(job, each, "message", is_first=True) for each in response["choices"]]
        kind = {"id": f"chat{response['id']}", "object": "chat.completion"}
        return {**response, **kind, "choices": choices}

    def events(self, job: GenerationJob) -> ChatEvents:
        """The server-sent events of a job."""
        return ChatEvents(job, self.completions.events(job))

    error = staticmethod(openai_error)


class ChatEvents:
    """The events of a job: those of a completion, as parts of messages."""

    def __init__(self, job: GenerationJob, events: CompletionEvents) -> None:
        self._job, self._events = job, events
        self._begun: set[int] = set()

    def of_token(self, token: NewToken) -> Iterator[dict[str, Any]]:
        """What a token adds to a message."""
        return map(self._part, self._events.of_token(token))

    def of_end(self, finished: Finished) -> Iterator[dict[str, Any]]:
        """What remains of the messages, and why they ended."""
        return map(self._part, self._events.of_end(finished))

    def _part(self, event: dict[str, Any]) -> dict[str, Any]:
        new = {choice["index"] for choice in event["choices"]} - self._begun
        self._begun |= new
        choices = [
            _choice(self._job, choice, "delta", is_first=choice["index"] in new)
            for choice in event["choices"]
        ]
        kind = {"id": f"chat{event['id']}", "object": "chat.completion.chunk"}
        return {**event, **kind, "choices": choices}


def _choice(
    job: GenerationJob, choice: dict[str, Any], key: str, *, is_first: bool
) -> dict[str, Any]:
    """A choice of a completion, whose text is that of a message."""
    role = {"role": "assistant"} if is_first else {}
    message = {key: {**role, "content": choice["text"]}}
    shown = {"index": choice["index"], **message, "finish_reason": choice["finish_reason"]}
    if (scores := choice["logprobs"]) is None:
        return {**shown, "logprobs": None}
    content = [
        {
            **_scored(token, logprob),
            "top_logprobs": [_scored(*each) for each in list(top.items())[: job.top_n]],
        }
        for token, logprob, top in zip(
            scores["tokens"], scores["token_logprobs"], scores["top_logprobs"], strict=True
        )
    ]
    return {**shown, "logprobs": {"content": content, "refusal": None}}


def _scored(token: str, logprob: float) -> dict[str, Any]:
    return {"token": token, "logprob": logprob, "bytes": list(token.encode())}
