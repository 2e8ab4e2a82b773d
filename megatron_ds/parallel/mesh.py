"""Rank arithmetic and process groups.

Owns the order of the ranks along the parallel axes and the `mpu` that DeepSpeed expects. Knows
nothing of layers or engines. Every process creates the groups that it belongs to, one per axis and
in the same order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist

from megatron_ds.config.options.parallel import ALL_TO_ALL, HIERARCHICAL
from megatron_ds.config.parallel_axes import AXES
from megatron_ds.config.problems import user_error
from megatron_ds.parallel import host_sums
from megatron_ds.parallel.host_sums import HostSum

GLOO = "gloo"
Ranks = tuple[int, ...]
"""Global ranks of a group, in the group's order."""
URGENT = ("tp", "cp", "ulysses", "sequence", "heads", "chunks", "pp")
"""Axes whose communication the layers of a pass wait for."""
GRID = ("pp", "edp", "ep", "chunks", "inner", "ulysses", "tp")
"""Dimensions along which ranks are numbered: as `RANK_ORDER`, with the context-parallel ones in
groups ("chunks") of `cp_inner_size` ranks ("inner")."""
SEQUENCE = GRID[3:6]
SPANS: dict[str, tuple[str, ...]] = {
    "tp": ("tp",),
    "sequence": SEQUENCE,
    "ep": ("ep",),
    "cp": SEQUENCE[:2],
    "ulysses": SEQUENCE[2:],
    "heads": SEQUENCE[1:],
    "chunks": SEQUENCE[:1],
    "expert_dp": ("edp", *SEQUENCE),
    "dp": ("edp", "ep"),
    "pp": ("pp",),
    "model": ("pp", "tp"),
    "same_batch": (*SEQUENCE, "tp"),
    "replicas": ("edp", "ep", *SEQUENCE),
    "ep_tp": ("ep", "tp"),
}
"""Dimensions along which the ranks of each group differ."""
SHARING = ("cp", "ulysses", "sequence", "heads", "chunks")
"""Groups of `Mesh` whose ranks have slices of the same sequences."""


def axis_groups(
    world_size: int,
    tp_size: int,
    *,
    pp_size: int = 1,
    cp_size: int = 1,
    cp_inner_size: int = 1,
    ulysses_size: int = 1,
    ep_size: int = 1,
) -> dict[str, list[Ranks]]:
    """All groups of every parallel axis, by rank arithmetic alone.

    Ranks are ordered (pipeline, data, expert, context, Ulysses, tensor), tensor fastest, so that
    the groups that communicate most have neighbouring ranks. Expert parallelism adds no processes:
    it subdivides the data-parallel ranks (as in Megatron and DeepSpeed-MoE). The gradients of
    dense parameters are therefore averaged over data x expert x context x Ulysses (`replicas`), of
    experts over data x context x Ulysses (`expert_dp`).

    Args:
        world_size: Number of processes.
        tp_size: Tensor-parallel size.
        pp_size: Pipeline-parallel size.
        cp_size: Context-parallel size.
        cp_inner_size: Context-parallel ranks that share the heads in layers with a2a+p2p.
        ulysses_size: Sequence-parallel (Ulysses) size.
        ep_size: Expert-parallel size.

    Returns:
        Groups by axis: "tp", "cp", "ulysses", "ep", "expert_dp", "dp", "pp"; "sequence": the ranks
        that have slices of the same sequences; "heads": those of them that share the heads in
        layers with a2a+p2p, and "chunks": the ranks that exchange keys there; "model": the tensor x
        pipeline ranks that together hold one copy of the model; "ep_tp": the ranks that together
        hold all experts, if tensor-parallel ranks have different ones; "same_batch": those that
        process the same samples; "replicas": the ranks with the same parameters, over which
        gradients are averaged, and "expert_dp": those with the same experts; "embedding": the first
        and the last stage of a pipeline, which have a tied embedding, or the stages between them.

    Raises:
        UserError: If the product of the sizes does not divide `world_size`.
    """
    sizes = {"tensor": tp_size, "pipeline": pp_size, "context": cp_size, "sequence": ulysses_size}
    sizes["expert"] = ep_size
    if min(sizes.values()) < 1 or world_size % math.prod(sizes.values()):
        layout = " x ".join(f"{name}-parallel size {size}" for name, size in sizes.items())
        raise user_error(
            "world-size-not-divisible-by-parallel-sizes", world_size=world_size, layout=layout
        )
    cp_sizes = cp_size // cp_inner_size, cp_inner_size
    grid = torch.arange(world_size).view(pp_size, -1, ep_size, *cp_sizes, ulysses_size, tp_size)
    groups = {}
    for name, dimensions in SPANS.items():
        span = [GRID.index(dimension) for dimension in dimensions]
        others = [dim for dim in range(grid.dim()) if dim not in span]
        size = torch.Size([grid.shape[dim] for dim in span]).numel()
        groups[name] = [
            tuple(row) for row in grid.permute(*others, *span).reshape(-1, size).tolist()
        ]
    ends = [ranks[:1] + ranks[1:][-1:] for ranks in groups["pp"]]
    groups["embedding"] = [*ends, *(ranks[1:-1] for ranks in groups["pp"] if pp_size > 2)]
    return groups


