"""Conversations as text, by the chat template of a Hugging Face tokenizer.

A template of somebody else is rendered by `template_process` where it answers requests.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_ds.config.checks import import_library
from megatron_ds.config.problems import user_error
from megatron_ds.tokenizer.base import FlatIds, Tokenizer, library_errors, read_bytes, read_json
from megatron_ds.tokenizer.gguf.keys import is_gguf

TEMPLATE_FILE = "chat_template.jinja"
LIBRARY = "transformers.utils.chat_template_utils"
SETTINGS_FILES = ("special_tokens_map.json", "tokenizer_config.json")
TOOL_TEMPLATE = "tool_use"
"""Name of the template that transformers takes for conversations with tools, if there is one."""
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
"""Begins what the model generates, up to `{% endgeneration %}`."""

Messages = Sequence[Mapping[str, Any]]
Spans = Sequence[tuple[int, int]]
"""First and end of ranges of characters."""


@dataclass(frozen=True)
class ChatTemplate:
    """A template of Jinja, which transformers runs in a sandbox."""

    source: str
    tokens: Mapping[str, str]
    """Special tokens by name, such as `bos_token`."""
    source_with_tools: str = ""
    """The template of conversations with tools, if it is another one."""

    @property
    def marks_answers(self) -> bool:
        """Whether it marks what the model generates."""
        sources = filter(None, (self.source, self.source_with_tools))
        return all(map(GENERATION.search, sources))

    def render(self, messages: Messages) -> str:
        """The conversation up to the place where the answer begins, without limits of any kind.

        Raises:
            UserError: If the template rejects the messages.
        """
        library = import_library(LIBRARY, "a chat template")
        with library_errors("chat-template-failed"):
            return self.render_with(library.render_jinja_template, messages)

    def render_with(self, renderer: Callable[..., Any], messages: Messages) -> str:
        """The same, by the function of the library. Raises what that raises."""
        (text,), _ = renderer(
            [messages], chat_template=self.source, add_generation_prompt=True, **self.tokens
        )
        return str(text)

    def render_answers(
        self, messages: Messages, tools: Sequence[Mapping[str, Any]] | None, ends: Sequence[str]
    ) -> tuple[str, Spans]:
        """The entire conversation, and the characters of it that the assistant generates.

        A template with `{% generation %}` marks them, as transformers' `apply_chat_template` does
        for `return_assistant_tokens_mask`. Otherwise an answer is what follows the text that asks
        for it (`add_generation_prompt`), up to the last special token of the message, which ends
        it. Both have to be the beginning of the entire conversation.

        Args:
            messages: The conversation.
            tools: The tools that the assistant may call; None for none.
            ends: Texts of the special tokens, one of which ends an answer.

        Raises:
            UserError: If the template rejects the messages, or the answers cannot be found in it.
        """
        source = self.source_with_tools if tools and self.source_with_tools else self.source
        renderer = import_library(LIBRARY, "a chat template").render_jinja_template

        def rendered(part: Messages, **options: bool) -> tuple[str, Spans]:
            with library_errors("chat-template-failed"):
                (text,), spans = renderer(
                    [part], tools=tools, chat_template=source, **options, **self.tokens
                )
            return str(text), next(iter(spans), ())

        if GENERATION.search(source):
            return rendered(messages, return_assistant_tokens_mask=True)
        text = rendered(messages)[0]
        spans = []
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            prompt = rendered(messages[:index], add_generation_prompt=True)[0]
            until = rendered(messages[: index + 1])[0]
            if not (text.startswith(until) and until.startswith(prompt)):
                raise user_error("answer-not-after-prompt", message=index + 1)
            tail = [at + len(end) for end in ends if (at := until.rfind(end, len(prompt))) >= 0]
            if not tail or until[max(tail) :].strip():
                raise user_error("answer-without-end", message=index + 1)
            spans.append((len(prompt), max(tail)))
        return text, spans


def encode_answers(
    tokenizer: Tokenizer, texts: Sequence[str], answers: Sequence[Spans]
) -> tuple[FlatIds, npt.NDArray[np.int64]]:
    """The ids of texts, and those of them that ranges of characters have.

    Args:
        tokenizer: One with a `library`.
        texts: The texts.
        answers: Of each text the ranges.

    Returns:
        The concatenated ids, and [m, 2], first and end of the range of ids that each range of
        characters has. Ranges without an id are left out.
    """
    encodings = tokenizer.library().encode_batch(list(texts), add_special_tokens=False)
    lengths = np.fromiter((len(one.ids) for one in encodings), np.int64, len(encodings))
    ids = np.fromiter((token for one in encodings for token in one.ids), np.int32, lengths.sum())
    starts = (np.cumsum(lengths) - lengths).tolist()
    edges = [
        (start + first, start + end)
        for start, encoding, spans in zip(starts, encodings, answers, strict=True)
        for first, end in _token_spans(encoding, spans)
    ]
    return FlatIds(ids, lengths), np.array(edges, np.int64).reshape(-1, 2)


def _token_spans(encoding: Any, spans: Spans) -> Iterator[tuple[int, int]]:
    """First and end of the tokens of ranges of characters, each token once."""
    last = 0
    for first, end in spans:
        characters = range(first, end)
        # Normalization may have dropped characters, which have no token.
        tokens = map(encoding.char_to_token, characters)
        start = next((token for token in tokens if token is not None), None)
        tokens = map(encoding.char_to_token, reversed(characters))
        stop = next((token for token in tokens if token is not None), None)
        if start is not None and stop is not None and stop + 1 > max(start, last):
            yield max(start, last), stop + 1
            last = stop + 1


def read_template_file(path: str, tokens: Mapping[str, str]) -> ChatTemplate:
    """The template in a file.

    Args:
        path: The file.
        tokens: Special tokens by name.

    Raises:
        UserError: If it cannot be read.
    """
    content = read_bytes(path, "chat_template")
    with library_errors("chat-template-not-text", path=path):
        return ChatTemplate(content.decode("utf-8"), tokens)


def read_chat_template(folder: Path | None) -> ChatTemplate | None:
    """The template of the tokenizer in a folder, or a file of llama.cpp; None if it has none.

    Raises:
        UserError: If a file cannot be read.
    """
    if folder is None:
        return None
    settings = _settings(folder)
    source = settings.get("chat_template")
    file = folder / TEMPLATE_FILE
    with_tools = ""
    if isinstance(source, list):
        named = {entry["name"]: entry["template"] for entry in source}
        source = named.get("default")
        with_tools = named.get(TOOL_TEMPLATE, "")
    if file.is_file():
        source = file.read_text(encoding="utf-8")
        with_tools = ""
    tokens = special_tokens(settings)
    return ChatTemplate(source, tokens, with_tools) if isinstance(source, str) else None


def read_special_tokens(folder: Path | None) -> Mapping[str, str]:
    """Special tokens of the tokenizer in a folder, or a file of llama.cpp, by name.

    Raises:
        UserError: If a file cannot be read.
    """
    return {} if folder is None else special_tokens(_settings(folder))


def _settings(folder: Path) -> dict[str, Any]:
    """The settings of the tokenizer in a folder, or a file of llama.cpp."""
    if is_gguf(folder):
        from megatron_ds.tokenizer.gguf.settings import read_settings

        return read_settings(folder)
    settings = dict[str, Any]()
    for path in (folder / name for name in SETTINGS_FILES):
        if path.is_file():
            settings |= read_json(path, "tokenizer_model")
    return settings


def special_tokens(settings: Mapping[str, Any]) -> Mapping[str, str]:
    """Special tokens in settings of a tokenizer, by name."""
    texts = {
        name: value.get("content") if isinstance(value, dict) else value
        for name, value in settings.items()
        if name.endswith("_token")
    }
    return {name: text for name, text in texts.items() if isinstance(text, str)}
