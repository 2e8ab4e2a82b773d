"""Groups of consecutive rows, such as those of a rank's experts, by the row at which each ends.

Shapes: e groups, R rows.
"""

from __future__ import annotations

import torch
from torch import Tensor


def group_sizes(ends: Tensor) -> list[int]:
    """The number of rows of each group. The host waits for the device.

    Args:
        ends: Rows until the end of each group, [e].
    """
    sizes: list[int] = ends.diff(prepend=ends.new_zeros(1)).tolist()
    return sizes


def group_of_rows(ends: Tensor, rows: int) -> Tensor:
    """The group of each row, [R].

    Args:
        ends: Rows until the end of each group, [e].
        rows: Number of rows.
    """
    numbers = torch.arange(rows, dtype=ends.dtype, device=ends.device)
    return torch.searchsorted(ends, numbers, right=True)
