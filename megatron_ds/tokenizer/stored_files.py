"""The files of a tokenizer, for a copy that works on another machine.

A copy has a folder for each option that names a file or folder. Must not know where copies are.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_ds.config import TokenizerConfig
from megatron_ds.tokenizer.gguf.keys import is_gguf

PATH_FIELDS = ("vocab_file", "merge_file", "tokenizer_model")


def read_files(config: TokenizerConfig) -> dict[str, bytes]:
    """Contents of the files of a tokenizer that has been built, by path in the copy.

    Raises:
        OSError: If one cannot be read.
        UserError: If a file of llama.cpp has a tokenizer of an unknown kind.
    """
    contents: dict[str, bytes] = {}
    for field in PATH_FIELDS:
        value = getattr(config, field)
        if value is not None and config.tokenizer_type == "HFTokenizer" and is_gguf(value):
            from megatron_ds.tokenizer.gguf.tokenizer import tokenizer_files

            files = tokenizer_files(Path(value))  # the file itself has the weights, too
            contents |= {f"{field}/{name}": content for name, content in files.items()}
            continue
        for path in () if value is None else _files_of(config, value):
            contents[f"{field}/{path.name}"] = path.read_bytes()
    return contents


def with_copies(settings: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Tokenizer settings with the paths of a copy, for the files that it has.

    Args:
        settings: Values by field.
        folder: The copy.
    """
    changed = dict(settings)
    for field in PATH_FIELDS:
        copies = folder / field
        if settings.get(field) is not None and copies.is_dir():
            file = copies / os.path.basename(os.path.normpath(settings[field]))
            changed[field] = str(file if file.is_file() else copies)
    return changed


def _files_of(config: TokenizerConfig, value: str) -> list[Path]:
    if config.tokenizer_type != "HFTokenizer":
        return [Path(value)]
    from megatron_ds.tokenizer.huggingface import pretrained_files

    return pretrained_files(value, config.trust_remote_code)
