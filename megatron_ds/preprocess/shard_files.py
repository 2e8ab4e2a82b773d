"""The files of the shards of an output, in the folder `OUTPUT.shards.work` next to it.

Owns which shards are complete, and the work folder in which they are merged. Processes that share
the folder need to know nothing else of each other. Knows no content.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from megatron_ds.config.problems import UserError, user_error
from megatron_ds.fileio.atomic import write_atomically
from megatron_ds.fileio.resumable import (
    COMPLETED_SUFFIX,
    RECORD,
    WORK_SUFFIX,
    Log,
    ResumableOutput,
    complete_progress,
)
from megatron_ds.preprocess.shards import Shard

T = TypeVar("T")
RunShards = Callable[[Sequence[Shard]], None]
"""Completes shards."""


def shard_folder(output: str) -> str:
    """The folder of the shards of an output."""
    return f"{output}.shards{WORK_SUFFIX}"


def shard_prefix(output: str, shard: Shard) -> str:
    """Path prefix of the files of a shard."""
    return os.path.join(shard_folder(output), f"{shard.index}-of-{shard.count}")


def settle_count(output: str, requested: int | None, default: int) -> int:
    """The number of shards of an output, which a repeated run keeps unless another one is given."""
    record = Path(shard_folder(output), "count")
    count = requested or (int(record.read_text()) if record.exists() else default)
    record.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(record, str(count).encode())
    return count


def remove_shards(output: str) -> None:
    """Remove the shards of a complete output."""
    shutil.rmtree(shard_folder(output), ignore_errors=True)


@dataclass(frozen=True)
class ShardFiles:
    """All shards of an output.

    Args:
        output: Path or prefix of the output.
        settings: All that determines the output.
        count: Number of shards.
    """

    output: str
    settings: Mapping[str, Any]
    count: int

    @property
    def shards(self) -> list[Shard]:
        """All shards, in order."""
        return [Shard(index, self.count) for index in range(self.count)]

    @property
    def is_merging(self) -> bool:
        """Whether there is the work of an interrupted merge."""
        return os.path.exists(os.path.join(self._merge + WORK_SUFFIX, RECORD))

    @property
    def _merge(self) -> str:
        return os.path.join(shard_folder(self.output), f"merge-of-{self.count}")

    def find(self, shard: Shard) -> dict[str, Any] | None:
        """The progress of a complete shard with these settings; None if it is missing or
        incomplete."""
        record = Path(shard_prefix(self.output, shard) + COMPLETED_SUFFIX)
        return complete_progress(record, {**self.settings, "shard": str(shard)})

    def progress(self, shard: Shard) -> dict[str, Any]:
        """The progress of a shard. Raises UserError: If it is not complete."""
        if (progress := self.find(shard)) is None:
            raise user_error("shards-missing", shards=shard, folder=shard_folder(self.output))
        return progress

    def missing(self) -> list[Shard]:
        """The shards that are not complete."""
        # Each record has all settings, so none is read before all are there.
        records = [shard_prefix(self.output, shard) + COMPLETED_SUFFIX for shard in self.shards]
        known = {os.path.join(shard_folder(self.output), name) for name in self._names()}
        missing = [one for one, path in zip(self.shards, records, strict=True) if path not in known]
        return missing or [shard for shard in self.shards if self.find(shard) is None]

    def _names(self) -> list[str]:
        try:
            return os.listdir(shard_folder(self.output))
        except FileNotFoundError:  # another process may have merged all
            return []

    def discard(self) -> None:
        """Make all shards missing."""
        for shard in self.shards:
            Path(shard_prefix(self.output, shard) + COMPLETED_SUFFIX).unlink(missing_ok=True)

    def run_missing(self, run_shards: RunShards) -> None:
        """Complete the missing shards. Raises UserError: If one is still missing."""
        if missing := self.missing():
            run_shards(missing)
            if missing := self.missing():
                shown = ", ".join(map(str, missing))
                raise user_error("shards-missing", shards=shown, folder=shard_folder(self.output))

    def merge_after(self, shard: Shard, merge: Callable[[RunShards], T], log: Log) -> T | None:
        """Merge all shards after this one, if it was the last and no other process merges them.

        Args:
            shard: The shard that this process has completed.
            merge: Merges all shards.
            log: Takes messages.

        Returns:
            The result of the merge; None if this process does not merge.
        """
        missing = self.missing()
        log(f"shard {shard} is complete; missing: {len(missing)} of {self.count}")
        if missing:
            return None
        try:
            return merge(lambda missing: None)
        except UserError as error:
            if error.problems[0].code not in ("output-in-use", "shards-missing"):
                raise
            log("another process merges the shards, or has merged them")
            return None

    def open_merge(self, names: Mapping[str, str], log: Log, **options: Any) -> ResumableOutput:
        """The work folder of the merge, which one process at a time can open.

        Args:
            names: Names of the growing files, with the suffixes of their final names.
            log: Takes warnings.
            options: Further arguments of `ResumableOutput`.
        """
        arguments = {"resume": True, "restart": True, **options}
        return ResumableOutput(self._merge, self.settings, names, warn=log, **arguments)
