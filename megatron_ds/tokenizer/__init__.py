"""Tokenizers: one base class, one module per kind.

Imports neither torch nor transformers; the library of a kind is imported when its tokenizer is
built. Must not know token files, models or process groups.
"""

from __future__ import annotations

from pathlib import Path

from megatron_ds.config import TokenizerConfig
from megatron_ds.config.fields import field_problems
from megatron_ds.config.problems import raise_if_any
from megatron_ds.tokenizer.base import Tokenizer
from megatron_ds.tokenizer.fingerprint import TokenizerFingerprint
from megatron_ds.tokenizer.gguf.keys import is_gguf

__all__ = ["Tokenizer", "TokenizerFingerprint", "build_tokenizer"]


def build_tokenizer(config: TokenizerConfig, vocab_size: int | None = None) -> Tokenizer:
    """Builds the configured tokenizer.

    Args:
        config: Kind, files and options.
        vocab_size: Number of ids of a NullTokenizer, not counting its end-of-document id, or size
            to which a TikTokenizer is truncated. The other kinds take their size from their files.

    Raises:
        UserError: If options contradict each other or a file is missing or damaged.
    """
    raise_if_any([*field_problems(config), *config.problems(vocab_size)])
    if config.tokenizer_type == "NullTokenizer":
        from megatron_ds.tokenizer.null import NullTokenizer

        assert vocab_size is not None
        return NullTokenizer(vocab_size)
    if config.tokenizer_type == "GPT2BPETokenizer":
        from megatron_ds.tokenizer.gpt2 import GPT2BPETokenizer

        assert config.vocab_file is not None
        assert config.merge_file is not None
        return GPT2BPETokenizer(config.vocab_file, config.merge_file)
    if config.tokenizer_type.startswith("BertWordPiece"):
        from megatron_ds.tokenizer.wordpiece import WordPieceTokenizer

        assert config.vocab_file is not None
        return WordPieceTokenizer(
            config.vocab_file,
            lower_case=config.tokenizer_type == "BertWordPieceLowerCase",
            extra_ids=config.vocab_extra_ids,
        )
    assert config.tokenizer_model is not None
    if config.tokenizer_type == "HFTokenizer" and is_gguf(config.tokenizer_model):
        from megatron_ds.tokenizer.gguf.tokenizer import GgufTokenizer

        return GgufTokenizer(Path(config.tokenizer_model))
    if config.tokenizer_type == "HFTokenizer":
        from megatron_ds.tokenizer.huggingface import build_hf_tokenizer

        return build_hf_tokenizer(config.tokenizer_model, config.trust_remote_code)
    if config.tokenizer_type == "TikTokenizer":
        from megatron_ds.tokenizer.tiktoken_tokenizer import TikTokenizer

        assert config.tiktoken_pattern is not None
        return TikTokenizer(
            config.tokenizer_model,
            pattern=config.tiktoken_pattern,
            num_special=config.tiktoken_num_special_tokens,
            special=config.tiktoken_special_tokens,
            vocab_size=vocab_size,
        )
    from megatron_ds.tokenizer.sentencepiece import (
        SentencePieceTokenizer,
        SentencePieceWithSpecialTokens,
    )

    if config.tokenizer_type == "SentencePieceTokenizer":
        return SentencePieceWithSpecialTokens(config.tokenizer_model, config.vocab_extra_ids)
    return SentencePieceTokenizer(config.tokenizer_model, name=config.tokenizer_type)
