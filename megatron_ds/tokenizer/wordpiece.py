"""BERT's WordPiece, from a vocab.txt, with the ids of BERT's own code and of Megatron.

Text is split as Devlin et al. (2018) define it: control characters go, CJK characters and
punctuation stand alone, and the lower-case kind loses case and accents. The words are cut into
pieces by the `tokenizers` library. Its own splitting is not used: it differs in private and
unassigned characters and in the Greek final sigma.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from pathlib import Path

import tokenizers
from tokenizers import models, pre_tokenizers

from megatron_ds.tokenizer.base import fingerprint_of, library_errors
from megatron_ds.tokenizer.fingerprint import TokenizerFingerprint, hashes_of

LONGEST_WORD = 200
"""Characters; a longer word is [UNK]."""
NEEDED = ("[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]")
CJK = (
    (0x3400, 0x4DBF),
    (0x4E00, 0x9FFF),
    (0xF900, 0xFAFF),
    (0x20000, 0x2A6DF),
    (0x2A700, 0x2CEAF),
    (0x2F800, 0x2FA1F),
)
"""First and last character of the blocks whose characters are words of their own."""


class WordPieceTokenizer:
    """BertWordPieceLowerCase and BertWordPieceCase.

    [BOS] and [EOS] come after the vocabulary's last id where it lacks them, then `extra_ids`
    sentinels <extra_id_0>, ...; [EOS] ends documents. The text of a special token inside a document
    is plain text. Spaces and, in the lower-case kind, case and accents are not in the ids: `decode`
    joins words by single spaces. Raises ValueError, naming the file, for no such vocabulary.
    """

    def __init__(self, vocab_file: str, *, lower_case: bool, extra_ids: int = 0) -> None:
        vocab = read_vocab(vocab_file)
        for token in ("[BOS]", "[EOS]", *(f"<extra_id_{n}>" for n in range(extra_ids))):
            vocab.setdefault(token, len(vocab))
        self.cls, self.sep, self.pad = vocab["[CLS]"], vocab["[SEP]"], vocab["[PAD]"]
        self.mask, self.bos, self.eod = vocab["[MASK]"], vocab["[BOS]"], vocab["[EOS]"]
        self.vocab_size = len(vocab)
        kind = "BertWordPieceLowerCase" if lower_case else "BertWordPieceCase"
        self.fingerprint = fingerprint_of(
            kind, [Path(vocab_file).read_bytes(), str(extra_ids).encode()]
        )
        self.identity = TokenizerFingerprint(
            kind,
            hashes_of([vocab_file]),
            self.vocab_size,
            self.eod,
            {"--vocab-extra-ids": extra_ids} if extra_ids else {},
        )
        self._splitter = Splitter(lower_case)
        with library_errors(f"--vocab-file {vocab_file}: not a WordPiece vocabulary"):
            model = models.WordPiece(
                vocab, unk_token="[UNK]", max_input_chars_per_word=LONGEST_WORD
            )
        self._tokenizer = tokenizers.Tokenizer(model)
        self._tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()

    def encode(self, text: str) -> list[int]:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        words = [self._splitter(text) for text in texts]
        return [encoding.ids for encoding in self._tokenizer.encode_batch_fast(words)]

    def decode(self, ids: Sequence[int]) -> str:
        tokens = [self._tokenizer.id_to_token(number) or "[UNK]" for number in ids]
        return " ".join(tokens).replace(" ##", "")


class Splitter:
    """Text to words, with one space between them.

    Two passes over the characters, each by a table that is filled in as characters turn up: before
    lower-casing, and after it, when accents are characters of their own.
    """

    def __init__(self, lower_case: bool) -> None:
        self._lower_case = lower_case
        self._clean = _Cleaned()
        self._split = _Split(drop_accents=lower_case)

    def __call__(self, text: str) -> str:
        text = text.translate(self._clean)
        if self._lower_case:
            text = unicodedata.normalize("NFD", text.lower())
        return text.translate(self._split)


class _Cleaned(dict[int, str]):
    """What stands for a character: nothing, a space, itself, or itself between spaces."""

    def __missing__(self, code: int) -> str:
        char = chr(code)
        if char in "\t\n\r":
            new = " "
        elif unicodedata.category(char) in ("Cc", "Cf") or char == "\ufffd":
            new = ""
        elif char.isspace():
            new = " "
        elif any(first <= code <= last for first, last in CJK):
            new = f" {char} "
        else:
            new = char
        self[code] = new
        return new


class _Split(dict[int, str]):
    """Punctuation stands between spaces; accents go, where they do."""

    def __init__(self, drop_accents: bool) -> None:
        super().__init__()
        self._drop_accents = drop_accents

    def __missing__(self, code: int) -> str:
        char = chr(code)
        kind = unicodedata.category(char)
        # All of ASCII that is no letter, digit, space or control counts, such as $ and ^.
        if kind.startswith("P") or (33 <= code <= 126 and not char.isalnum()):
            new = f" {char} "
        elif self._drop_accents and kind == "Mn":
            new = ""
        else:
            new = char
        self[code] = new
        return new


def read_vocab(path: str) -> dict[str, int]:
    """Tokens by their line's number, from 0. Raises ValueError, naming file and line."""
    try:
        with open(path, encoding="utf-8") as file:
            lines = [line.strip() for line in file]
    except OSError as error:
        raise ValueError(f"--vocab-file {path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"--vocab-file {path}: not UTF-8: {error}") from error
    vocab: dict[str, int] = {}
    for number, token in enumerate(lines):
        if vocab.setdefault(token, number) != number:
            raise ValueError(
                f"--vocab-file {path}:{number + 1}: {token[:40]!r} stands in line "
                f"{vocab[token] + 1}, too; a vocab.txt has one token a line, each once"
            )
    missing = [token for token in NEEDED if token not in vocab]
    if missing:
        raise ValueError(
            f"--vocab-file {path}: has no {', '.join(missing)}: it is no vocab.txt of BERT's, "
            "which has one token a line"
        )
    return vocab
