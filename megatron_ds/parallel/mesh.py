"""Which process does what: rank arithmetic on a reshaped `arange`, and the process groups.

Owns the order of the ranks (pipeline, data, tensor; tensor fastest) and the `mpu` that DeepSpeed
asks for. Knows nothing of layers or engines. All groups are made here, once, in the same order on
every rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Group:
    """A set of processes that talk to each other, seen from this one."""

    ranks: tuple[int, ...]
    """Global ranks, in the group's order."""
    rank: int
    """This process's position in `ranks`."""
    handle: dist.ProcessGroup | None
    """None only where no process group exists (`Mesh.single`); never used when `size` is 1."""

    @property
    def size(self) -> int:
        return len(self.ranks)


class Mpu:
    """The model-parallel unit: what DeepSpeed asks about the mesh, under the names it asks for.

    It must never offer `initialize_sequence_parallel`: DeepSpeed takes an object that does for its
    own Ulysses state.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh

    def get_data_parallel_rank(self) -> int:
        return self._mesh.dp.rank

    def get_data_parallel_world_size(self) -> int:
        return self._mesh.dp.size

    def get_data_parallel_group(self) -> dist.ProcessGroup | None:
        return self._mesh.dp.handle

    def get_data_parallel_group_ranks(self) -> list[int]:
        return list(self._mesh.dp.ranks)

    def get_model_parallel_rank(self) -> int:
        return self._mesh.model.rank

    def get_model_parallel_world_size(self) -> int:
        return self._mesh.model.size

    def get_model_parallel_group(self) -> dist.ProcessGroup | None:
        return self._mesh.model.handle

    def get_tensor_model_parallel_rank(self) -> int:
        return self._mesh.tp.rank

    def get_tensor_model_parallel_world_size(self) -> int:
        return self._mesh.tp.size

    def get_tensor_model_parallel_group(self) -> dist.ProcessGroup | None:
        return self._mesh.tp.handle

    def get_pipeline_model_parallel_rank(self) -> int:
        return self._mesh.pp.rank

    def get_pipeline_model_parallel_world_size(self) -> int:
        return self._mesh.pp.size

    def get_pipeline_model_parallel_group(self) -> dist.ProcessGroup | None:
        return self._mesh.pp.handle


@dataclass(frozen=True)
class Mesh:
    """This process's place among all, and its groups along each axis."""

    world_size: int
    rank: int
    tp: Group
    dp: Group
    pp: Group
    model: Group
    """All tensor x pipeline ranks that together hold one copy of the model."""

    @classmethod
    def build(cls, tp_size: int, pp_size: int = 1, timeout: timedelta | None = None) -> Mesh:
        """The mesh of an initialised torch.distributed; every process must call it.

        timeout: how long a collective of these groups may wait (None: torch's default for the
        backend). Raises ValueError if tp_size x pp_size does not divide the number of processes.
        """
        world_size, rank = dist.get_world_size(), dist.get_rank()
        if tp_size < 1 or pp_size < 1 or world_size % (tp_size * pp_size):
            raise ValueError(
                f"{world_size} processes cannot be cut into tensor-parallel size {tp_size} "
                f"x pipeline-parallel size {pp_size}"
            )
        grid = torch.arange(world_size).view(pp_size, -1, tp_size)
        axes = {
            "tp": grid,
            "dp": grid.transpose(1, 2),
            "pp": grid.permute(1, 2, 0),
            "model": grid.transpose(0, 1).flatten(1),
        }
        groups = {
            name: _my_group(axis.reshape(-1, axis.shape[-1]), rank, timeout)
            for name, axis in axes.items()
        }
        return cls(world_size=world_size, rank=rank, **groups)

    @classmethod
    def single(cls) -> Mesh:
        """The mesh of one process; needs no process group."""
        alone = Group(ranks=(0,), rank=0, handle=None)
        return cls(world_size=1, rank=0, tp=alone, dp=alone, pp=alone, model=alone)

    def mpu(self) -> Mpu:
        return Mpu(self)


def _my_group(rows: torch.Tensor, rank: int, timeout: timedelta | None) -> Group:
    """Create one process group per row of ranks and return the one that holds `rank`."""
    mine: Group | None = None
    for row in rows.tolist():
        handle = dist.new_group(row, timeout=timeout)
        if rank in row:
            mine = Group(ranks=tuple(row), rank=row.index(rank), handle=handle)
    assert mine is not None
    return mine
