"""Weights of other programs, whose values are checked when they are read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from torch import Tensor

from megatron_ds.config.problems import user_error
from megatron_ds.engine.deepspeed.tensor_files import LARGEST, find_extreme
from megatron_ds.engine.states.state_reader import Columns, TensorReader


def finite(tensor: TensorReader, name: str, path: Path) -> TensorReader:
    """A tensor whose values are finite numbers that a run can continue from.

    Args:
        tensor: The tensor.
        name: Its name in the files.
        path: Their folder.

    Raises:
        UserError: When it is read, if a value that is read is NaN, infinite or too large.
    """

    def load(rows: range, columns: Columns | None) -> Tensor:
        value = tensor.load(rows, columns)
        if find_extreme(value, name) is not None:
            raise user_error(
                "foreign-weights-not-finite", path=path, name=name, largest=f"{LARGEST:g}"
            )
        return value

    return replace(tensor, load=load)
