"""Faults of a node, which Python injects into itself when it starts there.

Copied as sitecustomize.py to a folder of the node that PYTHONPATH names. NODE_FAULTS lists those of
the node: `clock`, `devices`.
"""

import os
import time
from typing import Any

from megatron_ds.fileio import visibility
from megatron_ds.launch import device
from megatron_ds.launch.ranks import distributed

CLOCK_S = 3600.0
FAULTS = os.environ.get("NODE_FAULTS", "").split()

visibility.VISIBLE_WITHIN_S = 0.2
if "clock" in FAULTS:
    read_clock = time.time
    time.time = lambda: read_clock() + CLOCK_S
if "devices" in FAULTS:  # one, of two processes

    def select(accelerator: Any, backend: str) -> int:
        return device.device_index(0, 2, 1, is_shared=True)

    distributed._select_device = select
