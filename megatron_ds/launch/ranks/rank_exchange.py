"""Messages between all ranks through the store of the process group.

The first rank receives a message of every rank and answers by key, such as the host: each rank
reads only its own answer. So the traffic grows with the number of ranks, where gathering all
messages on all ranks would grow with its square. Knows neither torch nor what is sent.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

T = TypeVar("T")
R = TypeVar("R")


def exchange(
    store: Store,
    rank: int,
    world_size: int,
    message: T,
    answer: Callable[[Sequence[T]], Mapping[str, R]],
    key: str = "",
) -> R:
    """Sends a message to the first rank and returns its answer. Collective.

    Args:
        store: Store of the process group.
        rank: Rank of this process.
        world_size: Number of processes.
        message: Message of this rank, a JSON value like the answers.
        answer: Called on the first rank with all messages, by rank; gives the answers by key.
        key: Key of the answer for this rank.
    """
    name = f"exchange {store.add(f'exchanges of rank {rank}', 1)}"
    if rank:
        store.set(f"{name} from {rank}", json.dumps(message))
        received: R = json.loads(store.get(f"{name} for {key}"))
        return received
    others = [json.loads(store.get(f"{name} from {other}")) for other in range(1, world_size)]
    answers = answer([message, *others])
    for member, value in answers.items():
        store.set(f"{name} for {member}", json.dumps(value))
    return answers[key]