@dataclass
class Group:
    """A set of communicating processes, seen from this one.

    Only `Mesh.complete_sequences` changes one.
    """

    ranks: Ranks
    rank: int
    """This process's position in `ranks`."""
    handle: dist.ProcessGroup | None
    """None only where no process group exists (`Mesh.single`). With None, torch.distributed would
    communicate over all processes, so collectives must not run where `size` is 1."""
    sequence_parallel: bool = False
    """Whether the activations between the layers that are sharded over this group are themselves
    sharded over it, along the sequence; see `parallel.sequence`. Never with size 1."""
    host_sum: HostSum | None = None
    """Sums tensors in memory that the ranks share. None: they are on several machines, or have
    their tensors on a device."""

    @property
    def size(self) -> int:
        return len(self.ranks)

    @contextmanager
    def _replaced(self, **values: Any) -> Iterator[None]:
        """Within it, everything that refers to this group sees other values."""
        before = {name: getattr(self, name) for name in values}
        vars(self).update(values)
        try:
            yield
        finally:
            vars(self).update(before)


class Mpu:
    """The model-parallel unit: the mesh under the method names that DeepSpeed calls.

    DeepSpeed's data-parallel ranks are the ranks of `Mesh.replicas`: with slices of sequences as
    with samples, ZeRO partitions states over them and averages their gradients. DeepSpeed's own
    sequence-parallel methods are left out, because its stages disagree on the gradients' factor.

    For each axis of DeepSpeed's it has get_AXIS_rank, get_AXIS_world_size, get_AXIS_group and
    get_AXIS_group_ranks, e.g. `get_data_parallel_rank`.

    It must never have a method `initialize_sequence_parallel`: DeepSpeed takes an object with that
    name for its own Ulysses state.
    """

    def __init__(self, mesh: Mesh) -> None:
        axes = {
            "data_parallel": mesh.replicas,
            "model_parallel": mesh.model,
            "tensor_model_parallel": mesh.tp,
            "pipeline_model_parallel": mesh.pp,
        }
        for axis, group in axes.items():
            setattr(self, f"get_{axis}_rank", partial(getattr, group, "rank"))
            setattr(self, f"get_{axis}_world_size", partial(getattr, group, "size"))
            setattr(self, f"get_{axis}_group", partial(getattr, group, "handle"))
            setattr(self, f"get_{axis}_group_ranks", partial(list, group.ranks))


