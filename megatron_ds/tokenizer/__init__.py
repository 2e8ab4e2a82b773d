"""Text to token ids and back: one protocol, one file per kind of tokenizer.

Importing this loads neither torch nor transformers; a kind's library is loaded when it is built.
Must not know files of tokens, models or process groups.
"""

from __future__ import annotations

from megatron_ds.config import TokenizerConfig
from megatron_ds.tokenizer.base import Tokenizer

__all__ = ["Tokenizer", "build_tokenizer"]


def build_tokenizer(config: TokenizerConfig, vocab_size: int | None = None) -> Tokenizer:
    """The tokenizer that the configuration names.

    vocab_size: number of ids of a NullTokenizer, without its end-of-document id; unused by the
    others, which know theirs. Raises ValueError with every problem of flags and files.
    """
    problems = list(config.problems(vocab_size))
    if problems:
        raise ValueError("\n".join(problems))
    if config.tokenizer_type == "NullTokenizer":
        from megatron_ds.tokenizer.null import NullTokenizer

        assert vocab_size is not None
        return NullTokenizer(vocab_size)
    if config.tokenizer_type == "HFTokenizer":
        from megatron_ds.tokenizer.huggingface import build_hf_tokenizer

        assert config.tokenizer_model is not None
        return build_hf_tokenizer(config.tokenizer_model)
    from megatron_ds.tokenizer.gpt2 import GPT2BPETokenizer

    assert config.vocab_file is not None
    assert config.merge_file is not None
    return GPT2BPETokenizer(config.vocab_file, config.merge_file)
