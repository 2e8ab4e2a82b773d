"""Steps of a run, and the samples that each of them and each rank reads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron_ds.config import Config
from megatron_ds.config.problems import user_error
from megatron_ds.data.token_dataset import Piece, TokenDataset
from megatron_ds.data.validation import DataFiles
from megatron_ds.schedules import ConstantSegment
from megatron_ds.tokenizer import Tokenizer


@dataclass(frozen=True)
class Steps:
    """Consecutive steps of a run with the same data, batch size and layout."""

    first: int
    count: int
    first_sample: int
    segment: ConstantSegment
    config: Config
    """Settings of the phase."""
    phase: str
    """Name of the phase (a stage of --stages); empty if the run has none."""
    ranks: int
    """Number of processes."""
    dataset: TokenDataset
    files: DataFiles
    tokenizer: Tokenizer

    def samples(self, step: int) -> range:
        """Positions of the samples of a step in the data order."""
        size = self.segment.batch_size
        first = self.first_sample + (step - self.first) * size
        return range(first, first + size)

    def step_of(self, position: int) -> int | None:
        """The step that reads a sample; None if the sample is in another segment."""
        index = (position - self.first_sample) // self.segment.batch_size
        return self.first + index if 0 <= index < self.count else None

    def pieces(self, position: int) -> Iterator[Piece]:
        """Where the tokens of a sample come from, less those that a curriculum leaves out."""
        end = self.segment.seq_length + 1
        for piece in self.dataset.pieces(position):
            if (part := piece.cut(0, end)).size > 0:
                yield part
            end -= piece.size

    @property
    def dp_size(self) -> int:
        return self.config.parallel.data_parallel_size(self.ranks)

    def dp_rank(self, position: int) -> int:
        """The data-parallel rank that reads a sample."""
        micro_batch = (position - self.first_sample) // self.config.schedule.micro_batch_size
        return micro_batch % self.dp_size

    def dp_rank_of(self, rank: int) -> int:
        """The data-parallel rank of a rank."""
        from megatron_ds.parallel.mesh import axis_groups  # imports torch

        if rank >= self.ranks:
            raise user_error("rank-beyond-run", "rank", rank=rank, last=self.ranks - 1)
        groups = axis_groups(self.ranks, **self.config.axis_sizes)["dp"]
        return next(group.index(rank) for group in groups if rank in group)
