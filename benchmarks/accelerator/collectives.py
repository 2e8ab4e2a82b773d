#!/usr/bin/env python
"""Every collective in every group of parallel layouts, with values that are known, and link rates.

    collectives.py REPORT BYTES

The ranks are those of torchrun. Values are small integers, which every order of additions sums
alike, so that they must be equal. REPORT gets one row for each layout, axis and operation, and the
rates of a message of BYTES over all ranks.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

LAYOUTS = ("tp_size", "pp_size", "cp_size", "ulysses_size", "ep_size")
ELEMENTS = 96
"""Elements of a rank's message, a multiple of the sizes of groups."""
REPETITIONS = 5


def main() -> None:
    report, num_bytes = sys.argv[1:]
    from benchmarks.common import write_json
    from megatron_ds.config import RuntimeConfig
    from megatron_ds.launch import environment
    from megatron_ds.launch.ranks import distributed

    environment.prepare_environment()
    here = distributed.init_distributed(RuntimeConfig())
    import torch.distributed as dist

    rows = _check_groups(here.device)
    links = _links(here.device, int(num_bytes)) if dist.get_world_size() > 1 else {}
    if dist.get_rank() == 0:
        write_json(Path(report), {"collectives": rows, "links": links})
    dist.barrier()
    dist.destroy_process_group()


def groups_of(world: int) -> Iterator[tuple[dict[str, int], str, tuple[tuple[int, ...], ...]]]:
    """Sizes of a layout, an axis of it and its groups, for each distinct set of groups."""
    from megatron_ds.parallel.mesh import axis_groups

    layouts: list[dict[str, int]] = [{}, *({name: 2} for name in LAYOUTS)]
    layouts += [{"tp_size": 2, "pp_size": 2}, {"tp_size": 2, "cp_size": 2}, {"tp_size": world}]
    seen = set()
    for layout in layouts:
        sizes = {"tp_size": 1, **layout}
        product = sizes["tp_size"] * sizes.get("pp_size", 1) * sizes.get("cp_size", 1)
        product *= sizes.get("ulysses_size", 1) * sizes.get("ep_size", 1)
        if world % product:
            continue
        for axis, groups in axis_groups(world, **sizes).items():
            key = tuple(tuple(ranks) for ranks in groups)
            if key not in seen and max(map(len, key)) > 1:
                seen.add(key)
                yield sizes, axis, key


def _check_groups(device: Any) -> list[dict[str, Any]]:
    """One row for each distinct set of groups and each operation, with what every rank found."""
    import torch
    import torch.distributed as dist

    rows = []
    for sizes, axis, groups in groups_of(dist.get_world_size()):
        own = None
        for ranks in groups:  # all ranks create all groups
            group = dist.new_group(list(ranks))
            if dist.get_rank() in ranks:
                own = group, list(ranks)
        for name, operation in OPERATIONS.items():
            is_right = own is None or operation(device, *own)
            wrong = torch.tensor([0.0 if is_right else 1.0], device=device)
            dist.all_reduce(wrong)
            passed = wrong.item() == 0
            row = {"layout": sizes, "axis": axis, "operation": name, "ranks": len(groups[0])}
            rows.append({**row, "passed": passed})
    return rows


def _message(device: Any, rank: int) -> Any:
    """The message of a rank: integers that tell ranks and positions apart."""
    import torch

    return torch.arange(ELEMENTS, device=device, dtype=torch.float32) + 1000 * rank


def _all_reduce(device: Any, group: Any, ranks: list[int]) -> bool:
    import torch.distributed as dist

    message = _message(device, dist.get_rank())
    dist.all_reduce(message, group=group)
    return bool(message.equal(sum(_message(device, rank) for rank in ranks)))


def _all_gather(device: Any, group: Any, ranks: list[int]) -> bool:
    import torch
    import torch.distributed as dist

    result = torch.empty(ELEMENTS * len(ranks), device=device)
    dist.all_gather_into_tensor(result, _message(device, dist.get_rank()), group=group)
    return bool(result.equal(torch.cat([_message(device, rank) for rank in ranks])))


def _reduce_scatter(device: Any, group: Any, ranks: list[int]) -> bool:
    import torch
    import torch.distributed as dist

    part = ELEMENTS // len(ranks)
    result = torch.empty(part, device=device)
    message = _message(device, dist.get_rank())[: part * len(ranks)].contiguous()
    dist.reduce_scatter_tensor(result, message, group=group)
    start = ranks.index(dist.get_rank()) * part
    total = sum(_message(device, rank) for rank in ranks)
    return bool(result.equal(total[start : start + part]))


def _all_to_all(device: Any, group: Any, ranks: list[int]) -> bool:
    import torch
    import torch.distributed as dist

    part = ELEMENTS // len(ranks)
    message = _message(device, dist.get_rank())[: part * len(ranks)].contiguous()
    result = torch.empty_like(message)
    dist.all_to_all_single(result, message, group=group)
    start = ranks.index(dist.get_rank()) * part
    parts = [_message(device, rank)[start : start + part] for rank in ranks]
    return bool(result.equal(torch.cat(parts)))


def _broadcast(device: Any, group: Any, ranks: list[int]) -> bool:
    import torch.distributed as dist

    message = _message(device, dist.get_rank())
    dist.broadcast(message, src=ranks[-1], group=group)
    return bool(message.equal(_message(device, ranks[-1])))


def _send(device: Any, group: Any, ranks: list[int]) -> bool:
    """Each rank sends to the next one of its group, and receives from the one before."""
    import torch
    import torch.distributed as dist

    position = ranks.index(dist.get_rank())
    following = ranks[(position + 1) % len(ranks)]
    previous = ranks[position - 1]
    result = torch.empty(ELEMENTS, device=device)
    message = _message(device, dist.get_rank())
    transfers = [
        dist.P2POp(dist.isend, message, following, group),
        dist.P2POp(dist.irecv, result, previous, group),
    ]
    for work in dist.batch_isend_irecv(transfers):
        work.wait()
    return bool(result.equal(_message(device, previous)))


OPERATIONS: dict[str, Callable[[Any, Any, list[int]], bool]] = {
    "all-reduce": _all_reduce,
    "all-gather": _all_gather,
    "reduce-scatter": _reduce_scatter,
    "all-to-all": _all_to_all,
    "broadcast": _broadcast,
    "send": _send,
}


def _links(device: Any, num_bytes: int) -> dict[str, float]:
    """Bytes per second that a rank sends in an all-reduce over all ranks, and seconds of a tiny
    one."""
    import torch
    import torch.distributed as dist

    ranks = dist.get_world_size()
    large = torch.zeros(num_bytes // 4, device=device)
    small = torch.zeros(16, device=device)
    seconds = [_seconds(partial(dist.all_reduce, tensor), device) for tensor in (large, small)]
    sent = 2 * (ranks - 1) / ranks * large.nbytes
    return {"bytes": large.nbytes, "gb_s": sent / seconds[0] / 1e9, "latency_s": seconds[1]}


def _seconds(work: Callable[[], Any], device: Any) -> float:
    """The shortest of some repetitions, after one that is not counted. Collective."""
    import torch
    import torch.distributed as dist

    times = []
    for _ in range(REPETITIONS + 1):
        dist.barrier()
        getattr(torch, device.type).synchronize()
        start = time.perf_counter()
        work()
        getattr(torch, device.type).synchronize()
        times.append(time.perf_counter() - start)
    return min(times[1:])


if __name__ == "__main__":
    main()
