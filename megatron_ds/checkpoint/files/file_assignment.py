"""Assignment of a checkpoint's files to ranks, by the names that DeepSpeed gives them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")

LOADED_BY = re.compile(r"(zero_pp_rank_(?P<dp>\d+)_)?mp_rank_(?P<model>\d+)_")
"""Ranks in the name of a file of DeepSpeed's, data-parallel and model-parallel."""


@dataclass(frozen=True)
class FileAssignment:
    """The ranks of a layout as readers of a checkpoint of the same layout."""

    tp_size: int
    dp_size: int
    world_size: int

    def by_rank(self, files: Mapping[str, T]) -> list[dict[str, T]]:
        """The files that each rank verifies: those that it loads, so that they are read once.

        The load then finds them in the host's cache. Files that no rank loads are distributed.
        """
        parts: list[dict[str, T]] = [{} for _ in range(self.world_size)]
        for index, name in enumerate(sorted(files)):
            match = LOADED_BY.search(name)
            reader = index if match is None else self._first_reader(match)
            parts[reader % self.world_size][name] = files[name]
        return parts

    def is_read_by(self, name: str, rank: int) -> bool:
        """Whether a rank may load a file.

        A file without a data-parallel rank in its name is loaded by all ranks with its part of the
        model, and one without any rank by all.
        """
        match = LOADED_BY.search(name)
        stages = self.world_size // (self.tp_size * self.dp_size)
        if match is None or stages * self.tp_size * self.dp_size != self.world_size:
            return True
        first = self._first_reader(match)
        if match["dp"] is not None:
            return first == rank
        part, remainder = divmod(rank, self.dp_size * self.tp_size)
        return (part, remainder % self.tp_size) == divmod(int(match["model"]), self.tp_size)

    def _first_reader(self, match: re.Match[str]) -> int:
        stage, tp_rank = divmod(int(match["model"]), self.tp_size)
        return (stage * self.dp_size + int(match["dp"] or 0)) * self.tp_size + tp_rank