@dataclass(frozen=True)
class Mesh:
    """This process's position among all processes, and its group along each axis.

    The groups come from `axis_groups`.
    """

    world_size: int
    rank: int
    tp: Group
    pp: Group
    dp: Group
    cp: Group
    ulysses: Group
    sequence: Group
    """The ranks that have slices of the same sequences."""
    heads: Group
    """Those of them that share the heads in layers that exchange slices for heads in groups."""
    chunks: Group
    """Ranks of different such groups, which exchange keys."""
    ep: Group
    expert_dp: Group
    replicas: Group
    same_batch: Group
    ep_tp: Group
    model: Group
    embedding: Group
    p2p: Group
    """Same ranks as `pp`, for sends between stages, which do not wait for collectives of other
    groups."""
    has_whole_experts: bool = False
    """Whether tensor-parallel ranks have different experts."""

    def sharing_attention(self, exchange: str) -> tuple[Group, Group]:
        """The ranks that share the heads in layers with a kind of exchange, and those that then
        have other chunks of the sequences.

        Args:
            exchange: A value of --cp-comm-type.
        """
        if exchange == ALL_TO_ALL:
            return self.sequence, Group((self.rank,), 0, None)
        if exchange == HIERARCHICAL:
            return self.heads, self.chunks
        return self.ulysses, self.cp

    @property
    def experts(self) -> Group:
        """The ranks that together hold all experts, each some of them or a part of some."""
        return self.ep_tp if self.has_whole_experts else self.ep

    @classmethod
    def build(
        cls,
        tp_size: int,
        *,
        pp_size: int = 1,
        cp_size: int = 1,
        cp_inner_size: int = 1,
        ulysses_size: int = 1,
        ep_size: int = 1,
        timeout: timedelta | None = None,
    ) -> Mesh:
        """Create the groups of an initialized torch.distributed. Collective.

        Args:
            tp_size: Tensor-parallel size.
            pp_size: Pipeline-parallel size.
            cp_size: Context-parallel size.
            cp_inner_size: As for `axis_groups`.
            ulysses_size: Sequence-parallel size.
            ep_size: Expert-parallel size.
            timeout: Timeout of the groups' collectives. None: torch's default for the backend.

        Raises:
            UserError: If the product of the sizes does not divide the number of processes.
        """
        world_size = dist.get_world_size()
        rank = dist.get_rank()
        axes = axis_groups(
            world_size,
            tp_size,
            pp_size=pp_size,
            cp_size=cp_size,
            cp_inner_size=cp_inner_size,
            ulysses_size=ulysses_size,
            ep_size=ep_size,
        )
        # Axes with the same ranks share their process groups: each costs connections and memory.
        create = cache(partial(_create_group, rank=rank, timeout=timeout))
        urgent = URGENT if dist.get_backend() == "nccl" else ()
        by_axis: dict[str, Any] = {
            name: create(tuple(groups), name in urgent and len(groups[0]) > 1)
            for name, groups in axes.items()
        }
        by_axis["tp"] = _with_host_sum(by_axis["tp"], timeout)
        p2p = by_axis["pp"]
        if pp_size > 1:
            p2p = _create_group(tuple(axes["pp"]), True, rank=rank, timeout=timeout)
        return cls(world_size=world_size, rank=rank, p2p=p2p, **by_axis)

    def axes(self) -> dict[str, Group]:
        """The group along each parallel axis by name, as in "tensor parallel".

        Their sizes without the last one's multiply to the number of processes: experts subdivide
        the data-parallel ranks.
        """
        return {axis.title: getattr(self, axis.name) for axis in AXES}

    def groups(self) -> dict[str, Group]:
        """All groups by name, the axes first."""
        return {name: value for name, value in vars(self).items() if isinstance(value, Group)}

    def describe(self, *, detailed: bool = False, exchange: str = "") -> str:
        """The sizes of the axes, such as "tensor parallel 2 x data parallel 4".

        Args:
            detailed: Whether to add further uses of the axes, such as sequence parallelism.
            exchange: Kind of exchange of context-parallel ranks, for the details.
        """
        details = {"sequence": " (Ulysses)", "context": f" ({exchange})"}
        if self.tp.sequence_parallel:
            details["tensor"] = " (with sequence parallelism)"
        if (size := self.experts.size) > 1:
            replicas = self.dp.size // self.ep.size
            details["data"] = f" (expert parallel {size} x expert data parallel {replicas})"
        return " x ".join(
            f"{name} parallel {group.size}{details.get(name, '') if detailed else ''}"
            for name, group in self.axes().items()
            if name in ("tensor", "data") or (name != "expert" and group.size > 1)
        )

    def of_model(self, sequence_parallel: bool, has_whole_experts: bool = False) -> Mesh:
        """This mesh for a model, whose groups that share sequences no other object refers to.

        Args:
            sequence_parallel: Sequence parallelism over the tensor-parallel group.
            has_whole_experts: Its ranks have different experts.
        """
        is_split = sequence_parallel and self.tp.size > 1
        tp = replace(self.tp, sequence_parallel=is_split)
        sharing = {name: replace(getattr(self, name)) for name in SHARING}
        return replace(self, tp=tp, has_whole_experts=has_whole_experts, **sharing)

    @contextmanager
    def complete_sequences(self) -> Iterator[None]:
        """Within it, each rank of a mesh `of_model` computes complete sequences."""
        alone = {"ranks": (self.rank,), "rank": 0, "handle": None}
        with ExitStack() as stack:
            stack.enter_context(self.tp._replaced(sequence_parallel=False))
            for name in SHARING:
                stack.enter_context(getattr(self, name)._replaced(**alone))
            yield

    @classmethod
    def single(cls) -> Mesh:
        """The mesh of one process, without process groups."""
        axes = axis_groups(world_size=1, tp_size=1)
        alone: dict[str, Any] = dict.fromkeys([*axes, "p2p"], Group((0,), 0, None))
        return cls(world_size=1, rank=0, **alone)


