"""Sweeps: attention kernels, output layer, engine settings, optimizers, saving and loading."""

from __future__ import annotations

import dataclasses
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
from benchmarks.accelerator.models import GptSize
from benchmarks.accelerator.processes import Row, flags, random_tokens, run

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


WINDOW = 1024
"""Tokens of the window of attention kernels that have one."""
LONGEST_MATH = 2048
"""Tokens of the longest sample whose scores are computed as a whole."""


def attention(
    device: torch.device, lengths: tuple[int, ...], *, tokens: int, heads: int, head_dim: int
) -> Iterator[Row]:
    """Measure forward and backward of causal attention for each kernel and length.

    Args:
        device: Device to measure.
        lengths: Tokens of a sample.
        tokens: Tokens of a batch; the number of samples follows.
        heads: Attention heads.
        head_dim: Head size.
    """
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

            yield {"name": name, "length": length, **timed(work, device)}


def head(device: torch.device, *, tokens: int, hidden: int, vocab: int) -> Iterator[Row]:
    """Measure forward and backward of the output layer with its loss, by the size of its chunks."""
    from megatron_ds.parallel import chunks
    from megatron_ds.parallel import fused_linear_cross_entropy as fused
    from megatron_ds.parallel.mesh import Mesh

    group = Mesh.single().tp
    x = torch.randn(tokens, hidden, device=device, dtype=torch.bfloat16, requires_grad=True)
    weight = (0.02 * torch.randn(vocab, hidden, device=device)).bfloat16().requires_grad_()
    labels = torch.randint(vocab, (tokens,), device=device)
    for name, kernels in {"eager": fused.EAGER, "compiled": fused.LossKernels.compiled()}.items():
        for mebibytes in (256, 512, 1024, 2048):
            chunks.CHUNK_BYTES = mebibytes << 20
            chunks.DEVICE_CHUNK_BYTES = chunks.CHUNK_BYTES

            def work(kernels: fused.LossKernels = kernels) -> None:
                loss, _ = fused.linear_cross_entropy(
                    x, weight, labels, None, vocab_size=vocab, group=group, kernels=kernels
                )
                torch.autograd.grad(loss, (x, weight))

            yield {"name": name, "chunk_mib": mebibytes, **timed(work, device, 5)}

    whole = torch.compile(lambda x, weight: F.cross_entropy((x @ weight.t()).float(), labels))
    yield {
        "name": "torch.compile of all logits",
        **timed(lambda: torch.autograd.grad(whole(x, weight), (x, weight)), device, 5),
    }


def _kernels(length: int, device: torch.device) -> Iterator[tuple[str, Callable[..., Tensor]]]:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def sdpa(context: Callable[[], AbstractContextManager[Any]]) -> Callable[..., Tensor]:
        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with context():
                return F.scaled_dot_product_attention(q, k, v, is_causal=True)

        return attend

    yield "torch's choice", sdpa(nullcontext)
    names = ["FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION"]
    for name in [*names, "MATH"] if length <= LONGEST_MATH else names:
        yield name.lower(), sdpa(functools.partial(sdpa_kernel, getattr(SDPBackend, name)))
    if device.type != "cpu":
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        compiled = torch.compile(flex_attention)
        for name, window in {"flex": length, f"flex, window {WINDOW}": WINDOW}.items():

            def is_visible(
                b: Tensor, h: Tensor, i: Tensor, j: Tensor, size: int = window
            ) -> Tensor:
                return (i >= j) & (i - j < size)

            mask = create_block_mask(is_visible, None, None, length, length, device=device.type)
            yield name, functools.partial(compiled, block_mask=mask)


