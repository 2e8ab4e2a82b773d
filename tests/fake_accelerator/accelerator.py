"""DeepSpeed's accelerator of the device, and the communication backend of its tensors."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import set_accelerator
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from deepspeed.ops.op_builder.cpu import CPUAdamBuilder, NotImplementedBuilder
from torch import Tensor

from megatron_ds.launch.ranks.host_copies import METHODS, HostCopies
from tests.fake_accelerator import device
from tests.fake_accelerator.device import NAME

BACKEND = "fakeccl"


class FakeAccelerator(CPU_Accelerator):
    """Asynchronous, as real ones are; has none of DeepSpeed's operations on the device."""

    def __init__(self, *, is_plain: bool = False) -> None:
        super().__init__()
        self._is_plain = is_plain
        self._name = NAME
        self._communication_backend_name = "gloo" if is_plain else BACKEND

    def is_synchronized_device(self) -> bool:
        return self._is_plain

    def device_name(self, device_index: int | None = None) -> str:
        return NAME if device_index is None else f"{NAME}:{device_index}"

    def device(self, device_index: int | None = None) -> Any:
        return device.device(device_index)

    def set_device(self, device_index: int) -> None:
        device.set_device(device_index)

    def current_device(self) -> int:
        return device.current_device()

    def current_device_name(self) -> str:
        return f"{NAME}:{device.current_device()}"

    def device_count(self) -> int:
        return device.device_count()

    def synchronize(self, device_index: int | None = None) -> None:
        device.synchronize(device_index)

    def set_rng_state(self, new_state: Tensor, device_index: int | None = None) -> None:
        device.set_rng_state(new_state, device_index)

    def get_rng_state(self, device_index: int | None = None) -> Tensor:
        return device.get_rng_state(device_index)

    def manual_seed(self, seed: int) -> None:
        device.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        device.manual_seed_all(seed)

    @property
    def Stream(self) -> Any:
        return None if self._is_plain else device.Stream

    def stream(self, stream: Any) -> Any:
        return contextlib.nullcontext() if self._is_plain else stream

    def current_stream(self, device_index: int | None = None) -> Any:
        return None if self._is_plain else device.current_stream(device_index)

    @property
    def Event(self) -> Any:
        return device.Event

    def empty_cache(self) -> None:
        torch.accelerator.empty_cache()

    def memory_allocated(self, device_index: int | None = None) -> int:
        return torch.accelerator.memory_allocated(device_index)

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        return torch.accelerator.max_memory_allocated(device_index)

    def memory_reserved(self, device_index: int | None = None) -> int:
        return torch.accelerator.memory_reserved(device_index)

    def max_memory_reserved(self, device_index: int | None = None) -> int:
        return torch.accelerator.max_memory_reserved(device_index)

    def memory_stats(self, device_index: int | None = None) -> Any:
        return torch.accelerator.memory_stats(device_index)

    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        torch.accelerator.reset_peak_memory_stats(device_index)

    def total_memory(self, device_index: int | None = None) -> int:
        return torch.accelerator.get_memory_info(device_index)[1]

    def available_memory(self, device_index: int | None = None) -> int:
        return torch.accelerator.get_memory_info(device_index)[0]

    def is_fp16_supported(self) -> bool:
        return True

    def is_fp64_supported(self) -> bool:
        return not self._is_plain

    def supported_dtypes(self) -> list[torch.dtype]:
        return [torch.float, torch.half, torch.bfloat16]

    @property
    def _torch_pins_host_memory(self) -> bool:
        return not self._is_plain

    def _torch_pin_memory(self, tensor: Tensor) -> Tensor:
        return tensor if self._is_plain else tensor.pin_memory()

    def _torch_empty_pinned(self, tensor: Tensor, shape: Any) -> Tensor:
        return tensor.new_empty(shape, pin_memory=not self._is_plain)

    def pin_memory(self, tensor: Tensor, make_copy: bool = True, match_shape: bool = True) -> Any:
        return super(CPU_Accelerator, self).pin_memory(tensor, make_copy, match_shape)

    def on_accelerator(self, tensor: Tensor) -> bool:
        return tensor.device.type == NAME

    def get_op_builder(self, class_name: str) -> Any:
        # The optimizer of offloaded states runs on the host.
        return CPUAdamBuilder if class_name == "CPUAdamBuilder" else NotImplementedBuilder


def _tensor_type(dtype: torch.dtype) -> property:
    """What constructs tensors of a type on the device, as torch.cuda.FloatTensor does."""
    return property(lambda _: functools.partial(torch.tensor, dtype=dtype, device=NAME))


for _type, _dtype in {
    "BFloat16Tensor": torch.bfloat16,
    "ByteTensor": torch.uint8,
    "DoubleTensor": torch.float64,
    "FloatTensor": torch.float32,
    "HalfTensor": torch.float16,
    "IntTensor": torch.int32,
    "LongTensor": torch.int64,
}.items():
    setattr(FakeAccelerator, _type, _tensor_type(_dtype))


class FakeCCL(HostCopies):
    """Communicates tensors of the device over gloo, and refuses those of the host, as NCCL does."""

    backend_name = BACKEND

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(NAME)]


def _forwarded(name: str) -> Callable[..., Any]:
    def call(self: FakeCCL, *arguments: Any) -> Any:
        return getattr(self._inner, name)(*map(host_views, arguments))

    return call


def host_views(value: Any) -> Any:
    """Views of tensors of the device as host tensors, also in lists; anything else as it is."""
    if isinstance(value, list):
        return [host_views(item) for item in value]
    if not isinstance(value, Tensor):
        return value
    if value.device.type != NAME:
        raise RuntimeError(f"{BACKEND} communicates tensors of {NAME}, not of {value.device}")
    return torch.ops.fakedev.host_view(value)


for _name in METHODS:
    setattr(FakeCCL, _name, _forwarded(_name))


def install(library: Path, *, is_plain: bool = False) -> None:
    """Makes the device that of torch and of DeepSpeed in this process, once.

    Args:
        library: The library of the device.
        is_plain: Without fp64, streams, pinned memory and a communication backend, as Apple's GPUs
            are.
    """
    device.install(library)
    if is_plain:
        torch.ops.fakedev.set_fp64(False)
    else:
        dist.Backend.register_backend(BACKEND, FakeCCL, devices=[NAME])
    set_accelerator(FakeAccelerator(is_plain=is_plain))
