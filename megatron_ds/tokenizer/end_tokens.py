"""The tokens at which texts of a model of Hugging Face end, as the files of its folder have them.

A model for chats may end its answers with another token than its tokenizer's end token, or with one
of several: `eos_token_id` of generation_config.json, or of config.json where the former has none,
is an id or a list of ids, at each of which transformers ends a text.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_ds.config.problems import user_error
from megatron_ds.tokenizer.base import read_json

KEY = "eos_token_id"
FILES = ("generation_config.json", "config.json")
"""The first one that has the key decides."""
TEXT_MODEL = "text_config"
"""Entry of config.json of a model with several parts, such as one that also sees images."""


def ids_of(value: Any, path: Path) -> frozenset[int]:
    """The ids in a value of the key. Empty for None.

    Args:
        value: The value.
        path: Its file, for the message.

    Raises:
        UserError: If it is something else.
    """
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if any(type(token) is not int for token in ids):
        raise user_error("end-tokens-invalid", path=path, value=value)
    return frozenset(ids)


def read_end_tokens(folder: Path | None) -> frozenset[int]:
    """The ids that end texts of the model in a folder; empty if its files do not name them.

    Raises:
        UserError: If a file is damaged.
    """
    for path in [] if folder is None else [folder / name for name in FILES]:
        values = read_json(path, "tokenizer_model") if path.is_file() else {}
        text_model = values.get(TEXT_MODEL)
        parts = [values, text_model if isinstance(text_model, dict) else {}]
        for part in parts:
            if ids := ids_of(part.get(KEY), path):
                return ids
    return frozenset()
