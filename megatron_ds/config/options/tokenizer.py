"""Options of the tokenizer."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_ds.config.checks import file_problems
from megatron_ds.config.fields import Condition, Decides, option_field, when
from megatron_ds.config.problems import Problem
from megatron_ds.dataclass import dataclass

TOKENIZERS: dict[str, tuple[str, ...]] = {
    "GPT2BPETokenizer": ("vocab_file", "merge_file"),
    "BertWordPieceLowerCase": ("vocab_file",),
    "BertWordPieceCase": ("vocab_file",),
    "SentencePieceTokenizer": ("tokenizer_model",),
    "GPTSentencePieceTokenizer": ("tokenizer_model",),
    "Llama2Tokenizer": ("tokenizer_model",),
    "HFTokenizer": ("tokenizer_model",),
    "TikTokenizer": ("tokenizer_model", "tiktoken_pattern"),
    "NullTokenizer": (),
}
"""Tokenizer types and the fields that each requires."""
WORDPIECE = ("BertWordPieceLowerCase", "BertWordPieceCase")
REQUIRED_SPECIAL_TOKENS = ("<unk>", "<s>", "</s>")


def _types_with(field: str) -> Condition:
    """A tokenizer type that requires a field."""
    return when(tokenizer_type=tuple(name for name, needs in TOKENIZERS.items() if field in needs))


TIKTOKEN = when(tokenizer_type="TikTokenizer")


@dataclass(frozen=True)
class TokenizerConfig:
    """Tokenizer and its files."""

    DECIDES = Decides.TOKENS

    tokenizer_type: str = option_field(
        "GPT2BPETokenizer",
        choices=tuple(TOKENIZERS),
        synonyms={"PretrainedFromHF": "HFTokenizer", "HuggingFaceTokenizer": "HFTokenizer"},
        common=True,
    )
    """Type of tokenizer."""
    vocab_file: str | None = option_field(
        None, metavar="FILE", only_with=_types_with("vocab_file"), common=True
    )
    """vocab.json of GPT2BPETokenizer, vocab.txt of BertWordPiece...."""
    merge_file: str | None = option_field(
        None, metavar="FILE", only_with=_types_with("merge_file"), common=True
    )
    """merges.txt of GPT2BPETokenizer."""
    tokenizer_model: str | None = option_field(
        None,
        aliases=("tokenizer-name-or-path",),
        metavar="PATH",
        only_with=_types_with("tokenizer_model"),
        common=True,
    )
    """Folder, tokenizer.json, GGUF file or name on the Hugging Face Hub of HFTokenizer; model file
    of the SentencePiece tokenizers and TikTokenizer."""
    trust_remote_code: bool = option_field(False, only_with=when(tokenizer_type="HFTokenizer"))
    """Run Python code from the folder of HFTokenizer; only for sources you trust."""
    vocab_extra_ids: int = option_field(
        0, minimum=0, only_with=when(tokenizer_type=(*WORDPIECE, "SentencePieceTokenizer"))
    )
    """Number of sentinel tokens <extra_id_N> added to BertWordPiece... and
    SentencePieceTokenizer."""
    tiktoken_pattern: str | None = option_field(None, choices=("v1", "v2"), only_with=TIKTOKEN)
    """pre-tokenization pattern of TikTokenizer."""
    tiktoken_num_special_tokens: int = option_field(1000, only_with=TIKTOKEN)
    """Number of special token ids of TikTokenizer."""
    tiktoken_special_tokens: tuple[str, ...] | None = option_field(
        None, nargs="*", aliases=("tokenizer-special-tokens",), only_with=TIKTOKEN
    )
    """Names of the first special tokens; must include <unk>, <s> and </s> (default: these)."""

    def problems(self, vocab_size: int | None) -> Iterator[Problem]:
        """Check that the tokenizer has the files and the vocabulary size that it requires.

        Args:
            vocab_size: --vocab-size; None if not given.
        """
        tokenizer = self.tokenizer_type
        for name in TOKENIZERS[tokenizer]:
            value = getattr(self, name)
            if value is None:
                yield _requirement(tokenizer, name)
            elif name != "tiktoken_pattern" and tokenizer != "HFTokenizer":
                yield from file_problems(name, value)
        if tokenizer == "NullTokenizer" and vocab_size is None:
            yield _requirement(tokenizer, "vocab_size")
        if tokenizer == "TikTokenizer":
            yield from self._special_token_problems()

    def _special_token_problems(self) -> Iterator[Problem]:
        names = self.tiktoken_special_tokens or REQUIRED_SPECIAL_TOKENS
        if len(set(names)) != len(names):
            yield Problem("duplicate-special-token", settings=self)
        if not set(REQUIRED_SPECIAL_TOKENS) <= set(names):
            required = ", ".join(REQUIRED_SPECIAL_TOKENS)
            yield Problem("special-token-missing", settings=self, required=required)
        if len(names) > self.tiktoken_num_special_tokens:
            yield Problem("too-few-special-token-ids", settings=self, num_names=len(names))


def _requirement(tokenizer: str, name: str) -> Problem:
    return Problem("tokenizer-option-required", name, "tokenizer_type", kind=tokenizer)
