"""Checkpoints of states that ZeRO-3 keeps in swap files on a disk.

DeepSpeed copies its swap files into the checkpoint as they are, and its load restores neither the
moments in them nor the flat tensors that are too small to be swapped. Here the files are mapped
into memory while a checkpoint is written, and a load writes them: the checkpoint is the same as
without swapping, and each can be loaded by the other. Reads private attributes of the pinned
DeepSpeed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_ds.engine.deepspeed.tensor_files import read_tensors
from megatron_ds.fileio.atomic import name_in_errors

Json = dict[str, Any]


@contextmanager
def as_tensors(engine: Any) -> Iterator[None]:
    """Within it, the engine saves and loads swapped states like those in memory.

    Args:
        engine: Engine of `deepspeed.initialize`.
    """
    optimizer = engine.optimizer
    if not is_swapping(optimizer):
        yield
        return

    def load(folder: str, tag: str, load_optimizer_states: bool = True) -> bool:
        path = Path(engine._get_zero_ckpt_name(folder, tag))
        _load(optimizer, read_tensors(path, mmap=True)["optimizer_state_dict"])
        return True

    def is_offloaded() -> bool:
        return False

    def state_dict() -> Any:
        return _with_mapped_files(optimizer, original())

    original = optimizer.state_dict
    engine.zero_nvme_offload_optimizer = is_offloaded
    engine._load_zero_checkpoint = load
    optimizer.state_dict = state_dict
    try:
        yield
    finally:
        del engine.zero_nvme_offload_optimizer, engine._load_zero_checkpoint, optimizer.state_dict


def align_gradients(optimizer: Any) -> None:
    """Let the swapped part of each gradient start at a multiple of the block of direct I/O.

    DeepSpeed reads a gradient into its place in the flat tensor, which is anywhere; it takes care
    of lengths only. A read into an address that is not aligned fails, or leaves parts of the memory
    as they were. Here what precedes the first multiple stays in memory, as what follows the last
    one does.

    Args:
        optimizer: DeepSpeed's optimizer of an engine.
    """
    swapper = getattr(optimizer, "optimizer_swapper", None)
    if swapper is None:
        return
    split_ends = swapper._adjust_for_misaligned_lengths

    def split(tensors: list[Tensor], offsets: list[int]) -> tuple[list[Tensor], list[int]]:
        parts = []
        starts = []
        for tensor, offset in zip(tensors, offsets, strict=True):
            head = min(-offset % swapper.numel_alignment, len(tensor))
            parts += [tensor[:head], tensor[head:]]
            starts += [offset, offset + head]
        nonempty = [index for index, part in enumerate(parts) if len(part)]
        result: tuple[list[Tensor], list[int]] = split_ends(
            tensors=[parts[index] for index in nonempty],
            offsets=[starts[index] for index in nonempty],
        )
        return result

    swapper._adjust_for_misaligned_lengths = split


def is_swapping(optimizer: Any) -> bool:
    """Whether a DeepSpeed optimizer keeps states or parameters in files."""
    switches = ("swap_optimizer", "params_in_nvme_and_cpu")
    return any(getattr(optimizer, name, False) for name in switches)


def partition_of(parameter: Any) -> Tensor:
    """This rank's partition of a ZeRO-3 parameter with padding, mapped if it is in a file."""
    partition: Tensor = parameter.ds_tensor
    if parameter.ds_tensor.status.name == "AVAILABLE":
        return partition
    swapper = parameter.nvme_swapper
    path = swapper.get_path(parameter, must_exist=True)
    return torch.from_file(path, size=parameter.ds_tensor.ds_numel, dtype=swapper.dtype)


def _with_mapped_files(optimizer: Any, saved: Json) -> Json:
    """A copy of a state dict whose empty tensors are replaced by mapped swap files."""
    masters = list(saved["fp32_flat_groups"])
    inner = saved["optimizer_state_dict"]
    states = {index: dict(state) for index, state in inner["state"].items()}
    for index, info in _swapped(optimizer):
        for context in info.tensors:
            values = torch.from_file(
                context.swap_path, size=info.numel(), dtype=context.compute_tensor.dtype
            )
            name = _state_name(info, context)
            if name is None:
                masters[index] = values
            else:
                states[index][name] = values
    return saved | {"fp32_flat_groups": masters, "optimizer_state_dict": inner | {"state": states}}


