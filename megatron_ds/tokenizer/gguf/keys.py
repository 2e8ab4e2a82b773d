"""Keys of the tokenizer in a file of llama.cpp."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_ds.tokenizer.base import library_errors
from megatron_ds.tokenizer.gguf.header import MAGIC, read_header

START = "tokenizer."
PREFIX = f"{START}ggml."
MODEL = f"{PREFIX}model"
PRE = f"{PREFIX}pre"
TOKENS = f"{PREFIX}tokens"
TYPES = f"{PREFIX}token_type"
SCORES = f"{PREFIX}scores"
MERGES = f"{PREFIX}merges"
ADD_BOS = f"{PREFIX}add_bos_token"
ADD_PREFIX = f"{PREFIX}add_space_prefix"
REMOVE_BLANKS = f"{PREFIX}remove_extra_whitespaces"
CHARSMAP = f"{PREFIX}precompiled_charsmap"
JSON = f"{START}huggingface.json"
"""Content of a tokenizer.json, which llama.cpp does not read."""
CHAT_TEMPLATE = f"{START}chat_template"
TEMPLATES = f"{START}chat_templates"
"""Names of further templates, whose keys are CHAT_TEMPLATE.NAME."""
KEEPS_SPECIAL_TEXT = "megatron_ds.tokenizer.keeps_special_text"
"""Key of this program: the text of a special token inside a document is ordinary text."""
NO_TOKENIZER = ("none", "no_vocab")
"""Values of MODEL in files without a tokenizer."""
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""Types of tokens, as of the pieces of SentencePiece."""
ID_KEYS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "sep_token": "seperator_token_id",
    "pad_token": "padding_token_id",
    "mask_token": "mask_token_id",
}
"""Keys of special ids by their names in transformers."""
FURTHER_ENDS = ("eot_token_id", "eom_token_id")
"""Keys of tokens at which llama.cpp also ends texts."""


def is_gguf(path: str | Path) -> bool:
    """Whether a path is a file of llama.cpp, by its first bytes."""
    try:
        with open(path, "rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except (OSError, ValueError):  # the latter for a path with a null character
        return False


def read_keys(path: str | Path) -> dict[str, Any]:
    """The keys of the tokenizer in a file, and those of this program.

    Raises:
        UserError: If the file is damaged.
    """
    with library_errors("gguf-tokenizer-damaged", path=path):
        return {
            name: value
            for name, value in read_header(path).keys.items()
            if name.startswith((START, KEEPS_SPECIAL_TEXT))
        }


def unused(index: int) -> str:
    """The name of an id without a token."""
    return f"[PAD{index}]"


def special_ids(keys: Mapping[str, Any]) -> dict[str, int]:
    """Ids of special tokens by name, such as `eos_token`.

    A file may leave out the ids that most tokenizers of its kind have.
    """
    ids = dict(USUAL_IDS.get(str(keys.get(MODEL)), {}))
    for role, key in ID_KEYS.items():
        if (index := keys.get(f"{PREFIX}{key}")) is not None:
            ids[role] = int(index)
    return {role: index for role, index in ids.items() if 0 <= index < len(keys[TOKENS])}


USUAL_IDS: dict[str, dict[str, int]] = {
    "llama": {"bos_token": 1, "eos_token": 2, "unk_token": 0},
    "t5": {"eos_token": 1, "unk_token": 2, "pad_token": 0},
    "bert": {
        "bos_token": 101,
        "unk_token": 100,
        "sep_token": 102,
        "pad_token": 0,
        "mask_token": 103,
    },
}
"""Ids that llama.cpp takes of files without the key, by the kind of tokenizer. The one of
byte-level tokenizers, 11, is that of one model, and is not taken here."""
