"""Reads files of tensors and plain values, such as DeepSpeed's, without running their code.

Works without DeepSpeed, for generation, except for files that contain its classes.
"""

from __future__ import annotations

import errno
import pickle
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO

import torch

from megatron_ds.config.devices import HOST
from megatron_ds.config.problems import user_error

OPTIMIZER_KEYS = ("base_optimizer_state", "optimizer_state_dict", "optimizer")
"""Keys of the state dict of torch's optimizer in DeepSpeed's files, from the inside outwards."""

LARGEST = 1e25
"""Magnitude of a weight, or of a state of the optimizer, above which no run can train."""
CHECKED_TYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def safe_classes() -> list[Any]:
    """Classes that DeepSpeed stores in its files, in addition to tensors and plain values."""
    if find_spec("deepspeed") is None:
        return []
    from deepspeed.checkpoint.universal_checkpoint import SubparamShape
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    classes = [DynamicLossScaler, LossScaler, SubparamShape, ZeroStageEnum, fragment_address]
    # Python 3.11.0 to 3.11.3 pickle a member of an enum as a call of getattr.
    return [*classes, (_enum_member, "builtins.getattr")]


def _enum_member(cls: Any, name: str) -> Enum:
    if isinstance(cls, type) and issubclass(cls, Enum):
        return cls[name]
    raise pickle.UnpicklingError(f"getattr of {cls!r}")


def read_tensors(
    path: Path | BinaryIO,
    *,
    map_location: Any = HOST,
    mmap: bool = False,
    classes: Sequence[Any] | None = None,
    name: str = "",
) -> Any:
    """Read a file of tensors and plain values.

    Args:
        path: File of `write_tensors` or of DeepSpeed, or an open one.
        map_location: Device of the tensors.
        mmap: Read the bytes of a tensor when it is used.
        classes: Further classes that may be in it, each alone or with the name that the file has
            (default: DeepSpeed's).
        name: Name for messages (default: the path).

    Raises:
        UserError: If the file is damaged or contains other objects.
    """
    try:
        with torch.serialization.safe_globals(safe_classes() if classes is None else list(classes)):
            return torch.load(path, map_location=map_location, weights_only=True, mmap=mmap)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, KeyError) as error:
        raise user_error("tensor-file-unreadable", path=name or path, error=error) from error
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        # torch looks for the end of a truncated file before its start.
        raise user_error("tensor-file-unreadable", path=name or path, error=error) from error


def find_extreme(values: Any, name: str = "") -> str | None:
    """The name of the first tensor in nested values that has a NaN, or one above `LARGEST`."""
    if isinstance(values, torch.Tensor):
        if values.dtype not in CHECKED_TYPES or not values.numel():
            return None
        low, high = map(float, torch.aminmax(values.detach()))
        return None if low > -LARGEST and high < LARGEST else name
    items: Iterable[Any] = values.items() if isinstance(values, Mapping) else ()
    if isinstance(values, list | tuple):
        items = enumerate(values)
    extremes = (find_extreme(value, f"{name}.{key}".lstrip(".")) for key, value in items)
    return next(filter(None, extremes), None)
