"""The settings of the tokenizer in a file of llama.cpp, as tokenizer_config.json has them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_ds.tokenizer.gguf.keys import (
    CHAT_TEMPLATE,
    KEEPS_SPECIAL_TEXT,
    TEMPLATES,
    TOKENS,
    read_keys,
    special_ids,
)


def settings_of(keys: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a tokenizer_config.json: special tokens, and the chat template."""
    settings: dict[str, Any] = {
        role: keys[TOKENS][index] for role, index in special_ids(keys).items()
    }
    if keys.get(KEEPS_SPECIAL_TEXT):
        settings["split_special_tokens"] = True
    names = keys.get(TEMPLATES, ())
    templates = [
        {"name": name, "template": keys[f"{CHAT_TEMPLATE}.{name}"]}
        for name in names
        if f"{CHAT_TEMPLATE}.{name}" in keys
    ]
    if (default := keys.get(CHAT_TEMPLATE)) is not None:
        templates.insert(0, {"name": "default", "template": default})
        settings["chat_template"] = default if len(templates) == 1 else templates
    return settings


def read_settings(file: Path) -> dict[str, Any]:
    """`settings_of` of a file."""
    return settings_of(read_keys(file))
