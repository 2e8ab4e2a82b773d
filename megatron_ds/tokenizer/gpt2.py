"""GPT-2's byte-level BPE, from vocab.json and merges.txt, on the `tokenizers` library."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from megatron_ds.config.problems import user_error
from megatron_ds.tokenizer.base import (
    JsonTokenizer,
    count_ids,
    library_errors,
    read_bytes,
    read_json,
    read_lines,
)
from megatron_ds.tokenizer.export.library import ExportedTokenizer, special_tokens
from megatron_ds.tokenizer.fingerprint import hash_content

END_OF_TEXT = "<|endoftext|>"
MAX_UNMERGED_TOKENS = 1000
"""Tokens, such as special tokens, that a vocabulary may have without a merge for them."""
LONG_TEXT = 1 << 20
"""Characters above which a text is encoded in pieces: the library takes 120 bytes for each."""
WORD_START = re.compile(r"(?<=\S)(?= \S)")
"""Positions at which GPT-2's pattern always starts a new word: no word has an inner space."""


class GPT2BPETokenizer(JsonTokenizer):
    """Byte-level BPE of vocab.json and merges.txt (Radford et al. 2019).

    Documents end with the id of `<|endoftext|>`. Inside a document, this text is encoded as
    ordinary characters: no special token is declared to the encoder, as in the GPT-2 code that
    Megatron uses. So the ids are the same, and a text cannot forge the end of a document.
    """

    def __init__(self, vocab_file: str, merge_file: str) -> None:
        """
        Raises:
            UserError: If the files are not such a vocabulary and its merges.
        """
        inputs = (vocab_file, "vocab_file"), (merge_file, "merge_file")
        if [read_bytes(*file).lstrip()[:1] == b"{" for file in inputs] == [False, True]:
            raise user_error("vocabulary-and-merges-swapped", merges=merge_file)
        vocab = _read_vocab(vocab_file)
        merges = _read_merges(merge_file, vocab_file, vocab)
        with library_errors("merges-of-another-vocabulary", vocab=vocab_file, merges=merge_file):
            pairs = [(line.split(" ")[0], line.split(" ")[1]) for line in merges]
            self._tokenizer = byte_level(models.BPE(vocab, pairs))
        self.eod = vocab[END_OF_TEXT]
        self.vocab_size = len(vocab)
        # The library takes long to write a vocabulary, and Python to read it again.
        settings = byte_level(models.BPE()).to_str()
        model = {"vocab": vocab, "merges": merges}
        content = hash_content(settings, {END_OF_TEXT: self.eod}, model)
        files = (vocab_file, merge_file)
        self.fingerprint = self._fingerprint_of("GPT2BPETokenizer", files, content=content)

    def added_tokens(self) -> Sequence[str]:
        return (END_OF_TEXT,)  # not added here, and another library must not treat it as added

    def exported(self) -> ExportedTokenizer:
        library = tokenizers.Tokenizer.from_str(self._tokenizer.to_str())
        library.add_special_tokens(special_tokens([END_OF_TEXT]))
        names = dict.fromkeys(("bos_token", "eos_token", "unk_token"), END_OF_TEXT)
        return ExportedTokenizer(library, names, keeps_special_text=True)

    def token_bytes(self) -> list[int] | None:
        sizes = super().token_bytes()
        if sizes is not None:
            sizes[self.eod] = 0
        return sizes

    def encode(self, text: str) -> list[int]:
        pieces = map(self._tokenizer.encode, _pieces(text))
        return list(itertools.chain.from_iterable(piece.ids for piece in pieces))

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        if any(len(text) > LONG_TEXT for text in texts):
            return [self.encode(text) for text in texts]
        return [encoding.ids for encoding in self._tokenizer.encode_batch_fast(list(texts))]


def byte_level(model: models.Model) -> tokenizers.Tokenizer:
    """The library's tokenizer of a model with GPT-2's words, without added tokens."""
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _pieces(text: str) -> Iterator[str]:
    """Splits a long text at word starts, so that the pieces have the ids of the text."""
    start = 0
    while len(text) - start > LONG_TEXT:
        word_start = WORD_START.search(text, start + LONG_TEXT)
        if word_start is None:
            break
        yield text[start : word_start.start()]
        start = word_start.start()
    yield text[start:]


def _read_vocab(path: str) -> dict[str, int]:
    vocab = read_json(path, "vocab_file")
    count_ids(vocab, "vocab_file", path)
    size = len(vocab)
    gaps = set(range(size)) - set(vocab.values())
    if gaps:
        raise user_error(
            "token-ids-not-contiguous", path=path, size=size, largest=size - 1, missing=min(gaps)
        )
    if END_OF_TEXT not in vocab:
        raise user_error("end-of-text-token-missing", path=path)
    # The encoder silently drops characters that are missing in the vocabulary.
    missing = sorted(set(pre_tokenizers.ByteLevel.alphabet()) - set(vocab))
    if missing:
        first = " ".join(missing[:8])
        raise user_error("byte-tokens-missing", path=path, num_missing=len(missing), missing=first)
    return vocab


def _read_merges(path: str, vocab_file: str, vocab: Mapping[str, int]) -> list[str]:
    """Reads the merges, and checks that they are complete.

    With a truncated file the library would silently encode to other tokens.
    """
    merges = []
    for count, line in enumerate(read_lines(path, "merge_file"), 1):
        if not line.strip() or line.startswith("#version"):
            continue
        if line.count(" ") != 1 or " " in (line[0], line[-1]):
            raise user_error("merge-not-a-pair", path=path, number=count, line=line[:40])
        merges.append(line)
    merged = {*pre_tokenizers.ByteLevel.alphabet(), *(line.replace(" ", "") for line in merges)}
    unmerged = [token for token in vocab if token not in merged]
    if len(unmerged) > MAX_UNMERGED_TOKENS:
        count = len(unmerged)
        first = " ".join(unmerged[:3])
        raise user_error(
            "merges-incomplete", path=path, number=count, vocab_file=vocab_file, unmerged=first
        )
    return merges
