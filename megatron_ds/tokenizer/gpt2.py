"""GPT-2's byte-level BPE, from its two files, on the `tokenizers` library."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from megatron_ds.tokenizer.base import checked_size, fingerprint_of, library_errors, read_json
from megatron_ds.tokenizer.fingerprint import TokenizerFingerprint, hashes_of

END_OF_TEXT = "<|endoftext|>"
SPECIAL_TOKENS = 1000
"""A vocabulary may have so many tokens that no merge makes."""
LONG_TEXT = 1 << 20
"""Characters from which on a text is encoded in pieces: the library takes 120 bytes for each."""
BETWEEN_WORDS = re.compile(r"(?<=\S)(?= \S)")
"""Where GPT-2's pattern always begins a new word: none has a space behind anything else."""


class GPT2BPETokenizer:
    """Byte-level BPE of vocab.json and merges.txt (Radford et al. 2019).

    The end-of-document id is that of `<|endoftext|>`. A document that contains the text
    `<|endoftext|>` gets the ids of those characters, never the end-of-document id: no special
    tokens are declared to the encoder, which is also what GPT-2's own code as used by Megatron
    does, so the ids are the same and a text cannot forge a document's end.

    Raises ValueError, naming the file, if the files are no such vocabulary.
    """

    def __init__(self, vocab_file: str, merge_file: str) -> None:
        vocab = _read_vocab(vocab_file)
        _check_merges(merge_file, vocab_file, vocab)
        with library_errors(
            f"--merge-file {merge_file}: not the merges of --vocab-file {vocab_file}"
        ):
            model = models.BPE.from_file(vocab_file, merge_file)
        self.eod = vocab[END_OF_TEXT]
        self.vocab_size = len(vocab)
        self.fingerprint = fingerprint_of(
            "GPT2BPETokenizer", [Path(vocab_file).read_bytes(), Path(merge_file).read_bytes()]
        )
        self.identity = TokenizerFingerprint(
            "GPT2BPETokenizer", hashes_of([vocab_file, merge_file]), self.vocab_size, self.eod
        )
        self._tokenizer = tokenizers.Tokenizer(model)
        self._tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        self._tokenizer.decoder = decoders.ByteLevel()

    def tokenizer_json(self) -> str:
        return self._tokenizer.to_str()

    def added_tokens(self) -> Sequence[str]:
        return (END_OF_TEXT,)  # which is none here, and must not become one by another library

    def encode(self, text: str) -> list[int]:
        pieces = map(self._tokenizer.encode, _pieces(text))
        return list(itertools.chain.from_iterable(piece.ids for piece in pieces))

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        if any(len(text) > LONG_TEXT for text in texts):
            return [self.encode(text) for text in texts]
        return [encoding.ids for encoding in self._tokenizer.encode_batch_fast(list(texts))]

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)


def _pieces(text: str) -> Iterator[str]:
    """A text cut where no word is torn, so that the ids of the pieces are those of the text."""
    start = 0
    while len(text) - start > LONG_TEXT:
        cut = BETWEEN_WORDS.search(text, start + LONG_TEXT)
        if cut is None:
            break
        yield text[start : cut.start()]
        start = cut.start()
    yield text[start:]


def _read_vocab(path: str) -> dict[str, int]:
    vocab = read_json(path, "--vocab-file")
    if not isinstance(vocab, dict):
        raise ValueError(f"--vocab-file {path}: must be one JSON object of tokens and their ids")
    checked_size(vocab, f"--vocab-file {path}")
    gaps = set(range(len(vocab))) - set(vocab.values())
    if gaps:
        raise ValueError(
            f"--vocab-file {path}: {len(vocab)} tokens need the ids 0 to {len(vocab) - 1}, each "
            f"once; {min(gaps)} is missing"
        )
    if END_OF_TEXT not in vocab:
        raise ValueError(f"--vocab-file {path}: has no {END_OF_TEXT}, which ends documents")
    # The encoder drops characters that the vocabulary lacks without a word.
    missing = sorted(set(pre_tokenizers.ByteLevel.alphabet()) - set(vocab))
    if missing:
        raise ValueError(
            f"--vocab-file {path}: lacks {len(missing)} of the 256 bytes of a byte-level BPE "
            f"({' '.join(missing[:8])} ...)"
        )
    return vocab


def _check_merges(path: str, vocab_file: str, vocab: dict[str, int]) -> None:
    """That the file is made of lines of two tokens, and that its end is not missing.

    With half of its merges a text would be cut into other tokens, without a word.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise ValueError(f"--merge-file {path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"--merge-file {path}: not UTF-8: {error}") from error
    made = set(pre_tokenizers.ByteLevel.alphabet())
    for number, line in enumerate(lines, 1):
        parts = line.split(" ")
        if not line.strip() or line.startswith("#version"):
            continue
        if len(parts) != 2 or not all(parts):
            raise ValueError(f"--merge-file {path}:{number}: {line[:40]!r} is no pair of tokens")
        made.add("".join(parts))
    unmade = [token for token in vocab if token not in made]
    if len(unmade) > SPECIAL_TOKENS:
        raise ValueError(
            f"--merge-file {path}: makes {len(unmade)} tokens of --vocab-file {vocab_file} not "
            f"({' '.join(unmade[:3])} ...): its end is missing, or they are files of two "
            "vocabularies"
        )
