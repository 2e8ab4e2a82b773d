#!/usr/bin/env python
"""The time of AdamW's step next to a copy of the bytes that it reads and writes.

    python benchmarks/optimizer_step.py --threads 1 --output results.jsonl

A step reads weights, gradients and moments once and writes weights and moments: 28 bytes of an
element in fp32, 14 in bf16. The copy reads and writes as many bytes in all. Both are measured in
turn by CPU seconds, and the figure is the ratio of the least ones. Cases: `torch` is torch's fused
kernel, which trains with states in fp32, `deepspeed` DeepSpeedCPUAdam of offloaded states, `bf16`
the step that rounds stochastically, eager, and `compiled` the same by torch.compile.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import this_machine, versions

SETTINGS = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
IN_FP32 = 7 * 4
IN_BF16 = 7 * 2
"""Bytes of an element that a step reads and writes: four tensors are read, three written."""
Step = Callable[[], object]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    add = parser.add_argument
    add("--elements", type=int, default=50_000_000, help="of the weights (default: %(default)s)")
    add("--threads", type=int, default=torch.get_num_threads(), help="default: %(default)s")
    add("--rounds", type=int, default=7, help="measurements of each (default: %(default)s)")
    add("--cases", nargs="+", choices=CASES, default=list(CASES), metavar="NAME", help="of CASES")
    add("--output", type=Path, help="file to which the figures are appended (JSON)")
    options = parser.parse_args(argv)
    torch.set_num_threads(options.threads)
    for name in options.cases:
        make, size = CASES[name]
        row = measure(make(options.elements), size * options.elements, options.rounds)
        row |= {"name": name, "threads": options.threads, "elements": options.elements}
        text = f"{row['step_ms']:.1f} ms, a copy {row['copy_ms']:.1f} ms: {row['ratio']:.2f}"
        print(f"{name:10} {text} ({row['gb_per_s']:.1f} GB/s)", flush=True)
        if options.output is not None:
            machine = {**vars(this_machine()), **versions(("torch", "deepspeed"))}
            with options.output.open("a", encoding="utf-8") as file:
                file.write(json.dumps({**row, "machine": machine}) + "\n")
    return 0


def measure(step: Step, size: int, rounds: int) -> dict[str, Any]:
    """Measure a step and a copy of half of its bytes, which reads and writes all of them."""
    source = torch.ones(size // 2, dtype=torch.uint8)
    target = torch.zeros_like(source)

    def copy() -> None:
        target.copy_(source)

    step()  # creates the states, and compiles
    times: dict[str, list[float]] = {"step": [], "copy": []}
    for _ in range(rounds):
        for name, action in (("step", step), ("copy", copy)):
            start = time.process_time()
            action()
            times[name].append(time.process_time() - start)
    seconds = {name: min(values) for name, values in times.items()}
    return {
        "step_ms": seconds["step"] * 1e3,
        "copy_ms": seconds["copy"] * 1e3,
        "ratio": seconds["step"] / seconds["copy"],
        "gb_per_s": size / seconds["step"] / 1e9,
    }


def _weights(elements: int, dtype: torch.dtype) -> Tensor:
    weights = torch.nn.Parameter(torch.randn(elements).to(dtype))
    weights.grad = torch.randn(elements).mul_(1e-2).to(dtype)
    return weights


def _torch(elements: int) -> Step:
    weights = _weights(elements, torch.float32)
    return torch.optim.AdamW([weights], fused=True, **SETTINGS).step  # type: ignore[arg-type]


def _deepspeed(elements: int) -> Step:
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    weights = _weights(elements, torch.float32)
    step: Step = DeepSpeedCPUAdam([weights], adamw_mode=True, **SETTINGS).step
    return step


def _bf16(elements: int, *, is_compiled: bool = False) -> Step:
    from megatron_ds.engine.optimizers.rounding import Block
    from megatron_ds.engine.optimizers.stochasticadamw import StochasticAdamW, compile_update

    weights = _weights(elements, torch.bfloat16)
    optimizer = StochasticAdamW([{"params": [weights]}], **SETTINGS)
    block = Block("weight", 1, elements, 0, elements, 0, elements)
    compiled, problem = compile_update(weights.device) if is_compiled else (None, None)
    if problem is not None:
        raise SystemExit(str(problem))
    optimizer.attach(1, {weights: [block]}, compiled)
    return optimizer.step


def _compiled(elements: int) -> Step:
    return _bf16(elements, is_compiled=True)


CASES: dict[str, tuple[Callable[[int], Step], int]] = {
    "torch": (_torch, IN_FP32),
    "deepspeed": (_deepspeed, IN_FP32),
    "bf16": (_bf16, IN_BF16),
    "compiled": (_compiled, IN_BF16),
}
"""Name -> makes the step of so many elements, and bytes of an element that it reads and writes."""


if __name__ == "__main__":
    raise SystemExit(main())
