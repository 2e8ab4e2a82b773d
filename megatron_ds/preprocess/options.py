"""Options of preprocessing, and the checks that need no reading of the inputs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megatron_ds.config.problems import Problem, option
from megatron_ds.preprocess.inputs import InputSpec
from megatron_ds.preprocess.output_files import OutputPaths
from megatron_ds.preprocess.parsing import TextFields
from megatron_ds.preprocess.sentence_splitter import Splitter


@dataclass(frozen=True)
class PreprocessOptions:
    """What to read, what to write and how.

    Attributes:
        inputs: Documents to read.
        output_prefix: Start of all output paths.
        keys: Names of the texts. Each gets a pair `<output_prefix>_<key>_document.bin/.idx`, or
            `_sentence` with a splitter. `a.b` is the field b of a, unless a field has that name.
        append_eod: Whether every document ends with the end-of-document token.
        strict: Whether a line that holds no document is an error instead of being rejected.
        workers: Encoding processes.
        chunk_size: Documents that a worker gets at once.
        splitter: Splits texts into sentences, each of which becomes a sequence.
        resume: Whether to continue an interrupted run of the same output prefix.
    """

    inputs: InputSpec
    output_prefix: str
    keys: tuple[str, ...] = ("text",)
    append_eod: bool = False
    strict: bool = False
    workers: int = 1
    chunk_size: int = 512
    splitter: Splitter | None = None
    resume: bool = False

    @property
    def paths(self) -> OutputPaths:
        level = "document" if self.splitter is None else "sentence"
        return OutputPaths(self.output_prefix, self.keys, level)

    def prefix(self, key: str) -> str:
        """The pair of a key, without .bin and .idx."""
        return self.paths.pair(key)

    @property
    def quarantine(self) -> str:
        """The list of rejected documents, a JSON object per line."""
        return self.paths.quarantine

    @property
    def text_fields(self) -> TextFields:
        return TextFields(self.keys, self.inputs.max_document_bytes)

    def resume_settings(self, tokenizer_metadata: bytes) -> dict[str, Any]:
        """All that determines the output, which a resumed run must share.

        Args:
            tokenizer_metadata: Description of the tokenizer and the sentence splitter.
        """
        inputs = {name: value for name, value in vars(self.inputs).items() if name != "paths"}
        return {
            "json_keys": self.keys,
            "append_eod": self.append_eod,
            **inputs,
            **self.inputs.describe_files(),
            "tokenizer and sentence splitter": tokenizer_metadata.decode(),
        }

    def problems(self) -> Iterator[Problem]:
        """Problems that can be found before any work is done."""
        yield from self.inputs.problems()
        folder = os.path.dirname(self.output_prefix) or "."
        if not os.path.isdir(folder):
            yield self._output_problem(f"there is no folder {folder}")
        elif not os.access(folder, os.W_OK | os.X_OK):
            yield self._output_problem(f"the folder {folder} is not writable")
        if not self.keys:
            yield Problem(
                "no-keys", f"{option('json_keys')}: at least one key is required", "json_keys"
            )
        for key in self.keys:
            if "/" in key or "\0" in key:
                yield Problem(
                    "key-not-a-file-name",
                    f"{option('json_keys')} {key!r}: cannot be part of the output files' names",
                    "json_keys",
                )
        if len(set(self.keys)) != len(self.keys):
            yield Problem(
                "key-twice",
                f"{option('json_keys')} {' '.join(self.keys)}: a key is repeated",
                "json_keys",
            )
        for name, value in (("workers", self.workers), ("chunk_size", self.chunk_size)):
            if value < 1:
                yield Problem(
                    "preprocess-option-below-1", f"{option(name)} {value}: must be at least 1", name
                )
        if self.resume:
            for path in self.inputs.unseekable_paths():
                yield cannot_resume(path)

    def _output_problem(self, reason: str) -> Problem:
        return Problem(
            "output-folder-unusable",
            f"{option('output_prefix')} {self.output_prefix}: {reason}",
            "output_prefix",
        )


def cannot_resume(path: str) -> Problem:
    """A resumed run whose input can be read only once."""
    return Problem(
        "resume-of-unseekable-input",
        f"{option('resume')}: {option('paths')} {path} can be read only once, and the interrupted "
        f"run read part of it; start over without {option('resume')}",
        "resume",
        "paths",
    )
