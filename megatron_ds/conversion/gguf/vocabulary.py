"""The tokenizer of a run as keys of a GGUF file, with the ids that llama.cpp gives."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from megatron_ds.config.problems import Problem, UserError
from megatron_ds.conversion.gguf.byte_level import byte_level_keys
from megatron_ds.conversion.gguf.sentencepiece_keys import merged_keys, sentencepiece_keys
from megatron_ds.conversion.gguf.tokens import Vocabulary
from megatron_ds.conversion.huggingface.tokenizer import begins_texts, tokenizer_vocab_size
from megatron_ds.conversion.model_settings import ModelSettings
from megatron_ds.tokenizer import Tokenizer, build_tokenizer
from megatron_ds.tokenizer.chat_template import TOOL_TEMPLATE, read_chat_template
from megatron_ds.tokenizer.export.library import ExportedTokenizer
from megatron_ds.tokenizer.gguf.keys import (
    CHAT_TEMPLATE,
    ID_KEYS,
    JSON,
    KEEPS_SPECIAL_TEXT,
    PREFIX,
    TEMPLATES,
    UNKNOWN,
    UNUSED,
    unused,
)


def vocabulary_of(settings: ModelSettings, data: Mapping[str, Any] | None) -> Vocabulary:
    """The keys of the tokenizer of a model.

    Args:
        settings: The settings of the model, with its tokenizer.
        data: Values by field of `DataConfig` of the training run; None for another model.
    """
    result = Vocabulary()
    config = settings.tokenizer_config
    if config is None or config.tokenizer_type == "NullTokenizer":
        result.keys = {f"{PREFIX}model": "none"}
        result.warnings.append(Problem("gguf-without-tokenizer"))
        return result
    try:
        tokenizer = build_tokenizer(config, tokenizer_vocab_size(settings))
        exported = tokenizer.exported()
    except UserError as error:
        result.problems += error.problems
        return result
    begins = begins_texts(config, tokenizer, exported, data, result.warnings.append)
    rows = settings.model.vocab_size
    if exported.library.get_vocab_size(with_added_tokens=True) > rows:
        result.problems.append(Problem("gguf-tokenizer-exceeds-rows", rows=rows))
        return result
    model = json.loads(exported.library.to_str())["model"]
    try:
        if exported.sentencepiece is not None:
            result.keys = sentencepiece_keys(exported, result)
        elif model["type"] == "BPE" and model["byte_fallback"]:
            result.keys = merged_keys(exported)
        elif model["type"] == "BPE":
            result.keys = byte_level_keys(tokenizer, exported, result, begins=begins)
        else:
            raise ValueError(f"its model, a {model['type']}")
    except ValueError as error:
        result.problems.append(Problem("gguf-tokenizer-inexpressible", why=str(error)))
        return result
    _pad(result.keys, rows)
    result.keys |= _special_keys(tokenizer, exported, begins=begins)
    if (template := read_chat_template(tokenizer.folder)) is not None:
        result.keys[CHAT_TEMPLATE] = template.source
        if template.source_with_tools:
            result.keys[TEMPLATES] = [TOOL_TEMPLATE]
            result.keys[f"{CHAT_TEMPLATE}.{TOOL_TEMPLATE}"] = template.source_with_tools
    result.keys[JSON] = exported.to_json(exported.special["bos_token"] if begins else None)
    if exported.keeps_special_text:
        result.keys[KEEPS_SPECIAL_TEXT] = True
    return result


def _pad(keys: dict[str, Any], rows: int) -> None:
    """Adds unused tokens for the rows of the vocabulary tables that no token has."""
    tokens = keys[f"{PREFIX}tokens"]
    missing = range(len(tokens), rows)
    tokens += [unused(index) for index in missing]
    keys[f"{PREFIX}token_type"] += [UNUSED for _ in missing]
    if (scores := keys.get(f"{PREFIX}scores")) is not None:
        scores += [0.0 for _ in missing]


def _special_keys(
    tokenizer: Tokenizer, exported: ExportedTokenizer, *, begins: bool
) -> dict[str, Any]:
    ids = {
        ID_KEYS[role]: exported.library.token_to_id(token)
        for role, token in exported.special.items()
        if role in ID_KEYS
    }
    if exported.sentencepiece is not None:
        types = [piece.type for piece in exported.sentencepiece.pieces]
        ids["unknown_token_id"] = types.index(UNKNOWN)
    # The runtime's own begin token, of a file without one, is token 11, or 1.
    ids["bos_token_id"] = tokenizer.prefix
    ids["eos_token_id"] = tokenizer.eod
    keys: dict[str, Any] = {
        f"{PREFIX}{name}": index for name, index in ids.items() if index is not None
    }
    return keys | {f"{PREFIX}add_bos_token": begins, f"{PREFIX}add_eos_token": False}
