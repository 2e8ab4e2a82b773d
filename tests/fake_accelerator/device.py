"""The device: builds and loads its library, and is the module `torch.fakedev`."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

NAME = "fakedev"
FOLDER = Path(__file__).resolve().parent
SOURCE = FOLDER / "device.cpp"
BUILDS = FOLDER.parent.parent / "build" / "fake_accelerator"


def library() -> Path:
    """The library for this torch. It is built once, in less than ten seconds; needs g++."""
    from torch.utils import cpp_extension

    digest = hashlib.sha256(SOURCE.read_bytes() + torch.__version__.encode()).hexdigest()
    path = BUILDS / f"{digest[:16]}.so"
    if not path.exists():
        compiler = shutil.which("g++")
        assert compiler is not None
        BUILDS.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}")
        flags = [f"-I{folder}" for folder in cpp_extension.include_paths()]
        flags += [f"-L{folder}" for folder in cpp_extension.library_paths()]
        flags += ["-lc10", "-ltorch", "-ltorch_cpu", "-O0", "-std=c++20", "-fPIC", "-shared"]
        subprocess.run([compiler, str(SOURCE), *flags, "-o", str(part)], check=True)
        part.replace(path)
    return path


def install(path: Path) -> None:
    """Makes the device known to torch in this process, once."""
    torch.ops.load_library(path)
    torch.library.impl("fakedev::on_read", "CompositeExplicitAutograd", READS.note)
    torch.Tensor.__setitem__ = _noted(torch.Tensor.__setitem__)  # type: ignore[method-assign]
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, sys.modules[__name__])
    torch.utils.generate_methods_for_privateuse1_backend()


class Reads:
    """Where values or the progress of the device reach the host."""

    def __init__(self) -> None:
        self.period = "start"
        """In what part of the run reads are noted."""
        self.noted: list[tuple[str, str, list[str]]] = []
        """Period, kind of read, and the functions of packages from the innermost."""
        self._lock = threading.Lock()

    def note(self, kind: str) -> None:
        packages = (sys.modules.get(name) for name in ("megatron_ds", "deepspeed"))
        roots = [Path(package.__path__[0]) for package in packages if package is not None]
        frame: Any = sys._getframe(1)
        stack = []
        while frame is not None:
            path = Path(frame.f_code.co_filename)
            for root in roots:
                if path.is_relative_to(root):
                    stack.append(f"{path.relative_to(root.parent)} {frame.f_code.co_name}")
            frame = frame.f_back
        with self._lock:
            self.noted.append((self.period, kind, stack))


READS = Reads()


def _noted(set_item: Callable[[torch.Tensor, Any, Any], None]) -> Callable[..., None]:
    """Notes the copies of numbers to elements, as `x[-1] = 3`.

    With CUDA, and with no other device, torch makes a tensor of the host of the number. It fills a
    slice with it, but copies it to a single element, or to elements that a tensor of integers
    selects, and waits until it has been copied (`THPVariable_setitem`, `copy_to` of
    ATen/TensorIndexing.h and `_index_put_impl_`).
    """

    def set_noted(tensor: torch.Tensor, index: Any, value: Any) -> None:
        if tensor.device.type == NAME and isinstance(value, bool | int | float):
            indices = index if isinstance(index, tuple) else (index,)
            tensors = [item for item in indices if isinstance(item, torch.Tensor)]
            if any(item.dtype not in (torch.bool, torch.uint8) for item in tensors) or not (
                tensors or tensor[index].ndim
            ):
                READS.note("copy to the device")
        set_item(tensor, index, value)

    return set_noted


# What torch and programs look for in the module of a device.


def Stream(*_: Any, **__: Any) -> torch.Stream:
    return torch.Stream(NAME)


def Event(enable_timing: bool = False, **_: Any) -> torch.Event:
    return torch.Event(NAME, enable_timing=enable_timing)


class device:
    """Makes a device current inside."""

    def __init__(self, device: Any) -> None:
        self._index = _index(device)

    def __enter__(self) -> None:
        self._before = current_device()
        set_device(self._index)

    def __exit__(self, *_: object) -> None:
        set_device(self._before)


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return True


def _is_in_bad_fork() -> bool:
    return False


def _lazy_init() -> None: ...


def device_count() -> int:
    return 2  # as in device.cpp


def current_device() -> int:
    return torch.accelerator.current_device_index()


def set_device(device: Any) -> None:
    torch.accelerator.set_device_index(_index(device))


def synchronize(device: Any = None) -> None:
    torch.accelerator.synchronize(_index(device))


def current_stream(device: Any = None) -> torch.Stream:
    return torch.accelerator.current_stream(_index(device))


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.bfloat16, torch.float16]


def get_rng_state(device: Any = None) -> torch.Tensor:
    return torch.ops.fakedev.get_rng_state(_index(device))


def set_rng_state(state: torch.Tensor, device: Any = None) -> None:
    torch.ops.fakedev.set_rng_state(_index(device), state)


def manual_seed_all(seed: int) -> None:
    for index in range(device_count()):
        set_rng_state(torch.Generator(f"{NAME}:{index}").manual_seed(seed).get_state(), index)


def manual_seed(seed: int) -> None:
    set_rng_state(torch.Generator(NAME).manual_seed(seed).get_state())


def _index(device: Any) -> int:
    index = device if isinstance(device, int) or device is None else torch.device(device).index
    return current_device() if index is None else index