def engine(
    size_name: str, size: GptSize, names: tuple[str, ...], how: train.Measurement
) -> Iterator[Row]:
    """Measure the default command with other keys of the DeepSpeed file.

    Args:
        size_name: Name of the model's size.
        size: That size.
        names: Keys of DS_CONFIGS.
        how: Steps, rates and flags.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "ds_config.json"
        extra = (*how.extra, "--deepspeed_config", str(file))
        for name in names:
            file.write_text(json.dumps(DS_CONFIGS[name]), encoding="utf-8")
            (row,) = train.measure(
                size_name, size, ("default",), dataclasses.replace(how, extra=extra)
            )
            yield {**row, "name": name}


def optimizers(device: torch.device, parameters: int) -> Iterator[Row]:
    """Measure a step of AdamW on fp32 parameters by every implementation that is installed."""
    for name, build in _optimizers():
        tensors = [torch.randn(parameters // 8, device=device) for _ in range(8)]
        for tensor in tensors:
            tensor.grad = torch.randn_like(tensor)
        try:
            step = build(tensors).step
        except Exception as error:  # not installed, or not for this device
            yield {"name": name, "failure": str(error).partition("\n")[0][:200]}
        else:
            yield {"name": name, **timed(step, device)}


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


def disk(device: torch.device, size: int) -> Iterator[Row]:
    """Measure saving and loading a tensor of so many bytes, flushed to the disk."""
    with tempfile.TemporaryDirectory() as folder:
        tensor = torch.empty(size, dtype=torch.uint8, device=device)
        file = Path(folder) / "tensor.pt"
        begin = time.perf_counter()
        with file.open("wb") as stream:
            torch.save(tensor, stream)
            stream.flush()
            os.fsync(stream.fileno())
        saved = time.perf_counter()
        torch.load(file, map_location=device, weights_only=True)
        loaded = time.perf_counter()
    for name, seconds in (("save", saved - begin), ("load", loaded - saved)):
        yield {"name": f"{name} a tensor", "seconds": seconds, "bytes_per_second": size / seconds}


def checkpoints(size: GptSize) -> Iterator[Row]:
    """Measure a run's saves, blocking and asynchronous, and its loading, by its own events."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        tokens = random_tokens(folder / "tokens", size.vocab, 64 * size.sequence)
        micro_batch = min(8, size.micro_batches[0])
        common = {**train.training_flags(size, tokens, micro_batch), "save": folder / "save"}
        runs: dict[str, dict[str, object]] = {
            "save": {"train_iters": 4, "save_interval": 2},
            "asynchronous save": {"train_iters": 6, "save_interval": 2, "async_save": True},
            "load": {"load": folder / "save", "train_iters": 8, "no_save_optim": True},
        }
        for name, more in runs.items():
            outcome = run(["pretrain_gpt.py", *flags({**common, **more})])
            events = (folder / "save" / "events.jsonl").read_text(encoding="utf-8").splitlines()
            found = [json.loads(line) for line in events]
            row: Row = {"name": name, **outcome.describe(), "passed": outcome.status == 0}
            if name == "load":
                phases = [each for each in found if each["event"] == "start-up"][-1]["seconds"]
                row |= {"seconds": phases["checkpoint"], "check": phases["checkpoint's check"]}
            else:
                saved = next(each for each in found if each["event"] == "checkpoint")
                row |= {key: saved[key] for key in ("seconds", "waited")}
            yield row


def timed(work: Callable[[], object], device: torch.device, count: int = 10) -> Row:
    """The work's time, or why it failed: a kernel may not be installed, or not for the device."""
    try:
        return {"seconds": median_seconds(work, device, count)}
    except Exception as error:
        return {"failure": str(error).partition("\n")[0][:200]}


def median_seconds(work: Callable[[], object], device: torch.device, count: int = 10) -> float:
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


def lines(row: Row) -> Iterator[str]:
    """Format the figures of a case."""
    where = "".join(
        f" {row[key]} {unit}"
        for key, unit in (("length", "tokens"), ("chunk_mib", "MiB"))
        if key in row
    )
    figure = row.get("failure", "failed")
    if "seconds" in row:
        figure = f"{row['seconds'] * 1e3:10.2f} ms"
    if "waited" in row:
        figure += f", of which training waited {row['waited'] * 1e3:.2f} ms"
    if "bytes_per_second" in row:
        figure += f", {row['bytes_per_second'] / 1e6:,.0f} MB/s"
    yield f"{row['name'] + where:44} {figure}"
    yield from ("    " + line for line in row.get("output", "").splitlines()[-8:])
