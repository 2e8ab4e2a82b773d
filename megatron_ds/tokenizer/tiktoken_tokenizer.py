"""Byte-level BPE on the `tiktoken` library, from a file of tokens and their ranks."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_ds.config.checks import import_library
from megatron_ds.config.options.tokenizer import REQUIRED_SPECIAL_TOKENS
from megatron_ds.config.problems import Problem, option, user_error, warn_of
from megatron_ds.tokenizer.base import Tokenizer, library_errors, read_bytes
from megatron_ds.tokenizer.export.library import ExportedTokenizer, special_tokens

DEFAULT_VOCAB_SIZE = 1 << 17
"""Default vocabulary size of Megatron-LM; the vocabulary is smaller if the file has fewer
tokens."""
BYTE_TOKENS = 256
"""Tokens at the start of every file."""
PATTERNS = {
    "v1": r"[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    "v2": r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}
"""Megatron-LM's two patterns that split text into words, within which tokens are merged."""


class TikTokenizer(Tokenizer):
    """Special tokens <unk>, <s>, </s>, ..., <SPECIAL_n>, followed by the tokens of a file.

    </s> ends documents. The text of a special token inside a document is encoded as ordinary text.
    """

    def __init__(
        self,
        path: str,
        *,
        pattern: str,
        num_special: int,
        special: Sequence[str] | None,
        vocab_size: int | None,
    ) -> None:
        """
        Args:
            path: A JSON list of {"rank", "token_bytes" (base64), "token_str"} (Megatron-LM), lines
                of base64 and rank (tiktoken), or Mistral's tekken.json, an object with such a list
                and the settings, which must agree with the ones given here.
            pattern: Key of `PATTERNS`.
            num_special: Number of special tokens, which have the first ids.
            special: Names of the first special tokens (default: <unk>, <s>, </s>).
            vocab_size: Number of ids, special tokens included, to which the file is truncated
                (default: 131072, or as many as there are).

        Raises:
            UserError: If the file is damaged or has fewer tokens.
        """
        tiktoken = import_library("tiktoken", f"{option('tokenizer_type')} TikTokenizer")
        tokens, tekken = _read_tokens(path)
        complete_size = num_special + len(tokens)
        default_size = min(DEFAULT_VOCAB_SIZE, complete_size)
        if tekken is not None:
            special = tekken.check(path, pattern, num_special, special)
            default_size = tekken.vocab_size
        vocab_size = default_size if vocab_size is None else vocab_size
        lowest = num_special + BYTE_TOKENS
        if not lowest <= vocab_size <= complete_size:
            raise user_error(
                "vocab-size-not-available",
                path=path,
                size=vocab_size,
                lowest=lowest,
                highest=complete_size,
                tokens=len(tokens),
                special=num_special,
            )
        names = _special_names(REQUIRED_SPECIAL_TOKENS if special is None else special, num_special)
        used_tokens = tokens[: vocab_size - num_special]
        ranks = {token: rank for rank, token in enumerate(used_tokens, num_special)}
        self.vocab_size = vocab_size
        self._num_special = num_special
        self._names = names
        self._pattern = PATTERNS[pattern]
        self.eod = names.index("</s>")
        settings = _settings(pattern, num_special, None if tekken is not None else special)
        self.fingerprint = self._fingerprint_of("TikTokenizer", [path], settings)
        with library_errors("tiktoken-file-unusable", path=path):
            self._model = tiktoken.Encoding(
                "megatron_ds",
                pat_str=PATTERNS[pattern],
                mergeable_ranks=ranks,
                special_tokens={token: index for index, token in enumerate(names)},
            )

    def exported(self) -> ExportedTokenizer:
        from megatron_ds.tokenizer.export.tiktoken_ranks import byte_text, library_of

        ids = range(self._num_special, self.vocab_size)
        ranks = {self._model.decode_single_token_bytes(index): index for index in ids}
        # A token with the text of a special one must have another name.
        taken = set(map(byte_text, ranks))
        special = [name if name not in taken else f"<|{name}|>" for name in self._names]
        library = library_of(special, ranks, self._pattern)
        library.add_special_tokens(special_tokens(special))
        roles = {"unk_token": "<unk>", "eos_token": "</s>", "pad_token": "<pad>"}
        names = {
            role: special[self._names.index(name)]
            for role, name in roles.items()
            if name in self._names
        }
        return ExportedTokenizer(library, names, keeps_special_text=True)

    def encode(self, text: str) -> list[int]:
        # On some 100,000 spaces, the library's regular expressions exhaust their stack and panic.
        with library_errors("text-not-encodable"):
            ids: list[int] = self._model.encode_ordinary(text)
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._model.decode(list(ids)))

    def token_id(self, token: str) -> int | None:
        try:
            return int(self._model.encode_single_token(token))
        except KeyError:
            return None

    def token_bytes(self) -> list[int]:
        ids = range(self._num_special, self.vocab_size)
        texts = map(self._model.decode_single_token_bytes, ids)
        return [0] * self._num_special + [len(text) for text in texts]


