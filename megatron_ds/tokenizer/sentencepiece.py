"""SentencePiece models: Megatron's three kinds, which add different tokens."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron_ds.config.problems import Problem, option, user_error
from megatron_ds.tokenizer.base import import_library, library_errors
from megatron_ds.tokenizer.fingerprint import TokenizerFingerprint, hash_files

ADDED_TOKENS = ("<CLS>", "<SEP>", "<EOD>", "<MASK>")


class SentencePieceTokenizer:
    """GPTSentencePieceTokenizer and Llama2Tokenizer: the model's ids; </s> ends documents.

    Llama2Tokenizer starts every text with <s>, as in Megatron, where each document is one text;
    GPTSentencePieceTokenizer adds nothing. `decode` omits <s> and </s>.
    """

    def __init__(self, model_file: str, *, kind: str) -> None:
        """
        Raises:
            UserError: If the file is not a SentencePiece model with these tokens.
        """
        self._model = _load(model_file)
        self.eod = _control_id(self._model, "eos_id", model_file)
        self._prefix = []
        if kind == "Llama2Tokenizer":
            self._prefix = [_control_id(self._model, "bos_id", model_file)]
        self.vocab_size = int(self._model.get_piece_size())
        self.fingerprint = TokenizerFingerprint(
            kind, hash_files([model_file]), self.vocab_size, self.eod
        )

    def encode(self, text: str) -> list[int]:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [[*self._prefix, *ids] for ids in _encode(self._model, texts)]

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._model.decode(list(ids)))


class SentencePieceWithSpecialTokens:
    """SentencePieceTokenizer: the model's ids, followed by the special tokens that it lacks.

    These are <CLS>, <SEP>, <EOD>, <MASK>, padding, begin, end, and `extra_ids` sentinels; <EOD>
    ends documents. As in Megatron, the text of such a token inside a document becomes that token,
    and `decode` surrounds it with spaces.
    """

    def __init__(self, model_file: str, *, extra_ids: int = 0) -> None:
        """
        Args:
            model_file: SentencePiece model.
            extra_ids: Number of sentinels <extra_id_0>, ...

        Raises:
            UserError: If the file is not a SentencePiece model.
        """
        self._model = _load(model_file)
        size = int(self._model.get_piece_size())
        ids = {self._model.id_to_piece(number): number for number in range(size)}
        controls = {
            name: self._model.id_to_piece(number) if number >= 0 else default
            for name, number, default in (
                ("pad", self._model.pad_id(), "<PAD>"),
                ("bos", self._model.bos_id(), "<BOS>"),
                ("eos", self._model.eos_id(), "<EOS>"),
            )
        }
        sentinels = (f"<extra_id_{number}>" for number in range(extra_ids))
        self._special = {
            token: ids.setdefault(token, len(ids))
            for token in (*ADDED_TOKENS, *controls.values(), *sentinels)
        }
        self._special_texts = {number: token for token, number in self._special.items()}
        # Of several special tokens that match at a position, the first in this order is taken.
        self._pattern = re.compile("|".join(re.escape(token) for token in self._special))
        self.cls, self.sep, self.eod, self.mask = (self._special[token] for token in ADDED_TOKENS)
        self.pad, self.bos, self.eos = (self._special[token] for token in controls.values())
        self.vocab_size = len(ids)
        self.fingerprint = TokenizerFingerprint(
            "SentencePieceTokenizer",
            hash_files([model_file]),
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
        parts, plain = [], list[int]()
        for number in ids:
            if number in self._special_texts:
                parts.append(f"{self._model.decode(plain)} {self._special_texts[number]} ")
                plain = []
            else:
                plain.append(number)
        return "".join([*parts, self._model.decode(plain)])

    def _ids(self, text: str) -> Iterator[int]:
        end = 0
        for special in self._pattern.finditer(text):
            yield from _encode(self._model, [text[end : special.start()]])[0]
            yield self._special[special.group()]
            end = special.end()
        yield from _encode(self._model, [text[end:]])[0]


def _load(path: str) -> Any:
    sentencepiece = import_library("sentencepiece", f"{option('tokenizer_model')} {path}")
    with library_errors(lambda why: Problem("sentencepiece-model-invalid", path=path, why=why)):
        content = Path(path).read_bytes()
        # The library loads an empty file without an error and fails only when it encodes.
        if not content:
            raise ValueError("the file is empty")
        model = sentencepiece.SentencePieceProcessor(model_proto=content)
        if model.get_piece_size() < 1:
            raise ValueError("it has no pieces")
        return model


def _control_id(model: Any, name: str, path: str) -> int:
    number = int(getattr(model, name)())
    if number < 0:
        raise user_error("sentencepiece-control-token-missing", path=path, name=name)
    return number


def _encode(model: Any, texts: Sequence[str]) -> list[list[int]]:
    if not texts:
        return []
    # One thread: preprocessing already runs one process per core.
    encoded: list[list[int]] = model.encode(list(texts), out_type=int, num_threads=1)
    return encoded
