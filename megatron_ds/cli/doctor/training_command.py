"""A training command as it was read, of a script or of a configuration file. Knows no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from megatron_ds.cli.doctor.shell import Reading


@dataclass
class TrainingCommand:
    """A command that trains.

    Attributes:
        place: File and line, or what else it is from.
        launcher: What starts the program, as it is written.
        flags: Arguments of pretrain_gpt.py.
        world_size: Number of processes; None if the command leaves it open.
        reading: The script around it.
        source: Where the names of a configuration file are from.
        model: Folder with the config.json of a Hugging Face model.
        unread: Keys of a configuration file that were not read.
        differences: What always differs from the trainer of a configuration file.
        lacking: What has no counterpart, with what to do.
    """

    place: str
    launcher: list[str] = field(default_factory=list)
    flags: list[str] = field(default_factory=list)
    world_size: int | None = None
    reading: Reading = field(default_factory=Reading)
    source: str = ""
    model: Path | None = None
    unread: list[str] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)
    lacking: list[str] = field(default_factory=list)
