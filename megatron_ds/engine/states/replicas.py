"""Compares the weights that several ranks hold, by a hash of each parameter's bytes."""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from itertools import chain

import torch
from torch import Tensor

from megatron_ds.parallel.collectives import gather_objects
from megatron_ds.parallel.mesh import Mesh
from megatron_ds.parallel.sharding import expert_group, shard_spec

Replicas = tuple[int, int, int]
"""The ranks that hold the same parameters, by their pipeline, tensor- and expert-parallel rank; -1
along an axis whose ranks all hold them."""


def find_different_weights(
    parameters: Iterable[tuple[str, Tensor]], mesh: Mesh, tied: Sequence[Tensor] = ()
) -> tuple[str, Mapping[int, str]] | None:
    """Find the first parameter that is not the same on all ranks with a copy of it. Collective.

    These are its data-parallel ranks, the tensor-parallel ranks that do not shard it, and the
    pipeline stages with a tied embedding.

    Args:
        parameters: Parameters of this rank, by name, without ZeRO-3, and states of layers.
        mesh: Mesh of this process.
        tied: Parameters that several pipeline stages share under the same name.

    Returns:
        The parameter's name, and the hosts of the ranks that differ from most others, or of all its
        ranks without a majority; the same on every rank. None if all copies are equal.
    """
    digests: dict[tuple[Replicas, str], bytes] = {}
    shared = {id(parameter) for parameter in tied}
    for name, parameter in parameters:
        replicas = (
            -1 if id(parameter) in shared else mesh.pp.rank,
            -1 if shard_spec(parameter) is None else mesh.tp.rank,
            -1 if expert_group(parameter) is None else mesh.ep.rank,
        )
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
