"""Sequence parallelism (Korthikanti et al. 2022): S / TP of the activations between the layers.

Norms, dropout and residuals run on [S / TP, B, H]. The layers that are sharded over the group
gather their input along the sequence and reduce-scatter their output; both together send as many
bytes as one all-reduce. Owns the slice of each dropout mask; gradients of replicated parameters are
summed as declared.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from megatron_ds.parallel.mesh import Group


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
