"""SentencePiece models, and BPE models like theirs, as keys of a GGUF file."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from megatron_ds.config.problems import Problem
from megatron_ds.conversion.gguf.tokens import Vocabulary, merges_of, tokens_of, types_of
from megatron_ds.tokenizer.export import sentencepiece_model as pieces
from megatron_ds.tokenizer.export.library import ExportedTokenizer
from megatron_ds.tokenizer.gguf.keys import (
    BYTE,
    CONTROL,
    NORMAL,
    PREFIX,
    UNKNOWN,
    USER_DEFINED,
)
from megatron_ds.tokenizer.token_bytes import SPACE

BYTE_NAME = re.compile("<0x[0-9A-F]{2}>")


def sentencepiece_keys(exported: ExportedTokenizer, result: Vocabulary) -> dict[str, Any]:
    """Keys of a SentencePiece model.

    Args:
        exported: The tokenizer.
        result: Gets warnings.

    Raises:
        ValueError: If llama.cpp lacks a part of it.
    """
    model = exported.sentencepiece
    spec = model.normalizer_spec
    is_unigram = model.trainer_spec.model_type == pieces.UNIGRAM
    user_defined = pieces.pieces_of(model, [pieces.USER_DEFINED])
    has_blanks = any(SPACE in text or " " in text for text in user_defined)
    parts = {
        "a whitespace suffix": model.trainer_spec.treat_whitespace_as_suffix,
        "blanks that are not escaped": not spec.escape_whitespaces,
        "byte fallback in a unigram": is_unigram and model.trainer_spec.byte_fallback,
        "user-defined pieces in a unigram": is_unigram and bool(user_defined),
        "the removal of blanks without one before texts": (
            is_unigram and spec.remove_extra_whitespaces and not spec.add_dummy_prefix
        ),
        "a BPE without byte fallback": not (is_unigram or model.trainer_spec.byte_fallback),
        "a normalizer in a BPE": not is_unigram and bool(spec.precompiled_charsmap),
        "the removal of blanks in a BPE": not is_unigram and spec.remove_extra_whitespaces,
        "user-defined pieces with blanks in a BPE": not is_unigram and has_blanks,
        "user-defined pieces in a BPE with a blank before texts": (
            not is_unigram and bool(user_defined) and spec.add_dummy_prefix
        ),
        "single characters as pieces": model.trainer_spec.model_type == pieces.CHAR,
    }
    if lacking := [part for part, is_there in parts.items() if is_there]:
        raise ValueError(f"a SentencePiece model with {', '.join(lacking)}")
    if is_unigram and spec.add_dummy_prefix and not spec.remove_extra_whitespaces:
        result.warnings.append(Problem("gguf-blank-texts"))
    size = exported.library.get_vocab_size(with_added_tokens=True)
    tokens = [*tokens_of(exported.library)]
    types = [piece.type for piece in model.pieces]
    types += [CONTROL for _ in range(len(types), size)]
    keys: dict[str, Any] = {
        f"{PREFIX}model": "t5" if is_unigram else "llama",
        f"{PREFIX}tokens": tokens,
        f"{PREFIX}token_type": types,
        f"{PREFIX}scores": [float(piece.score) for piece in model.pieces]
        + [0.0 for _ in range(len(model.pieces), size)],
        f"{PREFIX}add_space_prefix": bool(spec.add_dummy_prefix),
        f"{PREFIX}remove_extra_whitespaces": bool(spec.remove_extra_whitespaces),
    }
    if is_unigram and spec.precompiled_charsmap:
        keys[f"{PREFIX}precompiled_charsmap"] = bytes(spec.precompiled_charsmap)
    return keys


def merged_keys(exported: ExportedTokenizer) -> dict[str, Any]:
    """Keys of a BPE of characters and bytes, whose merges have the order of scores.

    llama.cpp merges each two neighbours that form a token, the one of the highest score first.

    Raises:
        ValueError: If llama.cpp lacks a part of it.
    """
    state = json.loads(exported.library.to_str())
    model = state["model"]
    has_prefix = _prefix_of(state)
    vocab = exported.library.get_vocab(with_added_tokens=False)
    added = {token.content for token in exported.library.get_added_tokens_decoder().values()}
    merged = ["".join(pair) for pair in merges_of(model)]
    order = [token for token, _ in itertools.groupby(merged)]
    if len(order) != len({*order}):
        raise ValueError("a BPE whose merges to a token are not next to each other")
    if {*map(tuple, merges_of(model))} != {*_all_merges(order, {*vocab} - added)}:
        raise ValueError("a BPE that does not merge every two neighbours that form a token")
    ranks = {token: rank for rank, token in enumerate(order)}
    tokens = [*tokens_of(exported.library)]
    types = [
        _type_of(token, token_type, model["unk_token"])
        for token, token_type in zip(tokens, types_of(exported.library), strict=True)
    ]
    if USER_DEFINED in types and has_prefix:
        raise ValueError("added tokens that are not special, with a blank before texts")
    return {
        f"{PREFIX}model": "llama",
        f"{PREFIX}tokens": tokens,
        f"{PREFIX}token_type": types,
        f"{PREFIX}scores": [-float(ranks.get(token, len(order))) for token in tokens],
        f"{PREFIX}add_space_prefix": has_prefix,
    }


def _type_of(token: str, token_type: int, unknown: str | None) -> int:
    if token == unknown:
        return UNKNOWN
    is_byte = token_type == NORMAL and BYTE_NAME.fullmatch(token)
    return BYTE if is_byte else token_type


def _all_merges(order: Iterable[str], vocab: set[str]) -> Iterable[tuple[str, str]]:
    """Every two tokens that form a third one."""
    for token in order:
        for at in range(1, len(token)):
            if token[:at] in vocab and token[at:] in vocab:
                yield token[:at], token[at:]


def _prefix_of(state: Mapping[str, Any]) -> bool:
    """Whether texts get a blank before them, of a tokenizer.json that only replaces blanks.

    Raises:
        ValueError: If it changes texts otherwise.
    """
    replaced = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    prepended = {"type": "Prepend", "prepend": SPACE}
    normalizer = state["normalizer"] or {"type": "Sequence", "normalizers": []}
    steps = normalizer.get("normalizers", [normalizer])
    words = state["pre_tokenizer"]
    if words is not None and words.get("pattern") == {"String": " "}:
        words = None  # no blank is left
    if words is None and steps in ([replaced], [prepended, replaced], [replaced, prepended]):
        return len(steps) > 1
    is_metaspace = words is not None and words["type"] == "Metaspace" and not steps
    if is_metaspace and words["replacement"] == SPACE and not words.get("split", True):
        return bool(words["prepend_scheme"] != "never")
    raise ValueError(f"its normalizer and words, {json.dumps([normalizer, words])}")
