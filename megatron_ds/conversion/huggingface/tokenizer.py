"""The tokenizer in a folder of `transformers`: found there, and written for `AutoTokenizer`."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from megatron_ds.config import TokenizerConfig
from megatron_ds.config.data_files import read_table
from megatron_ds.conversion.model_settings import ModelSettings
from megatron_ds.tokenizer.huggingface import SIDE_FILES, TOKENIZER_FILES
from megatron_ds.tokenizer.stored_files import read_files

OF_THE_MODEL = ("config.json", "generation_config.json")
"""Files next to a tokenizer's that an export writes itself."""
SETTINGS = SIDE_FILES[0]
CLASSES: dict[str, dict[str, Any]] = read_table(__file__)
"""tokenizer_config.json of the kinds that transformers knows; a given one takes precedence."""


def settings_of_folder(path: Path) -> dict[str, Any]:
    """Fields of `TokenizerConfig` for the tokenizer of a folder; empty if it has none."""
    if not any(file for pattern in TOKENIZER_FILES for file in path.glob(pattern)):
        return {}
    return {"tokenizer_type": "HFTokenizer", "tokenizer_model": str(path)}


def special_ids(settings: ModelSettings, names: Iterable[str], model_type: str) -> dict[str, Any]:
    """Token ids by name. Unknown ones are None, because their class has defaults, which only a
    model of the same family had before."""
    known = settings.special_ids
    is_same = settings.model_type == model_type
    return {name: known.get(name) for name in names if name in known or not is_same}


def can_be_exported(tokenizer: TokenizerConfig | None) -> bool:
    """Whether transformers has a tokenizer of this kind."""
    return tokenizer is not None and tokenizer.tokenizer_type in CLASSES


def files_of(settings: ModelSettings) -> dict[str, bytes]:
    """The files of a tokenizer by name, as far as transformers knows its kind."""
    tokenizer = settings.tokenizer_config
    if tokenizer is None or not can_be_exported(tokenizer):
        return {}
    files = {}
    for path, content in read_files(tokenizer).items():
        field, _, name = path.partition("/")
        files[_name(tokenizer, field, name)] = content
    # The class that the exported config.json names may split words in its own way.
    is_plain = "tokenizer.json" in files and not {SETTINGS, *OF_THE_MODEL} & files.keys()
    files = {name: content for name, content in files.items() if name not in OF_THE_MODEL}
    if tokenizer.tokenizer_type != "HFTokenizer" or is_plain:
        files[SETTINGS] = (json.dumps(CLASSES[tokenizer.tokenizer_type], indent=2) + "\n").encode()
    return files


def _name(tokenizer: TokenizerConfig, field: str, name: str) -> str:
    """The name under which transformers looks for a file."""
    path = Path(str(getattr(tokenizer, field)))
    if tokenizer.tokenizer_type == "HFTokenizer":
        # A tokenizer.json may have another name.
        return "tokenizer.json" if path.is_file() and name == path.name else name
    if field == "tokenizer_model":
        return "tokenizer.model"
    if field == "merge_file":
        return "merges.txt"
    return "vocab.json" if tokenizer.tokenizer_type == "GPT2BPETokenizer" else "vocab.txt"