def _load(optimizer: Any, saved: Json) -> None:
    """Restore an optimizer from a mapped state dict, and the parameters from its master weights."""
    optimizer.loss_scaler = saved["loss_scaler"]
    optimizer.dynamic_loss_scale = saved["dynamic_loss_scale"]
    optimizer.overflow = saved["overflow"]
    inner = saved["optimizer_state_dict"]
    swapped = dict(_swapped(optimizer))
    states = {
        # Without clones, the optimizer would keep the file mapped.
        index: {name: _in_memory(value, index in swapped) for name, value in state.items()}
        for index, state in inner["state"].items()
    }
    optimizer._set_fp32_optimizer_param_groups()
    optimizer.optimizer.load_state_dict(inner | {"state": states})
    optimizer._clear_fp32_optimizer_param_groups()
    for index, master in enumerate(optimizer.fp32_partitioned_groups_flat):
        values = saved["fp32_flat_groups"][index]
        if index in swapped:
            store(optimizer, index, values, inner["state"].get(index, {}))
        else:
            master.data.copy_(values)
            optimizer._reassign_or_swap_out_partitioned_parameters(index)


def swapped_sizes(optimizer: Any) -> dict[int, int]:
    """Elements of each flat tensor that is in files."""
    if not is_swapping(optimizer):
        return {}
    return {index: info.numel() for index, info in _swapped(optimizer)}


def store(optimizer: Any, index: int, values: Tensor, state: Json) -> None:
    """Replace a flat tensor that is in files, its moments, and the parameters that follow from it.

    Args:
        optimizer: Optimizer of stage 3, which has loaded the names of the moments.
        index: Index of the flat tensor.
        values: Master weights.
        state: Moments by name.
    """
    _write_files(optimizer, optimizer.fp32_partitioned_groups_flat[index], values, state)
    optimizer._optimizer_states_and_gradient_swap_in(index)
    optimizer._reassign_or_swap_out_partitioned_parameters(index)
    optimizer._optimizer_states_and_gradient_swap_out(index)


def _write_files(optimizer: Any, master: Tensor, values: Tensor, state: Json) -> None:
    """Write the swap files of a flat tensor and let the swapper know its moments."""
    swapper = optimizer.optimizer_swapper
    info = swapper.swap_params_info[swapper.parameter_id(master)]
    info.tensors = info.tensors[:1]
    info.swapped_gradients = {}
    info.release_unswapped_gradients()
    moments = []
    for name, tensor in optimizer.optimizer.state[master].items():
        if _is_swapped(state.get(name)):
            tensor.ds_id = f"{name}-{master.ds_id}"  # type: ignore[attr-defined]
            moments.append(tensor)
    info.has_state_tensors = False
    if moments:
        info.add_state_tensors(moments)
    size = swapper._io_aligned_numel(info.numel()) * master.element_size()
    for context in info.tensors:
        name = _state_name(info, context)
        content = values if name is None else state[name]
        path = Path(context.swap_path)
        with name_in_errors(path), open(path, "wb") as file:
            file.write(content.contiguous().view(torch.uint8).numpy().data)
            file.truncate(size)


def _in_memory(value: Any, is_swapped: bool) -> Any:
    """A state of the optimizer as it is kept in memory: empty if it is in a file."""
    if not isinstance(value, Tensor):
        return value
    return value.new_empty(0) if is_swapped and _is_swapped(value) else value.clone()


def _is_swapped(state: object) -> bool:
    """Whether a state of a swapped flat tensor is in a file, too: all but numbers of steps."""
    return isinstance(state, Tensor) and state.dim() > 0


def _swapped(optimizer: Any) -> Iterator[tuple[int, Any]]:
    """Index of each flat tensor that is in files, and DeepSpeed's record of these."""
    for index, master in enumerate(optimizer.fp32_partitioned_groups_flat):
        if optimizer._swappable_optimizer_subgroup(index):
            yield index, optimizer.optimizer_swapper._get_param_swap_info(master)


def _state_name(info: Any, context: Any) -> str | None:
    """Name of a swapped state in the optimizer; None for the master weights."""
    identity = str(context.compute_tensor.ds_id)
    return None if identity == info.param_id else identity.removesuffix(f"-{info.param_id}")
