"""GPT-2's byte-level BPE, from its two files, on the `tokenizers` library."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from megatron_ds.tokenizer.base import fingerprint_of

END_OF_TEXT = "<|endoftext|>"


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
        try:
            model = models.BPE.from_file(vocab_file, merge_file)
        except Exception as error:  # the library raises bare Exception for every kind of fault
            raise ValueError(
                f"--merge-file {merge_file}: not the merges of --vocab-file {vocab_file}: {error}"
            ) from error
        self.eod = vocab[END_OF_TEXT]
        self.vocab_size = max(vocab.values()) + 1
        self.fingerprint = fingerprint_of(
            "GPT2BPETokenizer", [Path(vocab_file).read_bytes(), Path(merge_file).read_bytes()]
        )
        self._tokenizer = tokenizers.Tokenizer(model)
        self._tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        self._tokenizer.decoder = decoders.ByteLevel()

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self._tokenizer.encode_batch_fast(list(texts))]

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)


def _read_vocab(path: str) -> dict[str, int]:
    try:
        vocab = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"--vocab-file {path}: not JSON: {error}") from error
    if not isinstance(vocab, dict) or not all(isinstance(i, int) for i in vocab.values()):
        raise ValueError(f"--vocab-file {path}: must be one JSON object of tokens and their ids")
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
