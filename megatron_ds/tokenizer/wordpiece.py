"""BERT's WordPiece, from a vocab.txt, with the ids of the original BERT code and of Megatron.

Text is split as Devlin et al. (2018) define it: control characters are removed, CJK characters and
punctuation become words of their own, and the lower-case kind removes case and accents. The
`tokenizers` library splits the words into pieces. Its own word splitting is not used: it differs
for private and unassigned characters and for the Greek final sigma.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence

import tokenizers
from tokenizers import models, pre_tokenizers

from megatron_ds.config.problems import Problem, user_error
from megatron_ds.tokenizer.base import library_errors, read_lines
from megatron_ds.tokenizer.fingerprint import TokenizerFingerprint, hash_files

MAX_WORD_CHARS = 200
"""A longer word is [UNK]."""
REQUIRED_TOKENS = ("[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]")
CJK_BLOCKS = (
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
        self.cls, self.sep, self.pad = vocab["[CLS]"], vocab["[SEP]"], vocab["[PAD]"]
        self.mask, self.bos, self.eod = vocab["[MASK]"], vocab["[BOS]"], vocab["[EOS]"]
        self.vocab_size = len(vocab)
        self.fingerprint = TokenizerFingerprint(
            "BertWordPieceLowerCase" if lower_case else "BertWordPieceCase",
            hash_files([vocab_file]),
            self.vocab_size,
            self.eod,
            {"--vocab-extra-ids": extra_ids} if extra_ids else {},
        )
        self._splitter = Splitter(lower_case)
        with library_errors(
            lambda why: Problem("wordpiece-vocabulary-invalid", vocab_file=vocab_file, why=why)
        ):
            model = models.WordPiece(
                vocab, unk_token="[UNK]", max_input_chars_per_word=MAX_WORD_CHARS
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
    """Splits text into words, separated by one space.

    Translates characters twice: before lower-casing, and after it, when the normal form has
    separated the accents. Both tables are filled on demand.
    """

    def __init__(self, lower_case: bool) -> None:
        self._lower_case = lower_case
        self._clean = _CleanTable()
        self._split = _SplitTable(drop_accents=lower_case)

    def __call__(self, text: str) -> str:
        text = text.translate(self._clean)
        if self._lower_case:
            text = unicodedata.normalize("NFD", text.lower())
        return text.translate(self._split)


class _CleanTable(dict[int, str]):
    """Removes control characters, unifies whitespace, and isolates CJK characters."""

    def __missing__(self, code: int) -> str:
        char = chr(code)
        if char in "\t\n\r":
            new = " "
        elif unicodedata.category(char) in ("Cc", "Cf") or char == "\ufffd":
            new = ""
        elif char.isspace():
            new = " "
        elif any(first <= code <= last for first, last in CJK_BLOCKS):
            new = f" {char} "
        else:
            new = char
        self[code] = new
        return new


class _SplitTable(dict[int, str]):
    """Isolates punctuation and, if requested, removes accents."""

    def __init__(self, drop_accents: bool) -> None:
        super().__init__()
        self._drop_accents = drop_accents

    def __missing__(self, code: int) -> str:
        char = chr(code)
        category = unicodedata.category(char)
        # Every printable ASCII character but letters, digits and space counts, such as $ and ^.
        if category.startswith("P") or (33 <= code <= 126 and not char.isalnum()):
            new = f" {char} "
        elif self._drop_accents and category == "Mn":
            new = ""
        else:
            new = char
        self[code] = new
        return new


def read_vocab(path: str) -> dict[str, int]:
    """Tokens of a vocab.txt and their ids, which are their line numbers from 0.

    Raises:
        UserError: If the file cannot be read, repeats a token or lacks a special token.
    """
    vocab: dict[str, int] = {}
    for number, line in enumerate(read_lines(path, "vocab_file")):
        token = line.strip()
        if vocab.setdefault(token, number) != number:
            raise user_error(
                "vocabulary-token-repeated",
                path=path,
                number=number + 1,
                token=token[:40],
                vocab=vocab[token] + 1,
            )
    missing = [token for token in REQUIRED_TOKENS if token not in vocab]
    if missing:
        raise user_error("wordpiece-special-tokens-missing", path=path, missing=", ".join(missing))
    return vocab
