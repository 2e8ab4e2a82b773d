"""OpenAI's `POST /v1/chat/completions`, for tokenizers with a chat template.

A conversation becomes the prompt of a completion, whose choices become messages. Follows
platform.openai.com/docs/api-reference/chat.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megatron_ds.config.problems import Problem, raise_if_any, user_error
from megatron_ds.inference.serving.api_schema import (
    MISSING,
    InvalidPart,
    flag_field,
    integer_field,
    is_text,
    openai_error,
    request_field,
)
from megatron_ds.inference.serving.completions_api import (
    MAX_TOP,
    CompletionEvents,
    CompletionJob,
    CompletionsApi,
    OpenAiRequest,
)
from megatron_ds.inference.serving.scheduler import Finished, NewToken
from megatron_ds.inference.serving.service import GenerationJob
from megatron_ds.inference.serving.template_process import TemplateProcess
from megatron_ds.tokenizer.chat_template import ChatTemplate

MESSAGE = 'an object such as {"role": "user", "content": "Hello"}'
ROLE = 'a string such as "user"'
PART = 'an object such as {"type": "text", "text": "Hello"}'
CONTENT = f"a string of valid Unicode, or a list of parts, each {PART}"
UNSUPPORTED = {"tool_calls": "tools", "function_call": "tools", "audio": "audio"}
"""Fields of OpenAI's messages without support, and what they are for."""


def _invalid_messages(value: Any) -> Iterator[InvalidPart]:
    for index, message in enumerate(value if isinstance(value, list) else []):
        if not isinstance(message, dict):
            yield InvalidPart(f"[{index}]", MESSAGE, message)
            continue
        for part in _invalid_fields(message):
            yield part._replace(path=f"[{index}]{part.path}")


def _invalid_fields(message: dict[str, Any]) -> Iterator[InvalidPart]:
    """Invalid fields of a message. A field that is null counts as absent."""
    present = {name: value for name, value in message.items() if value is not None}
    role = present.get("role", MISSING)
    content = present.get("content", message.get("content", MISSING))
    if not is_text(role):
        yield InvalidPart(".role", ROLE, role)
    unsupported = [name for name in UNSUPPORTED if present.get(name, []) != []]
    for name in unsupported:
        expected = f"null or left out ({UNSUPPORTED[name]}: not supported)"
        yield InvalidPart(f".{name}", expected, present[name])
    if isinstance(content, list):
        for index, part in enumerate(content):
            for invalid in _invalid_content(part):
                yield invalid._replace(path=f".content[{index}]{invalid.path}")
    elif not is_text(content) and not (unsupported and "content" not in present):
        yield InvalidPart(".content", CONTENT, content)


def _invalid_content(part: Any) -> Iterator[InvalidPart]:
    """Invalid fields of one part of a message's content."""
    if not isinstance(part, dict):
        yield InvalidPart("", PART, part)
    elif part.get("type") != "text":
        expected = '"text" (images, audio and files are not supported)'
        yield InvalidPart(".type", expected, part.get("type", MISSING))
    elif not is_text(part.get("text")):
        yield InvalidPart(".text", "a string of valid Unicode", part.get("text", MISSING))


def _is_conversation(value: Any) -> bool:
    return (
        isinstance(value, list) and bool(value) and not any(True for _ in _invalid_messages(value))
    )


@dataclass(frozen=True)
class ChatRequest(OpenAiRequest):
    """A request, validated as far as possible without tokenizer and model."""

    messages: Any = request_field(
        (),
        f"a list of messages, each {MESSAGE}",
        _is_conversation,
        _invalid_messages,
    )
    max_tokens: int | None = integer_field(1, 2**31 - 1, None)
    max_completion_tokens: int | None = integer_field(1, 2**31 - 1, None)
    logprobs: bool = flag_field()
    top_logprobs: int = integer_field(0, MAX_TOP, 0)

    def problems(self) -> Iterator[Problem]:
        yield from super().problems()
        if self.top_logprobs and not self.logprobs:
            yield Problem("request-field-needs-another", "top_logprobs", "logprobs")


@dataclass(frozen=True)
class ChatApi:
    """Serves OpenAI's clients."""

    completions: CompletionsApi
    template: ChatTemplate | TemplateProcess | None
    """The latter for a template that may come from somebody else."""

    def read(self, body: bytes) -> CompletionJob:
        """
        Raises:
            UserError: If the request is invalid or there is no template.
        """
        if self.template is None:
            raise user_error("chat-template-missing", name=self.completions.names[0])
        request = self.completions.request(body, ChatRequest, "messages")
        raise_if_any(request.problems())
        # Clients send back what they have received, with null where there is nothing.
        messages = [
            {
                name: value
                for name, value in entry.items()
                if value is not None and name not in UNSUPPORTED
            }
            for entry in request.messages
        ]
        for message in messages:
            if isinstance(message["content"], list):
                message["content"] = "\n".join(part["text"] for part in message["content"])
        limit = request.max_completion_tokens or request.max_tokens
        top = request.top_logprobs if request.logprobs else None
        return self.completions.job(request, [self.template.render(messages)], limit, top)

    def response(self, job: GenerationJob, finished: Finished) -> dict[str, Any]:
        """The JSON object of all messages."""
        return _as_chat(job, self.completions.response(job, finished), "message", set())

    def events(self, job: GenerationJob) -> ChatEvents:
        """The server-sent events of a job."""
        return ChatEvents(job, self.completions.events(job))

    error = staticmethod(openai_error)


class ChatEvents:
    """The events of a job: a completion's, as parts of messages."""

    def __init__(self, job: GenerationJob, events: CompletionEvents) -> None:
        self._events = events
        begun = set[int]()
        self._part = functools.partial(_as_chat, job, key="delta", begun=begun)

    def of_token(self, token: NewToken) -> Iterator[dict[str, Any]]:
        """The event of a token: its addition to a message."""
        return map(self._part, self._events.of_token(token))

    def of_end(self, finished: Finished) -> Iterator[dict[str, Any]]:
        """The last events: the rest of the messages, and why they ended."""
        return map(self._part, self._events.of_end(finished))


def _as_chat(
    job: GenerationJob, completion: dict[str, Any], key: str, begun: set[int]
) -> dict[str, Any]:
    """A response or event of a completion as a chat's.

    Args:
        job: The job.
        completion: Its response or event.
        key: Key of the text of a choice.
        begun: Choices that have had a role, which the first part of each has.
    """
    choices = []
    for choice in completion["choices"]:
        role = {} if choice["index"] in begun else {"role": "assistant"}
        begun.add(choice["index"])
        scores = choice["logprobs"] and {"content": _scores(choice["logprobs"], job.top_n)}
        text = {key: {**role, "content": choice.pop("text")}}
        choices.append({**choice, **text, "logprobs": scores})
    name = "chat.completion" if key == "message" else "chat.completion.chunk"
    return {**completion, "id": f"chat{completion['id']}", "object": name, "choices": choices}


def _scores(logprobs: dict[str, Any], top_n: int) -> list[dict[str, Any]]:
    """The tokens, each with the most probable ones in its place."""
    names = ("tokens", "token_logprobs", "top_logprobs")
    return [
        _scored(token, value)
        | {"top_logprobs": [_scored(*pair) for pair in list(top.items())[:top_n]]}
        for token, value, top in zip(*(logprobs[name] for name in names), strict=True)
    ]


def _scored(token: str, logprob: float) -> dict[str, Any]:
    return {"token": token, "logprob": logprob, "bytes": list(token.encode())}