def groups_across_hosts(groups: Sequence[Ranks], hosts: Sequence[str]) -> list[Ranks]:
    """The groups whose ranks are not all on one host.

    Args:
        groups: Groups of an axis.
        hosts: Host of each rank.
    """
    return [ranks for ranks in groups if len({hosts[rank] for rank in ranks}) > 1]


def _with_host_sum(group: Group, timeout: timedelta | None) -> Group:
    """The group, with sums in shared memory if gloo communicates. Collective."""
    if group.size == 1 or dist.get_backend() != GLOO:
        return group

    def gather(value: Any) -> list[Any]:
        values = [value] * group.size
        dist.all_gather_object(values, value, group=group.handle)
        return values

    limit = dist.default_pg_timeout if timeout is None else timeout
    name = "_".join(map(str, group.ranks))
    host_sum = host_sums.connect(group.rank, group.size, gather, name, limit)
    return replace(group, host_sum=host_sum)


def _create_group(
    groups: tuple[Ranks, ...], is_urgent: bool, *, rank: int, timeout: timedelta | None
) -> Group:
    """Create the process group that contains `rank`. Collective.

    The groups are disjoint and contain all processes, so that each one creates exactly one group,
    without other processes: the time does not grow with the number of groups. This also holds where
    a communicator is split off the one of all processes (NCCL), to which each one contributes once.
    Urgent communication has a group of its own, even if it contains all processes. Its NCCL kernels
    have priority: otherwise a matmul that is launched after a collective, to overlap with it, may
    occupy the device first.
    """
    options = None
    if is_urgent and dist.get_backend() == "nccl":
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        options._timeout = timeout or options._timeout  # torch warns of two that differ
    ranks = next(ranks for ranks in groups if rank in ranks)
    if len(groups) == 1 and not is_urgent:
        handle = dist.group.WORLD
    else:
        handle = dist.new_group(
            list(ranks), timeout=timeout, pg_options=options, use_local_synchronization=True
        )
    return Group(ranks=ranks, rank=ranks.index(rank), handle=handle)
