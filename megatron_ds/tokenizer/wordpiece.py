"""BERT's WordPiece, from a vocab.txt, with the ids of the original BERT code and of Megatron.

Text is split as Devlin et al. (2018) define it: control characters are removed, CJK characters and
punctuation become words of their own, and the lower-case kind removes case and accents. The
`tokenizers` library splits the words into pieces. Its own word splitting is not used: it differs
for private and unassigned characters and for the Greek final sigma.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Collection, Sequence
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from megatron_ds.config.problems import user_error
from megatron_ds.tokenizer.base import Tokenizer, library_errors, read_lines
from megatron_ds.tokenizer.export.library import ExportedTokenizer, special_tokens
from megatron_ds.tokenizer.export.wordpiece_words import words_normalizer

MAX_WORD_CHARS = 200
"""A longer word is [UNK]."""
REQUIRED_TOKENS = ("[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]")
CJK = re.compile(
    "[\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
    "\U00020000-\U0002a6df\U0002a700-\U0002ceaf\U0002f800-\U0002fa1f]"
)
"""Characters that are words of their own."""


class WordPieceTokenizer(Tokenizer):
    """BertWordPieceLowerCase and BertWordPieceCase.

    [BOS] and [EOS] follow the vocabulary's last id if it lacks them, then the sentinels; [EOS] ends
    documents. The text of a special token inside a document is encoded as ordinary text. The ids
    hold no spaces and, for the lower-case kind, no case and accents: `decode` joins words by single
    spaces.
    """

    def __init__(self, vocab_file: str, *, lower_case: bool, extra_ids: int = 0) -> None:
        """
        Args:
            vocab_file: One token per line; the id is the line number, from 0.
            lower_case: Remove case and accents.
            extra_ids: Number of sentinels <extra_id_0>, ...

        Raises:
            UserError: If the file is not such a vocabulary.
        """
        vocab = read_vocab(vocab_file)
        for token in ("[BOS]", "[EOS]", *(f"<extra_id_{n}>" for n in range(extra_ids))):
            vocab.setdefault(token, len(vocab))
        self.eod = vocab["[EOS]"]
        self._special = [*REQUIRED_TOKENS, "[BOS]", "[EOS]"]
        self._special += [f"<extra_id_{index}>" for index in range(extra_ids)]
        self.vocab_size = len(vocab)
        name = "BertWordPieceLowerCase" if lower_case else "BertWordPieceCase"
        settings = {"--vocab-extra-ids": extra_ids} if extra_ids else {}
        self.fingerprint = self._fingerprint_of(name, [vocab_file], settings)
        self._splitter = Splitter(lower_case)
        with library_errors("wordpiece-vocabulary-invalid", vocab_file=vocab_file):
            model = models.WordPiece(
                vocab, unk_token="[UNK]", max_input_chars_per_word=MAX_WORD_CHARS
            )
        self._tokenizer = tokenizers.Tokenizer(model)
        self._tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        words = [self._splitter(text) for text in texts]
        return [encoding.ids for encoding in self._tokenizer.encode_batch_fast(words)]

    def exported(self) -> ExportedTokenizer:
        library = tokenizers.Tokenizer.from_str(self._tokenizer.to_str())
        library.normalizer = self._splitter.normalizer({*"".join(library.get_vocab())})
        library.decoder = decoders.WordPiece("##", cleanup=False)
        library.add_special_tokens(special_tokens(self._special))
        names = {f"{token[1:-1].lower()}_token": token for token in REQUIRED_TOKENS}
        return ExportedTokenizer(library, names | {"eos_token": "[EOS]"}, keeps_special_text=True)

    def decode(self, ids: Sequence[int]) -> str:
        tokens = [self._tokenizer.id_to_token(token_id) or "[UNK]" for token_id in ids]
        return " ".join(tokens).replace(" ##", "")


class Splitter:
    """Splits text into words, separated by one space.

    Translates characters twice: before lower-casing, and after it, when the normal form has
    separated the accents. Both tables are filled on demand.
    """

    def __init__(self, lower_case: bool) -> None:
        self._lower_case = lower_case
        self._split_char = _split_without_accents if lower_case else _split
        self._clean = _Table(_cleaned)
        self._split = _Table(self._split_char)

    def __call__(self, text: str) -> str:
        text = text.translate(self._clean)
        if self._lower_case:
            text = unicodedata.normalize("NFD", text.lower())
        return text.translate(self._split)

    def normalizer(self, alphabet: Collection[str]) -> Any:
        """A normalizer of `tokenizers` that splits like this, for a vocabulary's characters."""
        return words_normalizer(
            _cleaned, self._split_char, lower_case=self._lower_case, alphabet=alphabet
        )


class _Table(dict[int, str]):
    """Replacements of characters, computed when a character occurs first."""

    def __init__(self, replacement: Callable[[str], str]) -> None:
        super().__init__()
        self._replacement = replacement

    def __missing__(self, code: int) -> str:
        new = self._replacement(chr(code))
        self[code] = new
        return new


def _cleaned(char: str) -> str:
    """Removes control characters, unifies whitespace, and isolates CJK characters."""
    if char in "\t\n\r":
        return " "
    if unicodedata.category(char) in ("Cc", "Cf") or char == "\ufffd":
        return ""
    if char.isspace():
        return " "
    return f" {char} " if CJK.match(char) else char


def _split(char: str) -> str:
    """Isolates punctuation."""
    # Every printable ASCII character but letters, digits and space counts, such as $ and ^.
    is_symbol = "!" <= char <= "~" and not char.isalnum()
    return f" {char} " if is_symbol or unicodedata.category(char)[0] == "P" else char


def _split_without_accents(char: str) -> str:
    return "" if unicodedata.category(char) == "Mn" else _split(char)


def read_vocab(path: str) -> dict[str, int]:
    """Tokens of a vocab.txt and their ids, which are their line numbers from 0.

    Raises:
        UserError: If the file cannot be read, repeats a token or lacks a special token.
    """
    vocab: dict[str, int] = {}
    for index, line in enumerate(read_lines(path, "vocab_file")):
        token = line.strip()
        if vocab.setdefault(token, index) != index:
            first = vocab[token] + 1
            again = index + 1
            shown = token[:40]
            raise user_error(
                "vocabulary-token-repeated", path=path, line=again, token=shown, first=first
            )
    missing = [token for token in REQUIRED_TOKENS if token not in vocab]
    if missing:
        raise user_error("wordpiece-special-tokens-missing", path=path, missing=", ".join(missing))
    return vocab
