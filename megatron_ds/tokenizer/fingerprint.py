"""Tokenizer fingerprint: what determines a tokenizer's ids, stored next to the data it encoded.

Owns the content and the display of that record. Must not know where it is stored, nor how a
tokenizer works.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from dataclasses import field
from operator import itemgetter
from pathlib import Path
from typing import Any

from megatron_ds.dataclass import dataclass

DISPLAYED_HASH_CHARS = 12
SPLIT = "-split"
"""End of the content of a tokenizer in which the text of a special token is ordinary text."""
GPT2 = "GPT2BPETokenizer"
"""A kind that is such a tokenizer without this end."""


@dataclass(frozen=True)
class TokenizerFingerprint:
    """The files and options that determine the ids of a tokenizer."""

    kind: str
    files: Mapping[str, str]
    """SHA-256 of each file by its name, in the order that the kind defines."""
    vocab_size: int
    eod: int
    """End-of-document id."""
    settings: Mapping[str, str | int] = field(default_factory=dict)
    """Options that change the ids, by flag."""
    content: str = ""
    """`hash_content` of the tokenizer; "" if unknown."""

    @property
    def digest(self) -> str:
        """Kind and hash; equal for tokenizers with the same ids. File names do not count."""
        values = [*self.files.values()], dict(self.settings), self.vocab_size, self.eod
        content = json.dumps(values, sort_keys=True).encode()
        return f"{self.kind}-{_sha256(content)[:32]}"

    def same_as(self, other: TokenizerFingerprint) -> bool:
        """Whether both tokenizers give the same ids, whatever they are called."""
        contents = self.content, other.content
        if GPT2 in (self.kind, other.kind):
            contents = self.content.removesuffix(SPLIT), other.content.removesuffix(SPLIT)
        has_same_ids = (self.vocab_size, self.eod) == (other.vocab_size, other.eod)
        is_equal = self.content != "" and contents[0] == contents[1] and has_same_ids
        return self.digest == other.digest or is_equal

    def __str__(self) -> str:
        files = [f"{name} {digest[:DISPLAYED_HASH_CHARS]}" for name, digest in self.files.items()]
        settings = [f"{name} {value}" for name, value in self.settings.items()]
        ids = [f"{self.vocab_size} ids", f"end of document {self.eod}"]
        return f"{self.kind} ({', '.join([*files, *settings, *ids])})"

    def to_json(self) -> bytes:
        return (json.dumps(dataclasses.asdict(self), indent=2, ensure_ascii=False) + "\n").encode()

    @staticmethod
    def from_json(content: bytes) -> TokenizerFingerprint:
        """Parses the output of `to_json`; ignores unknown keys.

        Raises:
            ValueError: For any other content.
        """
        try:
            return TokenizerFingerprint.from_dict(json.loads(content))
        except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
            raise _no_fingerprint(error) from None

    @staticmethod
    def from_dict(values: Any) -> TokenizerFingerprint:
        """The fingerprint of a JSON value; ignores unknown keys.

        Raises:
            ValueError: For any other value.
        """
        try:
            name = values["kind"]
            files = values["files"]
            settings = values["settings"]
            numbers = values["vocab_size"], values["eod"]
            content = values.get("content", "")  # added later
        except (TypeError, KeyError) as error:
            raise _no_fingerprint(error) from None
        is_valid = (
            isinstance(name, str)
            and isinstance(content, str)
            and isinstance(files, dict)
            and all(isinstance(digest, str) for digest in files.values())
            and isinstance(settings, dict)
            and all(type(value) is int for value in numbers)
        )
        if not is_valid:
            raise ValueError("no tokenizer fingerprint (a value has the wrong type)")
        return TokenizerFingerprint(name, files, *numbers, settings, content)


def _no_fingerprint(error: Exception) -> ValueError:
    return ValueError(f"no tokenizer fingerprint ({type(error).__name__}: {error})")


def hash_content(
    tokenizer_json: str,
    added: Mapping[str, int] | None = None,
    model: Mapping[str, Any] | None = None,
) -> str:
    """Hash of what determines the ids in a tokenizer.json, whatever library wrote it.

    These are vocabulary, merges, special tokens, normalizer and pre-tokenizer.

    Args:
        tokenizer_json: Content of the file.
        added: Ids of special tokens that it does not declare.
        model: Parts of its model that are at hand, and may be left out of it.
    """
    parsed = json.loads(tokenizer_json)
    normalizer = parsed["normalizer"]
    parts = parsed["model"] | (model or {})
    settings = {name: value for name, value in parts.items() if value not in (None, "", False)}
    pairs = parts.get("merges", ())  # strings in older versions
    settings["merges"] = [pair if isinstance(pair, str) else " ".join(pair) for pair in pairs]
    if isinstance(vocab := parts.get("vocab"), dict):  # sorting by id is faster than by token
        settings["vocab"] = sorted(vocab.items(), key=itemgetter(1))
    flags = ("single_word", "lstrip", "rstrip", *(("normalized",) if normalizer else ()))
    tokens = {
        token["content"]: [token["id"], *(name for name in flags if token[name])]
        for token in parsed["added_tokens"]
    }
    tokens |= {token: [token_id] for token, token_id in (added or {}).items()}
    values = [normalizer, parsed["pre_tokenizer"], settings, tokens]
    return _sha256(json.dumps(values, sort_keys=True).encode())


def hash_files(files: Iterable[str | Path]) -> dict[str, str]:
    """SHA-256 of each file, by file name."""
    return {Path(f).name: _sha256(Path(f).read_bytes()) for f in files}


def _sha256(content: bytes) -> str:
    import hashlib  # loads OpenSSL, which most programs do not need

    return hashlib.sha256(content).hexdigest()
