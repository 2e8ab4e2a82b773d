#!/usr/bin/env python
"""Which learning rate is the best at each width or depth, with muP and without.

    python benchmarks/transfer.py --widths 64 128 256 512 --seeds 3 --output transfer.json
    python benchmarks/transfer.py --depths 2 4 8 16 --widths 64 --output depths.json

Every model is trained in one process on bytes of the standard library of Python, with a warm-up and
a linear decay to 0; a seed determines weights and data. The loss is the mean of the last tenth of
the steps, whose data no step before has seen. The best rate is the vertex of a parabola through the
three rates around the smallest loss, in powers of two. Models of the base size are the same with
and without muP, and trained once. Results are written after every run, and a run that is recorded
in the output is not repeated.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import this_machine, versions, write_json
from megatron_ds.config import ModelConfig, OptimizerConfig
from megatron_ds.engine.optimizers.adamw import AdamW
from megatron_ds.engine.optimizers.param_groups import parameter_groups, set_lr_and_weight_decay
from megatron_ds.model.declaration.rates import multiplier_rule
from megatron_ds.model.gpt import GPTModel
from megatron_ds.parallel.mesh import Mesh
from megatron_ds.parallel.rng import RngStreams

HEAD = 16
SEQUENCE = 64
BATCH = 8
WARM_UP = 0.1
LAST = 0.1
"""Fraction of the steps whose losses are averaged."""
TEXT_BYTES = 4_000_000
SHAPE: dict[str, Any] = {
    "seq_length": SEQUENCE,
    "vocab_size": 256,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "init_method_std": 0.05,
    "untie_embeddings_and_output_weights": True,
    "normalization": "RMSNorm",
    "position_embedding_type": "rope",
}
MUP = "muP"
PLAIN = "without"
PARAMETRIZATIONS = (PLAIN, MUP)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    add = parser.add_argument
    add("--widths", type=int, nargs="+", default=[64, 128, 256, 512], help="the first is the base")
    add("--depths", type=int, nargs="+", default=[2], help="the first is the base")
    add("--rates", type=int, nargs="+", default=[-9, -8, -7, -6, -5], help="exponents of 2")
    add("--seeds", type=int, default=3, help="runs of each model and rate (default: %(default)s)")
    add("--steps", type=int, default=300, help="of a run (default: %(default)s)")
    add("--threads", type=int, default=1, help="threads of a run (default: %(default)s)")
    add("--output", type=Path, required=True, help="file for the results (JSON)")
    options = parser.parse_args(argv)
    torch.set_num_threads(options.threads)
    runs = recorded_runs(options.output)
    data = text()
    for key, config in cases(options):
        if key not in runs:
            start = time.process_time()
            loss = train(config, 2.0 ** key[3], options.steps, key[4], data)
            runs[key] = {"loss": loss, "cpu_seconds": round(time.process_time() - start, 1)}
            print(*key, f"loss {loss:.4f}", flush=True)
            write_json(options.output, record(options, runs))
    for line in table(runs):
        print(line)
    return 0


Key = tuple[str, int, int, int, int]
"""Parametrization, width, depth, exponent of the rate, seed."""


def cases(options: argparse.Namespace) -> Iterator[tuple[Key, ModelConfig]]:
    """All runs; those without muP first."""
    base = options.widths[0], options.depths[0]
    sizes = list(itertools.product(options.widths, options.depths))
    for name, seed, (width, depth), rate in itertools.product(
        PARAMETRIZATIONS, range(options.seeds), sizes, options.rates
    ):
        if name == MUP and (width, depth) == base:
            continue
        mup: dict[str, Any] = {}
        if name == MUP:
            mup = {"use_mup": True, "mup_base_hidden_size": base[0], "mup_base_head_dim": HEAD}
            if len(options.depths) > 1:
                mup["mup_base_num_layers"] = base[1]
        heads = width // HEAD
        model = ModelConfig(
            num_layers=depth, hidden_size=width, num_attention_heads=heads, **SHAPE, **mup
        )
        yield (name, width, depth, rate, seed), model


def text() -> Tensor:
    """Bytes of the standard library, files in the order of their names."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    content = b"\0".join(file.read_bytes() for file in files)[:TEXT_BYTES]
    return torch.frombuffer(bytearray(content), dtype=torch.uint8).long()


