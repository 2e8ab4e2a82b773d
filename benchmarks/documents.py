"""Speed of intra-document attention: per-document kernels, dense S x S mask, causal attention.

    python benchmarks/documents.py --threads 1 --output documents.json

Measures the forward and backward pass of the attention core only, in this process. The three
implementations run in turn; ratios are medians over rounds. Results: docs/running/performance.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import this_machine, versions, write_json
from megatron_ds.model.attention.packed import PerDocumentSDPA, document_lengths

LOOP = "per document"
MASKED = "dense mask"
CAUSAL = "causal"


@dataclasses.dataclass(frozen=True)
class Shape:
    """Shape of the attention of one layer over a micro-batch."""

    samples: int
    sequence: int
    heads: int
    head_dim: int
    dtype: str


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--samples", type=int, default=4, help="samples per micro-batch (4)")
    parser.add_argument("--sequence", type=int, default=1024, help="sequence length (1024)")
    parser.add_argument("--heads", type=int, default=12, help="attention heads (12)")
    parser.add_argument("--head-dim", type=int, default=64, help="head dimension (64)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument(
        "--documents", type=int, nargs="+", default=[20, 200, 1000], help="mean document lengths"
    )
    parser.add_argument("--rounds", type=int, default=7, help="number of rounds (7)")
    parser.add_argument(
        "--threads", type=int, default=None, help="torch threads (default: torch's)"
    )
    parser.add_argument("--output", type=Path, default=None, help="output file (JSON)")
    options = parser.parse_args()
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    shape = Shape(options.samples, options.sequence, options.heads, options.head_dim, options.dtype)
    machine = this_machine()
    results = {}
    for mean in options.documents:
        seconds = measure(shape, mean, options.rounds)
        results[mean] = {"seconds": seconds, "speedups": speedups(seconds)}
        times = ", ".join(f"{name} {min(taken) * 1e3:.1f} ms" for name, taken in seconds.items())
        ratios = ", ".join(f"{ratio:.2f} over {name}" for name, ratio in speedups(seconds).items())
        print(f"documents of {mean} tokens: {times}; speedup: {ratios}")
    if options.output is not None:
        result = {
            "machine": dataclasses.asdict(machine),
            "versions": versions(["torch"]),
            "threads": torch.get_num_threads(),
            "shape": dataclasses.asdict(shape),
            "documents": results,
        }
        write_json(options.output, result)
    return 0


def measure(shape: Shape, mean: int, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each implementation by round, after a warm-up round."""
    generator = torch.Generator().manual_seed(mean)
    ends = torch.rand(shape.samples, shape.sequence, generator=generator) < 1.0 / mean
    numbers = ends.cumsum(1, dtype=torch.int32)
    implementations: dict[str, Callable[..., torch.Tensor]] = {
        LOOP: lambda q, k, v: PerDocumentSDPA(document_lengths(numbers)).attend(q, k, v, 0.0),
        MASKED: lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=dense(numbers)),
        CAUSAL: lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
    }
    seconds: dict[str, list[float]] = {name: [] for name in implementations}
    for _ in range(rounds + 1):
        for name, attend in implementations.items():
            seconds[name].append(_step(shape, attend))
    return {name: taken[1:] for name, taken in seconds.items()}


def dense(numbers: torch.Tensor) -> torch.Tensor:
    """Return the boolean attention mask [B, 1, S, S] that the forks pass to attention."""
    same = numbers[:, None, :, None] == numbers[:, None, None, :]
    return same & torch.ones_like(same[0, 0]).tril()


def speedups(seconds: dict[str, list[float]]) -> dict[str, float]:
    """Return the speedup of per-document attention over each other implementation."""
    return {
        name: statistics.median(b / a for a, b in zip(seconds[LOOP], taken, strict=True))
        for name, taken in seconds.items()
        if name != LOOP
    }


def _step(shape: Shape, attend: Callable[..., torch.Tensor]) -> float:
    size = shape.sequence, shape.samples, shape.heads, shape.head_dim
    dtype = getattr(torch, shape.dtype)
    q, k, v = (
        torch.randn(size, dtype=dtype).permute(1, 2, 0, 3).requires_grad_() for _ in range(3)
    )
    begin = time.perf_counter()
    out = attend(q, k, v)
    torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    return time.perf_counter() - begin


if __name__ == "__main__":
    sys.exit(main())
