"""The names of devices. Only this file and launch/device.py have any."""

from __future__ import annotations

HOST = "cpu"
"""Device type of the CPU, and DeepSpeed's name for offloading to it."""
OFFLOAD_TARGETS = ("none", HOST, "nvme")
"""Targets of DeepSpeed's offloading: none, host memory, a disk."""


def is_host(device: str) -> bool:
    """Whether a kind of device is the CPU, whose tensors are in host memory.

    Args:
        device: The type of a `torch.device`.
    """
    return device == HOST
