"""One rank of a world of any size, without the others: torch's fake process group.

Its collectives return at once and change nothing. What a rank would receive is filled with small
numbers, so that a step of training ends as usual; its losses and weights mean nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.zero import utils as zero_utils
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.communication import OPERATIONS
from megatron_ds.parallel.mesh import Mesh

RECEIVED = 0.01
"""Value of all numbers that a rank receives."""
AXES = (
    "tp",
    "cp",
    "ulysses",
    "sequence",
    "heads",
    "chunks",
    "ep",
    "pp",
    "dp",
    "replicas",
    "expert_dp",
    "model",
    "same_batch",
    "ep_tp",
    "embedding",
)
"""By the first of these a group is named."""


class Message(NamedTuple):
    """A message of a collective, or to another rank."""

    operation: str
    ranks: tuple[int, ...]
    """Of the group; of a message to another rank, the two ranks."""
    size: int
    """Bytes of all ranks together."""
    is_asynchronous: bool


@contextmanager
def fake_world(rank: int, size: int) -> Iterator[None]:
    """This process as a rank of a world."""
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    deepspeed.comm.comm.cdb = None
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)

    def gather(values: list[Any], value: Any, group: Any = None) -> None:
        values[:] = [value] * dist.get_world_size(group)

    with (
        mock.patch.object(dist, "all_gather_object", gather),
        mock.patch.object(zero_utils, "assert_lst_len_same_as_other_ranks"),
        mock.patch.object(zero_utils, "get_lst_from_rank0", lambda values: values),
    ):
        yield


class Messages(TorchDispatchMode):
    """Lists the messages of this rank, and fills what it receives.

    Args:
        hidden: Shape and type of the hidden states that a pipeline stage receives.
        negligible: Bytes of the largest messages that are left out: norms and flags.
    """

    def __init__(self, hidden: Tensor, negligible: int) -> None:
        super().__init__()
        self.sent: list[Message] = []
        self._negligible = negligible
        self._shape = [0, PipelineEngine.DTYPE_TO_ID[hidden.dtype], hidden.ndim, *hidden.shape]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        namespace, _, rest = str(func).partition(".")
        if namespace == "c10d":
            self._see(rest.partition(".")[0], func, args)
        return result

    def _see(self, name: str, func: Any, args: tuple[Any, ...]) -> None:
        schema = func._schema.arguments
        values = {each.name: each.default_value for each in schema if each.has_default_value()}
        values |= zip((each.name for each in schema), args, strict=False)
        groups = [value for value in args if isinstance(value, torch.ScriptObject)]
        received, *others = [tensors for value in args[:2] if (tensors := _tensors(value))]
        if name in OPERATIONS:
            group = dist.ProcessGroup.unbox(groups[0])
            ranks = tuple(dist.get_process_group_ranks(group))
            size = max(sum(tensor.nbytes for tensor in each) for each in (received, *others))
            if name == "send":
                ranks = dist.get_rank(), ranks[values["dst"]]
            is_asynchronous = bool(values.get("async_op", values.get("asyncOp", False)))
            if len(ranks) > 1 and size > self._negligible:
                self.sent.append(Message(OPERATIONS[name][0], ranks, size, is_asynchronous))
        with torch.no_grad():
            if name == "recv_" and received[0].dtype == torch.int32:  # the shape of what follows
                received[0][: len(self._shape)] = torch.tensor(self._shape, dtype=torch.int32)
            elif name == "alltoall_base_" and not received[0].is_floating_point():
                received[0].copy_(others[0][0])
            elif others or name == "recv_":
                for tensor in received:
                    tensor.fill_(RECEIVED)


def _tensors(value: Any) -> list[Tensor]:
    leaves = tree_leaves(value) if isinstance(value, Tensor | list | tuple) else []
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def axis_of(message: Message, mesh: Mesh) -> str:
    """The name of a message's group in a mesh, or of the receiver: the next or previous stage, or a
    context-parallel rank that is some places further."""
    ranks = message.ranks
    if message.operation == "send" and set(ranks) <= set(mesh.cp.ranks):
        here, there = (mesh.cp.ranks.index(rank) for rank in ranks)
        return f"cp +{(there - here) % mesh.cp.size}"
    if message.operation == "send":
        here, there = (mesh.pp.ranks.index(rank) for rank in ranks)
        return "next stage" if there == (here + 1) % mesh.pp.size else "previous stage"
    return next((name for name in AXES if getattr(mesh, name).ranks == ranks), "all")
