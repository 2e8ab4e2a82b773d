#!/usr/bin/env python
"""Checks and measurements on one accelerator, each subcommand within ten minutes.

    python benchmarks/gpu.py COMMAND [--size SIZE] [--output FILE]

With `--size tiny` every subcommand also runs on a CPU, which tries the program, not the device.
docs/gpu.md says what each one is for and what to expect.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.accelerator import train
from benchmarks.accelerator.models import PEAK_TFLOPS, SIZES
from benchmarks.accelerator.processes import REPOSITORY, run
from benchmarks.common import this_machine, versions, write_json

TINY = "tiny"
Result = dict[str, Any]


def main(argv: list[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    begin = time.perf_counter()
    result, lines = COMMANDS[options.command](options)
    print("\n".join(lines))
    print(f"{options.command}: {time.perf_counter() - begin:.0f} s")
    if options.output is not None:
        about = {
            "machine": {**dataclasses.asdict(this_machine()), "device": _device_name()},
            "versions": versions(("torch", "deepspeed", "transformers", "numpy")),
            "command": options.command,
            "size": options.size,
        }
        write_json(options.output, {**about, **result})
        print(f"wrote {options.output}")
    return 0 if result.get("passed", True) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=str(__doc__).splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("command", choices=sorted(COMMANDS))
    add("--size", choices=sorted(SIZES), default="124m", help="size of the model")
    add("--jobs", type=int, default=1, help="smoke: runs at a time on the device")
    add("--compare", nargs="+", default=None, help="train: contenders, by their names")
    add("--flags", nargs=argparse.REMAINDER, default=[], help="further flags of our commands")
    add("--peak-tflops", type=float, default=PEAK_TFLOPS, help="dense bf16 rate, for the MFU")
    add("--trace", type=Path, help="profile: file for a Chrome trace of one step")
    add("--output", type=Path, help="output file (JSON)")
    return parser


def _smoke(options: argparse.Namespace) -> tuple[Result, list[str]]:
    """Runs of every feature, compared with the CPU."""
    from benchmarks.accelerator import smoke

    tiny = options.size == TINY
    names = ("cpu", "fp32", "bf16") if tiny else tuple(smoke.CASES)
    result = smoke.measure(3 if tiny else 50, names=names, jobs=options.jobs, tiny=tiny)
    return result, smoke.lines(result)


def _tests(options: argparse.Namespace) -> tuple[Result, list[str]]:
    """The tests marked `gpu`."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        # Named files or folders, or all of them, whose collection takes a quarter of a minute.
        folders = [] if any((REPOSITORY / flag).exists() for flag in options.flags) else ["tests"]
        words = ["-m", "pytest", "-m", "gpu", *folders, f"--junit-xml={report}", *options.flags]
        done = run(words)
        suite = next(ElementTree.parse(report).iter("testsuite")) if report.exists() else None
    counts = {} if suite is None else {k: int(v) for k, v in suite.items() if v.isdigit()}
    return (
        {"tests": counts, **done.describe(), "passed": done.status == 0},
        done.output.splitlines()[-40:],
    )


def _train(options: argparse.Namespace) -> tuple[Result, list[str]]:
    """Throughput beside bare loops."""
    names = tuple(options.compare or (train.OURS, train.COMPILED, train.BARE, train.TRANSFORMERS))
    found = train.measure(options.size, names=names, **_steps(options))
    return found, train.lines(found)


def _profile(options: argparse.Namespace) -> tuple[Result, list[str]]:
    """Kernels of a step of the default command."""
    found = train.measure(options.size, names=(train.OURS,), trace=options.trace, **_steps(options))
    (row,) = found["contenders"]
    return found, [*train.lines(found), *train.kernel_lines(row)]


def _sweep(options: argparse.Namespace) -> tuple[Result, list[str]]:
    """Alternatives of kernels and settings."""
    from benchmarks.accelerator import sweep

    tiny, device, million = options.size == TINY, _device(), 1_000_000
    lengths = (64,) if tiny else (1024, 2048, 8192, 32768)
    size = SIZES[options.size]
    tokens, heads, head_dim = (128, 2, 32) if tiny else (32768, size.heads, 64)
    configs = ("default",) if tiny else tuple(sweep.DS_CONFIGS)
    with tempfile.TemporaryDirectory() as folder:
        result = {
            "attention": sweep.attention(
                device, lengths, tokens=tokens, heads=heads, head_dim=head_dim
            ),
            "engine": sweep.engine(options.size, configs, **_steps(options)),
            "optimizers": sweep.optimizers(device, million if tiny else 124 * million),
            "disk": sweep.disk(device, Path(folder), (1 if tiny else 1000) * million),
        }
    return result, sweep.lines(result)


def _generate(options: argparse.Namespace) -> tuple[Result, list[str]]:
    """Generation speed beside transformers."""
    from benchmarks.accelerator import generate

    tiny = options.size == TINY
    batches, new_tokens = ((1, 2), 8) if tiny else ((1, 8, 64), 256)
    rows = generate.measure(_device(), options.size, batches=batches, new_tokens=new_tokens)
    return {"generation": rows}, generate.lines(rows)


COMMANDS = {
    "smoke": _smoke,
    "tests": _tests,
    "train": _train,
    "profile": _profile,
    "sweep": _sweep,
    "generate": _generate,
}


def _steps(options: argparse.Namespace) -> dict[str, Any]:
    """Numbers of steps, and the device's rate."""
    counts = {"warm_up": 1, "timed": 2} if options.size == TINY else {}
    return {**counts, "extra": tuple(options.flags), "peak_tflops": options.peak_tflops}


def _device() -> Any:
    """This process's device, after a process group of one process has been set up."""
    from benchmarks.train_step import start_process_group

    return start_process_group(len(os.sched_getaffinity(0)))


def _device_name() -> str:
    import torch
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    if accelerator.device_name() == "cpu":
        return "cpu"
    backend = getattr(torch, accelerator.device_name())
    return str(backend.get_device_name())


if __name__ == "__main__":
    raise SystemExit(main())
