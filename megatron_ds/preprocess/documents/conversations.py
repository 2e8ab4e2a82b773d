"""Conversations as documents: their messages, and their text with the assistant's answers.

Owns which messages are accepted. The text is that of a chat template; see
`tokenizer/chat_template.py`. Knows no ids.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from megatron_ds.config.problems import UserError
from megatron_ds.preprocess.documents.formats import TOO_LONG, RawDocument
from megatron_ds.preprocess.documents.parsing import RejectedDocument, fields_of, reject, utf8_size
from megatron_ds.tokenizer.chat_template import ChatTemplate, Messages, Spans

MESSAGES = "messages"
"""Key of the messages, which have a `role` and a `content`."""
SHAREGPT = "conversations"
"""Key of the messages of ShareGPT's format, which have `from` and `value`."""
TOOLS = "tools"
ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
SHAREGPT_ROLES = {"system": "system", "human": "user", "gpt": "assistant"}

NOT_CONVERSATION = "no conversation"
NO_ANSWER = "no answer"
REFUSED_BY_TEMPLATE = "refused by the chat template"


class ConversationText(NamedTuple):
    """A conversation as text."""

    text: str
    answers: Spans
    """First and end of the characters of each answer of the assistant."""


@dataclass(frozen=True)
class ConversationReader:
    """Turns raw documents into the texts of conversations.

    Attributes:
        template: The chat template.
        special_tokens: Texts of the tokenizer's special tokens, one of which ends an answer.
        max_document_bytes: Longer texts are rejected.
    """

    template: ChatTemplate
    special_tokens: Sequence[str]
    max_document_bytes: int

    def __call__(self, item: RawDocument) -> ConversationText | RejectedDocument:
        """The text of a document, or why it has none.

        Raises:
            UserError: If transformers is missing.
        """
        value = fields_of(item)
        if isinstance(value, RejectedDocument):
            return value
        try:
            messages = messages_of(value)
            tools = _tools_of(value)
        except ValueError as error:
            return reject(item, NOT_CONVERSATION, str(error))
        if all(message["role"] != "assistant" for message in messages):
            return reject(item, NO_ANSWER, "has no message of the role 'assistant'")
        try:
            text, answers = self.template.render_answers(messages, tools, self.special_tokens)
            size = utf8_size(text)
        except UserError as error:
            if error.problems[0].code == "library-missing":
                raise
            return reject(item, REFUSED_BY_TEMPLATE, error.problems[0].render())
        except UnicodeEncodeError:
            return reject(item, NOT_CONVERSATION, "has a lone surrogate, which is not valid text")
        if size > self.max_document_bytes:
            message = f"has {size} bytes, more than the maximum document size"
            return reject(item, TOO_LONG, f"{message} {self.max_document_bytes}")
        if not any(end > first for first, end in answers):
            return reject(item, NO_ANSWER, "the chat template marks nothing as generated")
        return ConversationText(text, answers)


def messages_of(value: object) -> Messages:
    """The messages of a parsed document, without the keys whose value is null.

    Raises:
        ValueError: If they are not valid, with the reason.
    """
    if not isinstance(value, dict):
        raise ValueError(f"must be a JSON object, not {type(value).__name__}")
    key = MESSAGES if value.get(MESSAGES) is not None else SHAREGPT
    messages = value.get(key)
    if messages is None:
        shown = ", ".join(map(repr, value)) or "none"
        raise ValueError(f"has no key {MESSAGES!r} or {SHAREGPT!r} (it has {shown})")
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"{key!r} must be a list of at least one message")
    return list(_checked(key, messages))


def _checked(key: str, messages: Sequence[object]) -> Iterator[Mapping[str, Any]]:
    for position, message in enumerate(messages, 1):
        where = f"message {position} of {key!r}"
        if not isinstance(message, dict):
            raise ValueError(f"{where} must be an object, not {type(message).__name__}")
        kept = {name: value for name, value in message.items() if value is not None}
        if key == SHAREGPT and "role" not in kept:
            kept = _of_sharegpt(where, kept)
        role = kept.get("role")
        if role not in ROLES:
            known = ", ".join(ROLES)
            raise ValueError(f"{where} has the role {role!r}; it must be one of {known}")
        content = kept.get("content")
        if content is None and not kept.get("tool_calls"):
            raise ValueError(f"{where} has no 'content'")
        if not isinstance(content, str | list | None):
            raise ValueError(f"the 'content' of {where} must be text, not {type(content).__name__}")
        yield kept


def _of_sharegpt(where: str, message: Mapping[str, Any]) -> dict[str, Any]:
    """A message of ShareGPT's format with the keys of transformers."""
    role = message.get("from")
    if role not in SHAREGPT_ROLES:
        known = ", ".join(SHAREGPT_ROLES)
        raise ValueError(f"{where} has 'from' {role!r}; it must be one of {known}")
    return {"role": SHAREGPT_ROLES[role], "content": message.get("value")}


def _tools_of(value: Any) -> Sequence[Mapping[str, Any]] | None:
    """The tools of a parsed document: a list of objects, or JSON text of it; None if there are
    none.

    Raises:
        ValueError: If they are something else.
    """
    tools = value.get(TOOLS)
    if isinstance(tools, str) and tools.strip():
        tools = json.loads(tools)
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ValueError(f"{TOOLS!r} must be a list of objects, or JSON text of it")
    return tools
