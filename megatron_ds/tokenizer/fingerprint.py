"""What a tokenizer is, in a few figures that are kept beside the data that it made.

Owns the content of such a file and the words that show it. Must not know where it lies, nor how a
tokenizer works.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

SHOWN = 12
"""Characters of a hash in messages."""


@dataclass(frozen=True)
class TokenizerFingerprint:
    """The kind of a tokenizer, its files and settings, the number of its ids and the id that ends
    documents.

    files: SHA-256 of each by its name, in the order that the kind gives them. settings: flags that
    change the ids, by name.
    """

    kind: str
    files: Mapping[str, str]
    vocab_size: int
    eod: int
    settings: Mapping[str, str | int] = field(default_factory=dict)

    def same_as(self, other: TokenizerFingerprint) -> bool:
        """Whether both give the same ids; the names of the files do not matter."""
        return self._decisive() == other._decisive()

    def _decisive(self) -> tuple[object, ...]:
        hashes = tuple(self.files.values())
        return (self.kind, hashes, dict(self.settings), self.vocab_size, self.eod)

    def __str__(self) -> str:
        files = [f"{name} {digest[:SHOWN]}" for name, digest in self.files.items()]
        settings = [f"{name} {value}" for name, value in self.settings.items()]
        ids = [f"{self.vocab_size} ids", f"end of document {self.eod}"]
        return f"{self.kind} ({', '.join([*files, *settings, *ids])})"

    def to_json(self) -> bytes:
        return (json.dumps(dataclasses.asdict(self), indent=2, ensure_ascii=False) + "\n").encode()

    @staticmethod
    def from_json(content: bytes) -> TokenizerFingerprint:
        """Raises ValueError for anything but what `to_json` writes; further keys do no harm."""
        try:
            found = json.loads(content)
            kind, files, settings = found["kind"], found["files"], found["settings"]
            numbers = found["vocab_size"], found["eod"]
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise ValueError(f"no tokenizer's identity ({type(error).__name__}: {error})") from None
        right = (
            isinstance(kind, str)
            and isinstance(files, dict)
            and all(isinstance(digest, str) for digest in files.values())
            and isinstance(settings, dict)
            and all(type(number) is int for number in numbers)
        )
        if not right:
            raise ValueError("no tokenizer's identity: a value is of a wrong type")
        return TokenizerFingerprint(kind, files, *numbers, settings)


def hashes_of(files: Iterable[str | Path]) -> dict[str, str]:
    """SHA-256 of files by their names."""
    return {Path(f).name: hashlib.sha256(Path(f).read_bytes()).hexdigest() for f in files}
