"""Locations of a run's checkpoints: local folders, and the URLs that they stage."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megatron_ds.config import CheckpointConfig
from megatron_ds.config.options.checkpoint import split_location


@dataclass(frozen=True)
class Location:
    """A place of checkpoints or weights, as text the one that the user knows."""

    folder: Path
    """A local folder: for a URL, the staging folder of this host."""
    url: str | None = None

    def __str__(self) -> str:
        return self.url or str(self.folder)


@dataclass(frozen=True)
class RunFolders:
    """The locations of --save and --load; None without the flag, or if it cannot be used."""

    save: Location | None = None
    load: Location | None = None

    @classmethod
    def local(cls, options: CheckpointConfig) -> RunFolders:
        """The locations of options without URLs."""
        return cls(*map(local_location, (options.save, options.load)))

    @property
    def local_save(self) -> Path | None:
        """The local folder of --save."""
        return None if self.save is None else self.save.folder


def local_location(value: str | None) -> Location | None:
    """The folder that a value of --save or --load names."""
    return None if value is None else Location(Path(split_location(value)[1]))
