"""SentencePiece models: Megatron's three kinds, which differ in what they add to the model's."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron_ds.tokenizer.base import fingerprint_of, library, library_errors
from megatron_ds.tokenizer.fingerprint import TokenizerFingerprint, hashes_of

ADDED = ("<CLS>", "<SEP>", "<EOD>", "<MASK>")


class SentencePieceTokenizer:
    """GPTSentencePieceTokenizer and Llama2Tokenizer: the model's ids, </s> ends documents.

    Llama2Tokenizer begins every text with <s>, as in Megatron, where the text of each document is
    one; GPTSentencePieceTokenizer adds nothing. `decode` drops <s> and </s>. Raises ValueError,
    naming the file.
    """

    def __init__(self, model_file: str, *, kind: str) -> None:
        self._model = _load(model_file)
        self.eod = _control(
            self._model, "eos_id", "</s> (eos_id), which ends documents", model_file
        )
        self._before = []
        if kind == "Llama2Tokenizer":
            bos = _control(self._model, "bos_id", "<s> (bos_id), which begins texts", model_file)
            self._before = [bos]
        self.vocab_size = int(self._model.get_piece_size())
        self.fingerprint = fingerprint_of(kind, [Path(model_file).read_bytes()])
        self.identity = TokenizerFingerprint(
            kind, hashes_of([model_file]), self.vocab_size, self.eod
        )

    def encode(self, text: str) -> list[int]:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [[*self._before, *ids] for ids in _encode(self._model, texts)]

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._model.decode(list(ids)))


class SentencePieceWithSpecialTokens:
    """SentencePieceTokenizer: <CLS>, <SEP>, <EOD>, <MASK>, the model's padding, beginning and end,
    and `extra_ids` sentinels come after the model's ids where it lacks them; <EOD> ends documents.

    As in Megatron, the text of such a token inside a document becomes that token, and `decode` puts
    spaces around it. Raises ValueError, naming the file.
    """

    def __init__(self, model_file: str, *, extra_ids: int = 0) -> None:
        self._model = _load(model_file)
        size = int(self._model.get_piece_size())
        ids = {self._model.id_to_piece(number): number for number in range(size)}
        ends = {
            name: self._model.id_to_piece(number) if number >= 0 else absent
            for name, number, absent in (
                ("pad", self._model.pad_id(), "<PAD>"),
                ("bos", self._model.bos_id(), "<BOS>"),
                ("eos", self._model.eos_id(), "<EOS>"),
            )
        }
        sentinels = (f"<extra_id_{number}>" for number in range(extra_ids))
        self._marks = {
            token: ids.setdefault(token, len(ids)) for token in (*ADDED, *ends.values(), *sentinels)
        }
        self._texts = {number: token for token, number in self._marks.items()}
        # Where two marks begin at one place, the first is taken.
        self._pattern = re.compile("|".join(re.escape(token) for token in self._marks))
        self.cls, self.sep, self.eod, self.mask = (self._marks[token] for token in ADDED)
        self.pad, self.bos, self.eos = (self._marks[token] for token in ends.values())
        self.vocab_size = len(ids)
        kind = "SentencePieceTokenizer"
        self.fingerprint = fingerprint_of(
            kind, [Path(model_file).read_bytes(), str(extra_ids).encode()]
        )
        self.identity = TokenizerFingerprint(
            kind,
            hashes_of([model_file]),
            self.vocab_size,
            self.eod,
            {"--vocab-extra-ids": extra_ids} if extra_ids else {},
        )

    def encode(self, text: str) -> list[int]:
        return list(self._ids(text))

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        plain = [text for text in texts if not self._pattern.search(text)]
        encoded = iter(_encode(self._model, plain))
        return [
            self.encode(text) if self._pattern.search(text) else next(encoded) for text in texts
        ]

    def decode(self, ids: Sequence[int]) -> str:
        parts, piece = [], list[int]()
        for number in ids:
            if number in self._texts:
                parts.append(f"{self._model.decode(piece)} {self._texts[number]} ")
                piece = []
            else:
                piece.append(number)
        return "".join([*parts, self._model.decode(piece)])

    def _ids(self, text: str) -> Iterator[int]:
        end = 0
        for mark in self._pattern.finditer(text):
            yield from _encode(self._model, [text[end : mark.start()]])[0]
            yield self._marks[mark.group()]
            end = mark.end()
        yield from _encode(self._model, [text[end:]])[0]


def _load(path: str) -> Any:
    sentencepiece = library("sentencepiece", f"--tokenizer-model {path}")
    with library_errors(f"--tokenizer-model {path}: not a SentencePiece model"):
        content = Path(path).read_bytes()
        if not content:
            raise ValueError("the file is empty")
        model = sentencepiece.SentencePieceProcessor(model_proto=content)
        if model.get_piece_size() < 1:
            raise ValueError("it has no pieces")
        return model


def _control(model: Any, name: str, words: str, path: str) -> int:
    number = int(getattr(model, name)())
    if number < 0:
        raise ValueError(f"--tokenizer-model {path}: the model has no {words}")
    return number


def _encode(model: Any, texts: Sequence[str]) -> list[list[int]]:
    if not texts:
        return []
    # One thread: whoever encodes much has a process per core.
    encoded: list[list[int]] = model.encode(list(texts), out_type=int, num_threads=1)
    return encoded
