"""Memory of the tensors that a DeepSpeed engine keeps from step to step, counted by kind.

Reads private attributes of the pinned DeepSpeed and changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from megatron_ds.engine.readback import master_weights, moments, read_stage
from megatron_ds.engine.settings import ON_DEVICE, ON_HOST, StateBytes


def state_bytes(engine: Any) -> StateBytes:
    """Count the bytes of this process's tensors that outlive a step.

    Excludes reduction buckets, which are temporary. Each storage counts once, for the first kind
    that uses it.

    Args:
        engine: Engine of `deepspeed.initialize`.
    """
    parameters = list(engine.module.parameters())
    kinds: list[tuple[str, Iterable[torch.Tensor | None]]] = [
        ("parameters", [getattr(p, "ds_tensor", p.data) for p in parameters]),
        ("gathered parameters", [p.data for p in parameters]),
        ("accumulated gradients", _gradient_accumulators(engine)),
        ("gradients", [p.grad for p in parameters]),
        ("master weights", master_weights(engine)),
        ("moments", moments(engine.basic_optimizer)),
    ]
    result: StateBytes = {ON_DEVICE: {}, ON_HOST: {}}
    seen: set[tuple[str, int]] = set()
    device_type = torch.device(engine.device).type
    for kind, tensors in kinds:
        for tensor in tensors:
            if tensor is None:
                continue
            storage = tensor.untyped_storage()
            key = str(storage.device), storage.data_ptr()
            if storage.nbytes() == 0 or key in seen:
                continue
            seen.add(key)
            place = ON_DEVICE if storage.device.type == device_type else ON_HOST
            result[place][kind] = result[place].get(kind, 0) + storage.nbytes()
    return result


def _gradient_accumulators(engine: Any) -> Iterable[torch.Tensor | None]:
    optimizer = engine.optimizer
    if read_stage(engine) == 3:
        return (optimizer.grad_partitions_flat_buffer,)
    found = list(getattr(optimizer, "fp32_groups_gradients_flat", ()))
    for partitions in getattr(optimizer, "averaged_gradients", {}).values():
        found += partitions or []
    for group in getattr(optimizer, "bit16_groups", ()):
        found += [getattr(p, "grad_accum", None) for p in group]
    found += [master.grad for master in getattr(optimizer, "single_partition_of_fp32_groups", ())]
    return found
