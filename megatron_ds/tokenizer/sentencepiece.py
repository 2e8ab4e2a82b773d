"""SentencePiece models: Megatron's three kinds, which add different tokens."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_ds.config.checks import import_library
from megatron_ds.config.problems import option, user_error
from megatron_ds.tokenizer.base import Tokenizer, library_errors
from megatron_ds.tokenizer.export import sentencepiece_model as export
from megatron_ds.tokenizer.export.library import ExportedTokenizer, special_tokens
from megatron_ds.tokenizer.token_bytes import piece_bytes

ADDED_TOKENS = ("<CLS>", "<SEP>", "<EOD>", "<MASK>")


class SentencePieceTokenizer(Tokenizer):
    """GPTSentencePieceTokenizer and Llama2Tokenizer: the model's ids; </s> ends documents.

    Llama2Tokenizer starts every text with <s>, as in Megatron, where each document is one text;
    GPTSentencePieceTokenizer adds nothing. `decode` omits <s> and </s>.
    """

    def __init__(self, model_file: str, *, name: str) -> None:
        """
        Raises:
            UserError: If the file is not a SentencePiece model with these tokens.
        """
        self._file = model_file
        self._model = _load(model_file)
        self.eod = _control_id(self._model, "eos_id", model_file)
        self._prefix = []
        if name == "Llama2Tokenizer":
            self.bos = _control_id(self._model, "bos_id", model_file)
            self._prefix = [self.bos]
        self.vocab_size = int(self._model.get_piece_size())
        self.fingerprint = self._fingerprint_of(name, [model_file])

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [[*self._prefix, *ids] for ids in _encode(self._model, texts)]

    def exported(self) -> ExportedTokenizer:
        proto = export.read_model(self._model.serialized_model_proto())
        library = export.library_of(proto, self._file, {})
        special = export.pieces_of(proto, (export.UNKNOWN, export.CONTROL))
        library.add_special_tokens(special_tokens(special))
        ids = {"eos_token": self.eod, "bos_token": self.bos, "unk_token": self._model.unk_id()}
        ids |= {"pad_token": self._model.pad_id()}
        return ExportedTokenizer(
            library,
            _names(self._model, ids),
            keeps_special_text=True,
            scores=_scores(library),
            sentencepiece=proto,
        )

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._model.decode(list(ids)))

    def token_id(self, token: str) -> int | None:
        return _token_id(self._model, token)

    def token_bytes(self) -> list[int]:
        return _token_bytes(self._model)


class SentencePieceWithSpecialTokens(Tokenizer):
    """SentencePieceTokenizer: the model's ids, followed by the special tokens that it lacks.

    These are <CLS>, <SEP>, <EOD>, <MASK>, padding, begin, end, and `extra_ids` sentinels; <EOD>
    ends documents. As in Megatron, the text of such a token inside a document becomes that token,
    and `decode` surrounds it with spaces.
    """

    def __init__(self, model_file: str, extra_ids: int = 0) -> None:
        """
        Args:
            model_file: SentencePiece model.
            extra_ids: Number of sentinels <extra_id_0>, ...

        Raises:
            UserError: If the file is not a SentencePiece model.
        """
        self._file = model_file
        model = _load(model_file)
        self._model = model
        pieces = [model.id_to_piece(index) for index in range(model.get_piece_size())]
        controls = {"<PAD>": model.pad_id(), "<BOS>": model.bos_id(), "<EOS>": model.eos_id()}
        special = [*ADDED_TOKENS]
        special += (pieces[index] if index >= 0 else name for name, index in controls.items())
        special += (f"<extra_id_{index}>" for index in range(extra_ids))
        ids = {piece: index for index, piece in enumerate(pieces)}
        self._special = {token: ids.setdefault(token, len(ids)) for token in special}
        self._special_texts = {index: token for token, index in self._special.items()}
        # If several special tokens match at a position, the first in this order is taken.
        self._pattern = re.compile(f"({'|'.join(map(re.escape, self._special))})")
        self.eod = self._special["<EOD>"]
        self.vocab_size = len(ids)
        settings = {"--vocab-extra-ids": extra_ids} if extra_ids else {}
        self.fingerprint = self._fingerprint_of("SentencePieceTokenizer", [model_file], settings)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        split = [self._pattern.split(text) for text in texts]
        plain = iter(_encode(self._model, [part for parts in split for part in parts[::2]]))
        return [
            list(
                itertools.chain.from_iterable(
                    [self._special[part]] if at % 2 else next(plain)
                    for at, part in enumerate(parts)
                )
            )
            for parts in split
        ]

    def exported(self) -> ExportedTokenizer:
        proto = export.read_model(self._model.serialized_model_proto())
        size = self._model.get_piece_size()
        added = {index: token for token, index in self._special.items() if index >= size}
        library = export.library_of(proto, self._file, added)
        library.add_special_tokens(special_tokens(self._special))
        pad = self._model.id_to_piece(pad) if (pad := self._model.pad_id()) >= 0 else "<PAD>"
        names = {"eos_token": "<EOD>", "pad_token": pad}
        names |= {"cls_token": "<CLS>", "sep_token": "<SEP>", "mask_token": "<MASK>"}
        return ExportedTokenizer(library, names, scores=_scores(library), sentencepiece=proto)

    def decode(self, ids: Sequence[int]) -> str:
        parts = []
        plain = list[int]()
        for index in ids:
            if index in self._special_texts:
                parts.append(f"{self._model.decode(plain)} {self._special_texts[index]} ")
                plain = []
            else:
                plain.append(index)
        return "".join([*parts, self._model.decode(plain)])

    def token_id(self, token: str) -> int | None:
        return self._special.get(token, _token_id(self._model, token))

    def token_bytes(self) -> list[int]:
        sizes = _token_bytes(self._model)
        sizes += [0] * (self.vocab_size - len(sizes))
        for index in self._special_texts:
            sizes[index] = 0
        return sizes


def _load(path: str) -> Any:
    sentencepiece = import_library("sentencepiece", f"{option('tokenizer_model')} {path}")
    with library_errors("sentencepiece-model-invalid", path=path):
        content = Path(path).read_bytes()
        # The library loads an empty file without an error and fails only when it encodes.
        if not content:
            raise ValueError("the file is empty")
        model = sentencepiece.SentencePieceProcessor(model_proto=content)
        if model.get_piece_size() < 1:
            raise ValueError("it has no pieces")
        return model


def _names(model: Any, ids: Mapping[str, int | None]) -> dict[str, str]:
    return {
        role: str(model.id_to_piece(index))
        for role, index in ids.items()
        if index is not None and index >= 0
    }


def _scores(library: Any) -> list[float]:
    """Scores of a Unigram model by id; none of another one."""
    model = json.loads(library.to_str())["model"]
    return [score for _, score in model["vocab"]] if model["type"] == "Unigram" else []


def _token_id(model: Any, token: str) -> int | None:
    index = int(model.piece_to_id(token))  # of the unknown token if it has none
    return index if model.id_to_piece(index) == token else None


def _token_bytes(model: Any) -> list[int]:
    return [
        0
        if model.is_control(index) or model.is_unknown(index)
        else piece_bytes(model.id_to_piece(index))
        for index in range(model.get_piece_size())
    ]


def _control_id(model: Any, name: str, path: str) -> int:
    index = int(getattr(model, name)())
    if index < 0:
        raise user_error("sentencepiece-control-token-missing", path=path, name=name)
    return index


def _encode(model: Any, texts: Sequence[str]) -> list[list[int]]:
    if not texts:
        return []
    # One thread: preprocessing already runs one process per core.
    encoded: list[list[int]] = model.encode(list(texts), out_type=int, num_threads=1)
    return encoded
