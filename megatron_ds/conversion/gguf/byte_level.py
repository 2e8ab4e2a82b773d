"""Byte-level BPE as keys of a GGUF file."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import tokenizers
from tokenizers import models

from megatron_ds.config.problems import Problem
from megatron_ds.conversion.gguf.tokens import Vocabulary, merges_of, tokens_of, types_of
from megatron_ds.tokenizer import Tokenizer
from megatron_ds.tokenizer.export.library import ExportedTokenizer, special_tokens
from megatron_ds.tokenizer.export.probe import compare_export, decoded_tokens
from megatron_ds.tokenizer.gguf import pre_tokenizers
from megatron_ds.tokenizer.gguf.keys import PREFIX

PROBED_WORDS = 1000
TOKENS_PER_WORD = 3
FAR = 7919
"""Distance of the tokens of a word."""
NUMBERED_WORDS = 5
"""Of so many words one ends with a number."""
APPROXIMATED = ("e\u0301a", "\u0939\u093f\u0928\u094d\u0926\u0940", "\u00e9\u00c4b")
"""Letters with marks, and a small letter before a capital one."""


def byte_level_keys(
    tokenizer: Tokenizer, exported: ExportedTokenizer, result: Vocabulary, *, begins: bool
) -> dict[str, Any]:
    """Keys of a byte-level BPE.

    Raises:
        ValueError: If llama.cpp lacks a part of it.
    """
    library = exported.library
    state = json.loads(library.to_str())
    model = state["model"]
    _check_bpe(model)
    splits = pre_tokenizers.splits_of(state["pre_tokenizer"])
    name = pre_tokenizers.known_pre_tokenizer(
        splits, ignore_merges=bool(model.get("ignore_merges"))
    )
    words = [*_words(tokenizer)]
    if name is None:
        near, count = pre_tokenizers.nearest(library, words)
        shown = ", then ".join(pre_tokenizers.original_splits(state["pre_tokenizer"]))
        values = {"splits": shown, "name": near, "count": count, "words": len(words)}
        result.problems.append(Problem("gguf-split-unknown", **values))
        name = near
    normalizer = state["normalizer"]
    if normalizer is not None:
        normalizer_type = normalizer["type"]
        if normalizer_type == "NFC":
            result.warnings.append(Problem("gguf-normalizer-dropped", name=normalizer_type))
        else:
            raise ValueError(f"the normalizer {normalizer_type}")
    if pre_tokenizers.PRE_TOKENIZERS[name].engine:
        texts = [*words, *APPROXIMATED]
        others = pre_tokenizers.split_otherwise(library, name, texts)
        values = {"name": name, "count": len(others), "words": len(texts), "text": others[-1]}
        result.warnings.append(Problem("gguf-split-approximate", **values))
    elif not result.problems:
        _compare(tokenizer, exported, name, result, begins=begins)
    return {
        f"{PREFIX}model": "gpt2",
        f"{PREFIX}pre": name,
        f"{PREFIX}tokens": [*tokens_of(library)],
        f"{PREFIX}token_type": [*types_of(library)],
        f"{PREFIX}merges": [" ".join(pair) for pair in merges_of(model)],
    }


def _check_bpe(model: Mapping[str, Any]) -> None:
    """Raises ValueError if a BPE has a part that llama.cpp lacks."""
    lacking = [
        name
        for name in ("continuing_subword_prefix", "end_of_word_suffix", "byte_fallback", "dropout")
        if model.get(name)
    ]
    if lacking:
        raise ValueError(f"a byte-level BPE with {', '.join(lacking)}")
    if not model["merges"]:
        raise ValueError("a BPE without merges")


def _compare(
    tokenizer: Tokenizer,
    exported: ExportedTokenizer,
    name: str,
    result: Vocabulary,
    *,
    begins: bool,
) -> None:
    """Compares the ids of the run with the ones that llama.cpp's splits and merges give."""
    splitter = pre_tokenizers.PRE_TOKENIZERS[name]
    state = json.loads(exported.library.to_str())
    model = state["model"]
    vocab = exported.library.get_vocab(with_added_tokens=False)
    merges = [(first, second) for first, second in merges_of(model)]
    engine = tokenizers.Tokenizer(models.BPE(vocab, merges, ignore_merges=splitter.ignore_merges))
    engine.pre_tokenizer = splitter.applied
    engine.normalizer = exported.library.normalizer
    added = exported.library.get_added_tokens_decoder()
    for index in sorted(added):
        token = added[index]
        if engine.token_to_id(token.content) in (None, index):
            engine.add_tokens([token])
    engine.add_special_tokens(
        special_tokens(added[index].content for index in sorted(added) if added[index].special)
    )
    simulated = ExportedTokenizer(engine, exported.special, exported.keeps_special_text)
    difference, warnings = compare_export(
        tokenizer, simulated, simulated.to_json(_begin(exported, begins)), begins=begins
    )
    result.warnings += warnings
    if difference is not None:
        result.problems.append(Problem("gguf-tokenizer-differs", name=name, **difference.values))


def _begin(exported: ExportedTokenizer, begins: bool) -> str | None:
    return exported.special["bos_token"] if begins else None


def _words(tokenizer: Tokenizer) -> Iterator[str]:
    """Texts of some tokens each, by which splits are compared."""
    tokens = decoded_tokens(tokenizer)
    step = max(1, len(tokens) // PROBED_WORDS)
    for at in range(PROBED_WORDS):
        chosen = (
            tokens[(at * step + more * 7919) % len(tokens)] for more in range(TOKENS_PER_WORD)
        )
        yield "".join(chosen) + (str(at) if at % NUMBERED_WORDS == 0 else "")
