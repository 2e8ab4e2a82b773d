"""Sequence parallelism (Korthikanti et al. 2022): S / TP of the activations between the layers.

Norms, dropout and residuals run on [S / TP, B, H]. The layers that are sharded over the group
gather their input along the sequence and reduce-scatter their output; both together send as many
bytes as one all-reduce. Owns what the replicated parts need to compute what they do without it: the
sum of their gradients, and the slice of each dropout mask.
"""

from __future__ import annotations

from functools import partial
from typing import TypeVar

import torch.nn.functional as F
from torch import Tensor, nn

from megatron_ds.parallel.collectives import sum_over_group
from megatron_ds.parallel.mesh import Group

Module = TypeVar("Module", bound=nn.Module)


def sum_gradients(module: Module, group: Group) -> Module:
    """Sum the gradients of a replicated module over the full sequence.

    Each rank's are of its tokens only. They are summed as autograd computes them, before they are
    accumulated: an engine that reduces or partitions gradients sees them complete, at any stage of
    ZeRO.

    Args:
        module: A module whose gradients are all of this rank's tokens only.
        group: Tensor-parallel group.
    """
    if group.sequence_parallel:
        for parameter in module.parameters():
            # In a new tensor: a hook must not change its argument.
            parameter.register_hook(partial(sum_over_group, group=group))
    return module


def dropout(x: Tensor, probability: float, group: Group) -> Tensor:
    """Dropout on activations [S, B, H], or on this rank's [S / TP, B, H].

    A token's mask is the same as in a run without sequence parallelism: every rank draws the full
    mask from the replicated stream, which costs what it costs there, and keeps its slice.
    """
    if not group.sequence_parallel:
        return F.dropout(x, probability)
    full = x.new_ones((x.shape[0] * group.size, *x.shape[1:]))
    mask = F.dropout(full, probability).chunk(group.size)[group.rank]
    # A copy, because autograd would keep the full mask with a view of it.
    return x * mask.clone()
