"""Training throughput: the default command and others beside bare loops compiled as a whole."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.accelerator.models import GptSize
from benchmarks.accelerator.processes import Outcome, Row, flags, random_tokens, read_json, run

HERE = Path(__file__).resolve().parent
OURS = {"default": (), "eager": ("--no-compile",)}
"""Contender -> flags of our command."""
BARE = ("plain", "transformers")
"""GPT-2 of PyTorch or transformers in a bare loop, compiled as a whole."""
CONTENDERS = (*OURS, *BARE)
Program = Callable[[Path, int], Outcome]
"""Trains with a micro-batch size and writes the meter's report to a file."""


@dataclass(frozen=True)
class Measurement:
    """How contenders are measured.

    Attributes:
        peak_tflops: Rate that model FLOPs utilization relates to, in 10^12 operations per second.
        warm_up: Steps before the measurement.
        timed: Measured steps.
        extra: Further flags of our commands.
        trace: File for a Chrome trace of a step of our command.
        measured_tflops: Rate of large products on the device, for a second utilization.
        device_gib: Memory of the device.
    """

    peak_tflops: float
    warm_up: int = 6
    timed: int = 15
    extra: tuple[str, ...] = ()
    trace: Path | None = None
    measured_tflops: float | None = None
    device_gib: float = float("inf")


def measure(
    size_name: str, shape: GptSize, names: Sequence[str], how: Measurement
) -> Iterator[Row]:
    """Measure contenders on one size, each in a process of its own, one after the other.

    Args:
        size_name: Key of SIZES.
        shape: That size, perhaps with other micro-batches.
        names: Some of CONTENDERS.
        how: Steps, rates and flags.
    """
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        tokens = random_tokens(folder / "tokens", shape.vocab, 64 * shape.sequence)

        def ours(report: Path, micro_batch: int, more: Sequence[str]) -> Outcome:
            steps = {"train_iters": how.warm_up + how.timed + 2}
            settings = {**training_flags(shape, tokens, micro_batch), **steps}
            counts = (how.warm_up, how.timed, how.trace or "-")
            words = [HERE / "measured_run.py", report, *counts, *flags(settings), *more]
            return run([*words, *how.extra])

        def bare(report: Path, micro_batch: int, kind: str) -> Outcome:
            words = [report, how.warm_up, how.timed, size_name, micro_batch, kind]
            return run([HERE / "bare_loop.py", *words])

        programs = {
            **{name: functools.partial(ours, more=more) for name, more in OURS.items()},
            **{name: functools.partial(bare, kind=name) for name in BARE},
        }
        for name in names:
            row: Row = {"size": size_name, "name": name}
            if name in OURS or shape.is_gpt2:
                row |= largest_that_fits(programs[name], shape, folder, how.device_gib)
            else:
                row["skipped"] = "the bare loops train GPT-2 only"
            yield row | _rates(row, shape, how)


def _rates(row: Row, size: GptSize, how: Measurement) -> Row:
    """Tokens per second, and the utilization that follows from them."""
    if "seconds" not in row:
        return {}
    rate = (size.global_batch or row["micro_batch"]) * size.sequence / row["seconds"]
    flops = size.flops_per_token()
    causal_flops = size.flops_per_token(is_causal=True)
    rates = {
        "tokens_per_second": rate,
        "samples": size.global_batch or row["micro_batch"],
        "goal": str(size.goal),
        "flops_per_token": flops,
        "mfu": flops * rate / (how.peak_tflops * 1e12),
        "causal_flops_per_token": causal_flops,
        "causal_mfu": causal_flops * rate / (how.peak_tflops * 1e12),
    }
    if how.measured_tflops:
        rates["mfu_of_measured"] = flops * rate / (how.measured_tflops * 1e12)
    return rates


def lines(row: Row) -> Iterator[str]:
    """Format a contender's figures."""
    title = f"{row['size']} {row['name']:14}"
    if "seconds" not in row:
        yield f"{title} failed with status {row['status']}:"
        yield from (f"    {line}" for line in row["output"].splitlines()[-8:])
        return
    peak = row["peak_bytes"]
    of_measured = row.get("mfu_of_measured")
    parts = [
        f"{row['tokens_per_second']:,.0f} tokens/s (goal: {row['goal']})",
        f"{row['seconds'] * 1e3:.1f} ms/step",
        f"micro-batch {row['micro_batch']}",
        *([] if row["samples"] == row["micro_batch"] else [f"{row['samples']} samples a step"]),
        f"MFU {row['mfu']:.1%}" + (f" ({of_measured:.1%} of measured)" if of_measured else ""),
        *([] if peak is None else [f"{peak / 2**30:.1f} GiB"]),
        *([] if row["syncs"] is None else [f"{row['syncs']} waits"]),
        *([] if row["busy"] is None else [f"{row['busy']:.0%} busy"]),
    ]
    yield f"{title} " + ", ".join(parts)
    yield (
        f"    MFU: {row['flops_per_token'] / 1e9:.3f} GFLOP per token, of matrix products; "
        f"{row['causal_mfu']:.1%} with half of attention ("
        f"{row['causal_flops_per_token'] / 1e9:.3f} GFLOP), as Megatron-LM counts"
    )


def kernel_lines(row: Row) -> Iterator[str]:
    """Format the kernels of a contender's profiled step."""
    for kernel in row.get("kernels", ()):
        yield f"{kernel['ms']:10.3f} ms {kernel['calls']:6} x {kernel['name'][:100]}"


def largest_that_fits(program: Program, size: GptSize, folder: Path, device_gib: float) -> Row:
    """Figures with the first micro-batch size that fits into the device's memory."""
    row: Row = {}
    for micro_batch in size.micro_batches_for(device_gib):
        report = folder / "report.json"
        report.unlink(missing_ok=True)
        outcome = program(report, micro_batch)
        row |= {"micro_batch": micro_batch, **outcome.describe()}
        if outcome.status == 0:
            return row | read_json(report)
        if not outcome.out_of_memory:
            break
    return row


def training_flags(size: GptSize, tokens: Path, micro_batch: int) -> dict[str, object]:
    """Flags of the default command for bf16 without dropout, on one process."""
    return {
        **size.command(),
        "micro_batch_size": micro_batch,
        "global_batch_size": size.global_batch,
        "attention_dropout": 0,
        "hidden_dropout": 0,
        "bf16": True,
        "lr": 1e-4,
        "adam_beta2": 0.95,
        "weight_decay": 0.1,
        "data_path": tokens,
        "split": "1,0,0",
        "tokenizer_type": "NullTokenizer",
        "vocab_size": size.vocab - 1,  # the end-of-document token is not counted
        "log_interval": 1000,
        "eval_iters": 0,
    }