@dataclass(frozen=True)
class _Tekken:
    """Settings of a tekken.json."""

    pattern: str
    num_special: int
    vocab_size: int
    special: list[str]
    """Names of the first special tokens."""

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> _Tekken:
        config = values["config"]
        # Older files do not list them.
        listed = values.get("special_tokens")
        tokens = REQUIRED_SPECIAL_TOKENS if listed is None else _names_by_rank(listed)
        return cls(
            str(config["pattern"]),
            int(config["default_num_special_tokens"]),
            int(config["default_vocab_size"]),
            [*tokens],
        )

    def check(
        self, path: str, pattern: str, num_special: int, special: Sequence[str] | None
    ) -> list[str]:
        """Names of the special tokens.

        Raises:
            UserError: If an option has another value than the file.
        """
        names = [name for name, text in PATTERNS.items() if text == self.pattern]
        if not names:
            raise user_error("tekken-pattern-unknown", path=path, pattern=self.pattern)
        values: dict[str, tuple[object, object]] = {
            "tiktoken_pattern": (pattern, names[0]),
            "tiktoken_num_special_tokens": (num_special, self.num_special),
        }
        if special is not None:
            values["tiktoken_special_tokens"] = [*special], self.special
        for field, (value, stored) in values.items():
            if value != stored:
                raise user_error(
                    "tekken-option-differs", field, path=path, value=value, stored=stored
                )
        return self.special


def _settings(
    pattern: str, num_special: int, special: Sequence[str] | None
) -> dict[str, str | int]:
    """The flags that change what a file means, for the fingerprint."""
    settings: dict[str, str | int] = {"--tiktoken-pattern": pattern}
    settings["--tiktoken-num-special-tokens"] = num_special
    if special is not None:
        settings["--tiktoken-special-tokens"] = " ".join(special)
    return settings


def _special_names(first: Sequence[str], size: int) -> list[str]:
    return [*first, *(f"<SPECIAL_{index}>" for index in range(len(first), size))]


def _names_by_rank(tokens: Sequence[Mapping[str, Any]]) -> list[str]:
    ranked = sorted(tokens, key=lambda token: int(token["rank"]))
    if [token["rank"] for token in ranked] != [*range(len(ranked))]:
        raise ValueError("the ranks of special_tokens are not 0, 1, 2, ...")
    return [str(token["token_str"]) for token in ranked]


def _read_tokens(path: str) -> tuple[list[bytes], _Tekken | None]:
    """Tokens of a file in order of rank, and the settings of a tekken.json."""
    tekken = None
    file = f"{option('tokenizer_model')} {path}"
    content = read_bytes(path, "tokenizer_model")
    try:
        if content.lstrip()[:1] == b"[":
            pairs = [(item["token_bytes"], item["rank"]) for item in json.loads(content)]
        elif content.lstrip()[:1] == b"{":
            values = json.loads(content)
            tekken = _Tekken.of(values)
            pairs = [(item["token_bytes"], item["rank"]) for item in values["vocab"]]
        else:
            warn_of(Problem("tiktoken-ids-differ", file=file))
            rows = [line.split() for line in content.splitlines() if line.strip()]
            pairs = [(token, int(rank)) for token, rank in rows]
        ranks = {base64.b64decode(token, validate=True): rank for token, rank in pairs}
    except (ValueError, TypeError, KeyError, RecursionError, binascii.Error) as error:
        raise user_error(
            "tiktoken-file-invalid", file=file, kind=type(error).__name__, error=error
        ) from None
    is_integer = all(type(rank) is int for rank in ranks.values())
    size = len(pairs)
    if not is_integer or set(ranks.values()) != set(range(size)):
        raise user_error("token-ranks-not-contiguous", file=file, size=size, largest=size - 1)
    tokens = sorted(ranks, key=ranks.__getitem__)
    if {bytes([byte]) for byte in range(BYTE_TOKENS)} - set(tokens[:BYTE_TOKENS]):
        raise user_error("tiktoken-byte-tokens-missing", file=file)
    return tokens, tekken
