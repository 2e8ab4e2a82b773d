"""Conversations as text, by the chat template of a Hugging Face tokenizer.

A template of somebody else is rendered by `template_process`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_ds.config.checks import import_library
from megatron_ds.tokenizer.base import library_errors, read_json

TEMPLATE_FILE = "chat_template.jinja"
LIBRARY = "transformers.utils.chat_template_utils"
SETTINGS_FILES = ("special_tokens_map.json", "tokenizer_config.json")


@dataclass(frozen=True)
class ChatTemplate:
    """A template of Jinja, which transformers runs in a sandbox."""

    source: str
    tokens: Mapping[str, str]
    """Special tokens by name, such as `bos_token`."""

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The conversation up to the place where the answer begins, without limits of any kind.

        Raises:
            UserError: If the template rejects the messages.
        """
        library = import_library(LIBRARY, "a chat template")
        with library_errors("chat-template-failed"):
            return self.render_with(library.render_jinja_template, messages)

    def render_with(
        self, renderer: Callable[..., Any], messages: Sequence[Mapping[str, Any]]
    ) -> str:
        """The same, by the function of the library. Raises what that raises."""
        (text,), _ = renderer(
            [messages], chat_template=self.source, add_generation_prompt=True, **self.tokens
        )
        return str(text)


def read_chat_template(folder: Path | None) -> ChatTemplate | None:
    """The template of the tokenizer in a folder; None if it has none.

    Raises:
        UserError: If a file cannot be read.
    """
    if folder is None:
        return None
    paths = [path for name in SETTINGS_FILES if (path := folder / name).is_file()]
    settings = dict[str, Any]()
    for path in paths:
        settings |= read_json(path, "tokenizer_model")
    source = settings.get("chat_template")
    file = folder / TEMPLATE_FILE
    if isinstance(source, list):
        source = {entry["name"]: entry["template"] for entry in source}.get("default")
    if file.is_file():
        source = file.read_text(encoding="utf-8")
    texts = {
        name: value.get("content") if isinstance(value, dict) else value
        for name, value in settings.items()
        if name.endswith("_token")
    }
    tokens = {name: text for name, text in texts.items() if isinstance(text, str)}
    return ChatTemplate(source, tokens) if isinstance(source, str) else None
