#!/usr/bin/env python
"""What the device is, and the rates of its matrix products and copies.

    device.py REPORT N

measures them with matrices of N rows in a process of its own, which frees the device's memory.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.accelerator.processes import Row, read_json, run


def measured(rows: int) -> Row:
    """`describe` and `rates`, measured in a process of its own; empty if it fails."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        run([Path(__file__).resolve(), report, rows], timeout=60)
        return read_json(report) if report.exists() else {}


def name() -> str:
    """Name of the accelerator, such as NVIDIA H200."""
    import torch
    from deepspeed.accelerator import get_accelerator

    kind = get_accelerator().device_name()
    return "cpu" if kind == "cpu" else str(getattr(torch, kind).get_device_name())


def describe(device: object) -> Row:
    """Versions and settings of torch that decide which kernels run, and the device's memory."""
    import torch

    row: Row = {
        "sdpa_order": str(torch._C._get_sdp_priority_order()),
        "cudnn": torch.backends.cudnn.version(),
        "fp32_matmul_precision": torch.get_float32_matmul_precision(),
    }
    get_memory = getattr(getattr(torch, str(device).partition(":")[0]), "mem_get_info", None)
    if get_memory is not None:
        row["memory_gib"] = get_memory()[1] / 2**30
    return row


def rates(device: object, rows: int) -> Row:
    """Rate of a product of square bf16 matrices, and of a copy within the device.

    Args:
        device: Device to measure.
        rows: Rows of the matrices. The copy has 16 times as many bytes as a matrix.
    """
    import torch

    from benchmarks.accelerator.sweep import median_seconds

    where = torch.device(str(device))
    a = torch.randn(rows, rows, device=where, dtype=torch.bfloat16)
    source = torch.zeros(16 * a.nbytes, dtype=torch.uint8, device=where)
    target = torch.empty_like(source)
    return {
        "rows": rows,
        "bf16_tflops": 2 * rows**3 / median_seconds(lambda: a @ a, where) / 1e12,
        # Bytes are read and written.
        "copy_tb_s": 2 * source.nbytes / median_seconds(lambda: target.copy_(source), where) / 1e12,
    }


def main() -> None:
    from benchmarks.common import write_json
    from benchmarks.train_step import start_process_group

    report, rows = sys.argv[1:]
    device = start_process_group(1)
    write_json(Path(report), {**describe(device), **rates(device, int(rows))})


if __name__ == "__main__":
    main()