def train(config: ModelConfig, lr: float, steps: int, seed: int, data: Tensor) -> float:
    """The mean loss of the last steps."""
    options = OptimizerConfig(lr=lr, adam_beta2=0.95)
    model = GPTModel(config, mesh=Mesh.single(), rng=RngStreams(seed), seed=seed)
    rule = multiplier_rule(options, config)
    groups, factors = parameter_groups(model, 0.0, rule, options.adam_eps)
    optimizer = AdamW(groups, lr=lr, betas=(0.9, 0.95), eps=options.adam_eps)
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randperm(len(data) // SEQUENCE - 1, generator=generator) * SEQUENCE
    losses: list[float] = []
    for step in range(steps):
        warm_up = WARM_UP * steps
        factor = min((step + 1) / warm_up, (steps - step) / (steps - warm_up))
        set_lr_and_weight_decay(optimizer.param_groups, factors, lr * factor, 0.0)
        chosen = starts[step * BATCH : (step + 1) * BATCH, None] + torch.arange(SEQUENCE + 1)
        tokens = data[chosen]
        loss, _ = model(tokens[:, :-1], tokens[:, 1:]).weighted(None)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return statistics.mean(losses[-max(1, round(LAST * steps)) :])


def mean_losses(runs: dict[Key, dict[str, float]]) -> dict[tuple[str, int, int], dict[int, float]]:
    """By model the mean loss over the seeds at each rate."""
    losses: dict[tuple[str, int, int], dict[int, list[float]]] = {}
    for (name, width, depth, rate, _), run in runs.items():
        losses.setdefault((name, width, depth), {}).setdefault(rate, []).append(run["loss"])
    return {
        model: {rate: statistics.mean(values) for rate, values in sorted(of_rates.items())}
        for model, of_rates in losses.items()
    }


def best_rate(losses: dict[int, float]) -> float:
    """The exponent of the best rate; the smallest or largest rate if no smaller loss is beyond."""
    rates = sorted(losses)
    index = rates.index(min(losses, key=losses.__getitem__))
    if index in (0, len(rates) - 1):
        return rates[index]
    left, middle, right = (losses[rates[index + offset]] for offset in (-1, 0, 1))
    if not all(map(math.isfinite, (left, middle, right))):
        return rates[index]
    return rates[index] + 0.5 * (left - right) / (left - 2 * middle + right)


def table(runs: dict[Key, dict[str, float]]) -> Iterator[str]:
    """Rows of mean losses and the best rates."""
    models = mean_losses(runs)
    rates = sorted({rate for losses in models.values() for rate in losses})
    yield "| | width | depth | " + " | ".join(f"2^{rate}" for rate in rates) + " | best rate |"
    yield "|---" * (len(rates) + 4) + "|"
    for (name, width, depth), losses in models.items():
        cells = " | ".join(f"{losses[rate]:.3f}" if rate in losses else "" for rate in rates)
        yield f"| {name} | {width} | {depth} | {cells} | {2 ** best_rate(losses):.4f} |"


def record(options: argparse.Namespace, runs: dict[Key, dict[str, float]]) -> dict[str, Any]:
    """The content of the output."""
    settings = {name: value for name, value in vars(options).items() if name != "output"}
    names = ("parametrization", "width", "depth", "rate_exponent", "seed")
    return {
        "machine": vars(this_machine()),
        "versions": versions(["torch"]),
        "settings": settings,
        "runs": [dict(zip(names, key, strict=True)) | run for key, run in runs.items()],
    }


def recorded_runs(path: Path) -> dict[Key, dict[str, float]]:
    """The runs of a file of results; none if there is no file."""
    if not path.is_file():
        return {}
    runs = json.loads(path.read_text(encoding="utf-8"))["runs"]
    names = ("parametrization", "width", "depth", "rate_exponent", "seed")
    return {
        tuple(run[name] for name in names): {
            name: value for name, value in run.items() if name not in names
        }
        for run in runs
    }


if __name__ == "__main__":
    sys.exit(main())
