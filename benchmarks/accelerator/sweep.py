"""Sweeps: attention kernels by length, engine settings, optimizer kernels, save and load rates."""

from __future__ import annotations

import functools
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.accelerator import train

MILLION = 1_000_000
DS_CONFIGS: dict[str, dict[str, Any]] = {
    "default": {},
    **{
        f"overlap_comm {str(value).lower()}": {"zero_optimization": {"overlap_comm": value}}
        for value in (False, True)
    },
    **{
        f"reduce_bucket_size {size // MILLION} M": {
            "zero_optimization": {"reduce_bucket_size": size}
        }
        for size in (50 * MILLION, 200 * MILLION, 500 * MILLION)
    },
    **{
        f"immediate_grad_update {str(value).lower()}": {"bf16": {"immediate_grad_update": value}}
        for value in (False, True)
    },
    **{
        f"offload, pin_memory {str(value).lower()}": {
            "zero_optimization": {
                "stage": 2,
                "offload_optimizer": {"device": "cpu", "pin_memory": value},
            }
        }
        for value in (False, True)
    },
}
"""Name -> keys of the DeepSpeed file."""


def attention(
    device: torch.device, lengths: tuple[int, ...], *, tokens: int, heads: int, head_dim: int
) -> list[dict[str, Any]]:
    """Measure forward and backward of causal attention for each kernel and length.

    Args:
        device: Device to measure.
        lengths: Tokens of a sample.
        tokens: Tokens of a batch; the number of samples follows.
        heads: Attention heads.
        head_dim: Head size.
    """
    rows = []
    for length in lengths:
        shape = (max(1, tokens // length), heads, length, head_dim)
        q, k, v = (
            torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True)
            for _ in range(3)
        )
        for name, attend in _kernels(length, device):

            def work(attend: Callable[..., Tensor] = attend, qkv: Any = (q, k, v)) -> None:
                out = attend(*qkv)
                torch.autograd.grad(out, qkv, torch.ones_like(out))

            row: dict[str, Any] = {"length": length, "kernel": name}
            try:
                row["seconds"] = _seconds(work, device)
            except Exception as error:  # a kernel may not support a device, type or length
                row["failure"] = str(error).partition("\n")[0]
            rows.append(row)
    return rows


def _kernels(length: int, device: torch.device) -> Iterator[tuple[str, Callable[..., Tensor]]]:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def sdpa(context: Callable[[], AbstractContextManager[Any]]) -> Callable[..., Tensor]:
        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with context():
                return F.scaled_dot_product_attention(q, k, v, is_causal=True)

        return attend

    yield "torch's choice", sdpa(nullcontext)
    for name in ("FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION", "MATH"):
        yield name.lower(), sdpa(functools.partial(sdpa_kernel, getattr(SDPBackend, name)))
    if device.type != "cpu":
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        mask = create_block_mask(
            lambda b, h, i, j: i >= j, None, None, length, length, device=device.type
        )
        compiled = torch.compile(flex_attention)
        yield "flex", lambda q, k, v: compiled(q, k, v, block_mask=mask)


def engine(
    size_name: str, names: tuple[str, ...], extra: tuple[str, ...], **options: Any
) -> list[dict[str, Any]]:
    """Measure the default command with other keys of the DeepSpeed file.

    Args:
        size_name: Key of the model's size.
        names: Keys of DS_CONFIGS.
        extra: Further flags of the command.
        **options: Passed to `train.measure`.
    """
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "ds_config.json"
        flags = (*extra, "--deepspeed_config", str(file))
        for name in names:
            file.write_text(json.dumps(DS_CONFIGS[name]), encoding="utf-8")
            found = train.measure(size_name, names=(train.OURS,), extra=flags, **options)
            rows.append({**found["contenders"][0], "name": name})
    return rows


def optimizers(device: torch.device, parameters: int) -> list[dict[str, Any]]:
    """Measure a step of AdamW on fp32 parameters by every implementation that is installed."""
    rows = []
    for name, build in _optimizers():
        tensors = [torch.randn(parameters // 8, device=device) for _ in range(8)]
        for tensor in tensors:
            tensor.grad = torch.randn_like(tensor)
        row: dict[str, Any] = {"optimizer": name}
        try:
            row["seconds"] = _seconds(build(tensors).step, device)
        except Exception as error:  # not installed, or not for this device
            row["failure"] = str(error).partition("\n")[0]
        rows.append(row)
    return rows


def _optimizers() -> Iterator[tuple[str, Callable[[list[Tensor]], Any]]]:
    yield "torch, fused", lambda tensors: torch.optim.AdamW(tensors, fused=True)
    yield "torch, foreach", lambda tensors: torch.optim.AdamW(tensors, foreach=True)

    def deepspeed_fused(tensors: list[Tensor]) -> Any:
        from deepspeed.ops.adam import FusedAdam

        return FusedAdam(tensors)

    def apex_fused(tensors: list[Tensor]) -> Any:
        from apex.optimizers import FusedAdam  # type: ignore[import-not-found]

        return FusedAdam(tensors)

    yield "DeepSpeed FusedAdam", deepspeed_fused
    yield "apex FusedAdam", apex_fused


def disk(device: torch.device, folder: Path, size: int) -> dict[str, float]:
    """Measure the rate of saving and loading a tensor in bytes per second, flushed to the disk."""
    tensor = torch.empty(size, dtype=torch.uint8, device=device)
    file = folder / "tensor.pt"
    begin = time.perf_counter()
    with file.open("wb") as stream:
        torch.save(tensor, stream)
        stream.flush()
        os.fsync(stream.fileno())
    saved = time.perf_counter()
    torch.load(file, map_location=device, weights_only=True)
    loaded = time.perf_counter()
    file.unlink()
    return {"save": size / (saved - begin), "load": size / (loaded - saved)}


def _seconds(work: Callable[[], object], device: torch.device, count: int = 10) -> float:
    """Median time of the work, which the device has finished."""
    synchronize = getattr(torch, device.type).synchronize
    times = []
    for _ in range(count + 2):
        synchronize()
        begin = time.perf_counter()
        work()
        synchronize()
        times.append(time.perf_counter() - begin)
    return statistics.median(times[2:])


def lines(result: dict[str, Any]) -> list[str]:
    """Format the figures of all sweeps."""
    text = []
    for row in result.get("attention", ()):
        figure = f"{row['seconds'] * 1e3:.2f} ms" if "seconds" in row else row["failure"][:60]
        text.append(f"attention  {row['length']:7} {row['kernel']:22} {figure}")
    for row in result.get("engine", ()):
        figure = f"{row['seconds'] * 1e3:.1f} ms" if "seconds" in row else "failed"
        text.append(f"engine     {row['name']:40} {figure}")
    for row in result.get("optimizers", ()):
        figure = f"{row['seconds'] * 1e3:.2f} ms" if "seconds" in row else row["failure"][:60]
        text.append(f"optimizer  {row['optimizer']:30} {figure}")
    for name, rate in result.get("disk", {}).items():
        text.append(f"{name:10} {rate / 1e6:.0f} MB/s")
    return text
