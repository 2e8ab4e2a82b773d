"""Compares the weights that several ranks hold, by a hash of each parameter's bytes."""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Iterable, Mapping
from hashlib import blake2b
from itertools import chain

import torch
from torch import nn

from megatron_ds.engine.states.flats import replicas_of
from megatron_ds.parallel.collectives import gather_objects
from megatron_ds.parallel.mesh import Mesh
from megatron_ds.parallel.sharding import expert_group

Replicas = tuple[bool, int]
"""The ranks that hold the same parameters: whether they are experts, and the first of the ranks."""


def find_different_weights(
    parameters: Iterable[tuple[str, nn.Parameter]], mesh: Mesh
) -> tuple[str, Mapping[int, str]] | None:
    """Find the first parameter that is not the same on all its data-parallel ranks. Collective.

    Args:
        parameters: Whole parameters of this rank, by name.
        mesh: Mesh of this process.

    Returns:
        The parameter's name, and the hosts of the ranks that differ from most others, or of all its
        ranks if no value is that of most; the same on every rank. None if there is none.
    """
    digests: dict[tuple[Replicas, str], bytes] = {}
    for name, parameter in parameters:
        replicas = expert_group(parameter) is not None, replicas_of(parameter, mesh).ranks[0]
        content = parameter.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
        digests[replicas, name] = blake2b(content.data).digest()
    # One hash for all parameters of the same ranks, unless they differ.
    totals = {replicas: blake2b() for replicas, _ in digests}
    for (replicas, _), digest in digests.items():
        totals[replicas].update(digest)
    pairs = {(replicas, total.digest()) for replicas, total in totals.items()}
    pairs.update(*gather_objects(pairs))
    if len(pairs) == len(dict(pairs)):
        return None
    ranks = [*enumerate(gather_objects((socket.gethostname(), digests)))]
    for weight in dict.fromkeys(chain.from_iterable(of_rank for _, (_, of_rank) in ranks)):
        values = {n: (host, d[weight]) for n, (host, d) in ranks if weight in d}
        ((common, count), *others) = Counter(value for _, value in values.values()).most_common()
        if others:
            is_common = 2 * count > len(values)
            odd = {n: host for n, (host, v) in values.items() if v != common or not is_common}
            return weight[1], odd
    return None
