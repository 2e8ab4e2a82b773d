"""Options of tools/inspect_checkpoint.py."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from megatron_ds.config.fields import option_field
from megatron_ds.config.options.checkpoint import split_location
from megatron_ds.config.problems import Problem
from megatron_ds.conversion.foreign.recognition import location_problems


@dataclass(frozen=True)
class Options:
    """Shows what a checkpoint contains, verifies it, and compares it with another.

    The format is recognized, or given before the folder, as in hf:FOLDER. Of a --save folder, the
    checkpoint that a run would load is shown. Tensors are read one at a time. The exit status is 1
    if files are damaged or the checkpoints differ.
    """

    PROGRAM: ClassVar[str] = "inspect_checkpoint.py"
    FIELD_FLAGS: ClassVar[Mapping[str, str]] = {"load": "PATH"}

    path: str = option_field("", metavar="PATH", positional=True, required=True)
    """Folder of the checkpoint."""
    other: str | None = option_field(None, metavar="OTHER", positional=True)
    """Checkpoint to compare it with tensor by tensor, of any format and layout."""
    verify: bool = option_field(
        False,
    )
    """Read all files and compare them with their checksums; of a --save folder, those of all
    checkpoints, and check the pointers."""
    tensors: bool = option_field(False)
    """List every tensor, and not one row for all layers."""
    json: bool = option_field(False)
    """Print one JSON object."""

    def problems(self) -> Iterator[Problem]:
        for field, text in (("path", self.path), ("other", self.other)):
            if text:
                yield from folder_problems(field, text)


def folder_problems(field: str, text: str) -> Iterator[Problem]:
    """Problems of the location of a checkpoint that an option names."""
    if not (path := format_and_folder(text)[1]).exists():
        yield Problem("checkpoint-folder-missing", field, path=path)
    else:
        yield from (problem.about(load=field) for problem in location_problems(text))


def format_and_folder(text: str) -> tuple[str, Path]:
    """Format and folder of an argument."""
    name, folder = split_location(text)
    return name, Path(folder)
