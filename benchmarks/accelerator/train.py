"""Training throughput: the default command and --compile beside bare loops compiled as a whole."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.accelerator.models import SIZES, GptSize
from benchmarks.accelerator.processes import Outcome, flags, random_tokens, read_json, run

HERE = Path(__file__).resolve().parent
OURS, COMPILED, BARE, TRANSFORMERS = (
    "megatron_ds",
    "megatron_ds --compile",
    "plain PyTorch, torch.compile",
    "transformers, torch.compile",
)
Program = Callable[[Path, int], Outcome]
"""Trains with a micro-batch size and writes the meter's report to a file."""


def measure(
    size_name: str,
    *,
    names: tuple[str, ...] = (OURS, COMPILED, BARE, TRANSFORMERS),
    extra: tuple[str, ...] = (),
    trace: Path | None = None,
    warm_up: int = 10,
    timed: int = 20,
    peak_tflops: float,
) -> dict[str, Any]:
    """Measure contenders on one size, each in a process of its own, one after the other.

    Args:
        size_name: Key of SIZES.
        names: Contenders.
        extra: Further flags of our commands.
        trace: File for a Chrome trace of a step of our command.
        warm_up: Steps before the measurement.
        timed: Measured steps.
        peak_tflops: Rate that model FLOPs utilization relates to, in 10^12 operations per second.
    """
    size = SIZES[size_name]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        tokens = random_tokens(folder / "tokens", size.vocab, 64 * size.sequence)

        def ours(report: Path, micro_batch: int, *more: str) -> Outcome:
            settings = {**_settings(size, tokens, micro_batch), "train_iters": warm_up + timed + 2}
            words = [report, warm_up, timed, trace or "-", *flags(settings), *more, *extra]
            return run([HERE / "measured_run.py", *words])

        def bare(report: Path, micro_batch: int, kind: str) -> Outcome:
            words = [report, warm_up, timed, size_name, micro_batch, kind]
            return run([HERE / "bare_loop.py", *words])

        programs: dict[str, Program] = {
            OURS: ours,
            COMPILED: lambda report, micro: ours(report, micro, "--compile"),
            BARE: lambda report, micro: bare(report, micro, "plain"),
            TRANSFORMERS: lambda report, micro: bare(report, micro, "transformers"),
        }
        rows = [_largest_that_fits(name, programs[name], size, folder) for name in names]
    for row in rows:
        if "seconds" in row:
            rate = row["micro_batch"] * size.sequence / row["seconds"]
            row["tokens_per_second"] = rate
            row["mfu"] = size.mfu(rate, peak_tflops)
    return {"size": size_name, "goal_tokens_per_second": size.goal, "contenders": rows}


def lines(result: dict[str, Any]) -> list[str]:
    """Format the figures of `measure`."""
    text = [f"{result['size']} (goal {result['goal_tokens_per_second'] or 'none'} tokens/s)"]
    text.append(
        f"{'contender':30}{'batch':>7}{'ms/step':>10}{'tokens/s':>11}{'MFU':>7}"
        f"{'GiB':>7}{'syncs':>7}{'busy':>7}"
    )
    for row in result["contenders"]:
        if "seconds" not in row:
            text.append(f"{row['name']:30}  failed with status {row['status']}:")
            text += [f"    {line}" for line in row["output"].splitlines()[-8:]]
            continue
        peak = row["peak_bytes"]
        text.append(
            f"{row['name']:30}{row['micro_batch']:7}{row['seconds'] * 1e3:10.1f}"
            f"{row['tokens_per_second']:11.0f}{row['mfu']:7.1%}"
            f"{'-' if peak is None else f'{peak / 2**30:.1f}':>7}"
            f"{'-' if row['syncs'] is None else row['syncs']:>7}"
            f"{'-' if row['busy'] is None else format(row['busy'], '.0%'):>7}"
        )
    return text


def kernel_lines(row: dict[str, Any]) -> list[str]:
    """Format the kernels of a contender's profiled step."""
    return [
        f"{kernel['ms']:10.3f} ms {kernel['calls']:6} x {kernel['name'][:100]}"
        for kernel in row.get("kernels", ())
    ]


def _largest_that_fits(name: str, program: Program, size: GptSize, folder: Path) -> dict[str, Any]:
    """Figures with the first micro-batch size that fits into the device's memory."""
    row: dict[str, Any] = {"name": name}
    for micro_batch in size.micro_batches:
        report = folder / "report.json"
        report.unlink(missing_ok=True)
        outcome = program(report, micro_batch)
        row |= {"micro_batch": micro_batch, **outcome.describe()}
        if outcome.status == 0:
            return row | read_json(report)
        if not outcome.out_of_memory:
            break
    return row


def _settings(size: GptSize, tokens: Path, micro_batch: int) -> dict[str, object]:
    """Flags of the default command for bf16 without dropout, on one process."""
    return {
        "num_layers": size.layers,
        "hidden_size": size.hidden,
        "num_attention_heads": size.heads,
        "seq_length": size.sequence,
        "micro_batch_size": micro_batch,
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
