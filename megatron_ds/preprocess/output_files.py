"""Output of a preprocessing run: a pair of token files per key, and the list of rejected documents.

All of it grows in the run's work folder (`fileio/resumable.py`) and appears under its names when it
is complete. Knows neither the origin of documents nor tokenizers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron_ds.data.indexed_dataset import TOKENIZER_SUFFIX
from megatron_ds.data.indexed_writer import TokenFileWriter, WriteCounts
from megatron_ds.fileio.resumable import ResumableOutput
from megatron_ds.preprocess.encoder import EncodedColumn
from megatron_ds.preprocess.inputs import PROGRESS_SUFFIX, QUARANTINE
from megatron_ds.preprocess.parsing import RejectedDocument

REJECTED = "rejected"
PAIR_SUFFIXES = (".bin", ".idx", ".documents")
"""Files that a `TokenFileWriter` needs; the last one is not published."""


@dataclass(frozen=True)
class OutputPaths:
    """Paths of the output.

    Attributes:
        prefix: Start of all paths.
        keys: Names of the texts, each with a pair of token files.
        level: "document" or "sentence": what a sequence is.
    """

    prefix: str
    keys: tuple[str, ...]
    level: str

    def pair(self, key: str) -> str:
        return f"{self.prefix}_{self.stem(key)}"

    def stem(self, key: str) -> str:
        """Name of a pair in the work folder."""
        return f"{key}_{self.level}"

    @property
    def quarantine(self) -> str:
        return self.prefix + QUARANTINE

    @property
    def progress(self) -> str:
        """Record of the completed run."""
        return self.prefix + PROGRESS_SUFFIX

    @property
    def work_files(self) -> dict[str, str]:
        """Names in the work folder, none of them compressed."""
        suffixes = (*PAIR_SUFFIXES, TOKENIZER_SUFFIX)
        names = [self.stem(key) + suffix for key in self.keys for suffix in suffixes]
        return dict.fromkeys([REJECTED, *names], "")


class TokenOutput:
    """Writes tokens and rejected documents to the work folder.

    Args:
        paths: Where the output will be published.
        dtype: Type of the tokens in the files.
        work: The work folder.
        written: By key, what the token files hold already.
    """

    def __init__(
        self,
        paths: OutputPaths,
        dtype: np.dtype[np.generic],
        work: ResumableOutput,
        written: Mapping[str, Sequence[int]],
    ) -> None:
        self._work = work
        self._writers: dict[str, TokenFileWriter] = {}
        for key in paths.keys:
            tokens, index, documents = (
                work.files[paths.stem(key) + suffix].raw for suffix in PAIR_SUFFIXES
            )
            counts = WriteCounts(*written.get(key, ()))
            files = (tokens, index, documents)
            self._writers[key] = TokenFileWriter(paths.pair(key), dtype, files, counts)
        self._paths = paths

    def add(self, columns: Sequence[EncodedColumn], rejected: Sequence[RejectedDocument]) -> None:
        """Append tokens, one column per key, and rejected documents."""
        for document in rejected:
            self._work.files[REJECTED].write(document.to_json_line())
        for writer, column in zip(self._writers.values(), columns, strict=True):
            writer.add_documents(*column)

    @property
    def written(self) -> dict[str, Any]:
        """By key, what the token files hold."""
        return {key: writer.written for key, writer in self._writers.items()}

    def finish(self, tokenizer_metadata: bytes) -> None:
        """Complete the files.

        Args:
            tokenizer_metadata: Description of tokenizer and sentence splitter.
        """
        for key, writer in self._writers.items():
            writer.finish()
            self._work.files[self._paths.stem(key) + TOKENIZER_SUFFIX].write(tokenizer_metadata)


def publish(paths: OutputPaths, work: ResumableOutput) -> None:
    """Give the files of a finished run their final names."""
    finals: dict[str, str] = {}
    stale: dict[str, list[str]] = {}
    if work.files[REJECTED].committed:
        finals[REJECTED] = paths.quarantine
    else:
        Path(paths.quarantine).unlink(missing_ok=True)  # of an earlier run
    for key in paths.keys:
        stem, pair = paths.stem(key), paths.pair(key)
        # A description of older tokens must never exist next to the new ones.
        stale[stem + ".bin"] = [pair + ".idx", pair + TOKENIZER_SUFFIX]
        # The index last: without it, readers do not take the pair for complete.
        for suffix in (".bin", TOKENIZER_SUFFIX, ".idx"):
            finals[stem + suffix] = pair + suffix
    work.publish(finals, stale)
