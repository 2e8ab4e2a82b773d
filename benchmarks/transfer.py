#!/usr/bin/env python
"""Which learning rate is the best at each width and depth, with muP and without.

    python benchmarks/transfer.py --output transfer.json --workers 2
    python benchmarks/transfer.py --output transfer.json --page docs/training/transfer.md

Every model is trained on bytes of the standard library of Python, with a warm-up and a linear decay
to 0; a seed determines weights and data. The loss is the mean of the last tenth of the steps, whose
data no step before has seen. Losses are averaged over the seeds, and the best rate is the vertex of
a parabola in the exponents of two, fitted by least squares to the rates within a factor of two of
the one with the smallest loss. With --finer the models whose best rates are compared have rates
between the powers of two as well, because a tolerance of 1.4 is half a step of the powers. Models
of the base size are the same with and without muP, and trained once. Results are written after
every run, and a run that is recorded in the output is not repeated.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import multiprocessing
import statistics
import sys
import sysconfig
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from textwrap import fill
from typing import Any, NamedTuple

import numpy as np
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
BATCH = 3
WARM_UP = 0.1
LAST = 0.1
"""Fraction of the steps whose losses are averaged."""
TEXT_BYTES = 4_000_000
FEED_FORWARD = 2
"""Feed-forward size relative to the hidden size."""
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
CONSTANT = "constant"
LABELS = {PLAIN: "without muP", CONSTANT: "with the base's deviations", MUP: "with muP"}
RESIDUAL = ("attention.proj.weight", "mlp.fc_out.weight")
"""Ends of the names of weights that write to the residual stream."""
BETWEEN = (-9.5, -8.5, -7.5)
"""Exponents of rates between the powers of two."""
TOLERANCE = 1.4
"""Factor within which the best rates of the smallest and the largest model have to agree."""
MARKS = ("<!-- begin: measured -->\n", "<!-- end: measured -->\n")
"""Lines of the page between which the program writes."""
WIDTH = 118
"""Characters of a line of the page, besides tables."""


class Case(NamedTuple):
    """A run."""

    name: str
    """MUP, PLAIN, or over depths CONSTANT: what the authors of CompleteP compare it with, initial
    deviations that do not depend on the depth. PLAIN has Megatron's, 1 / sqrt(2 depth)."""
    width: int
    depth: int
    exponent: float
    """Of the rate, to the base 2."""
    seed: int


class Result(NamedTuple):
    """What a run took and reached."""

    loss: float
    cpu_seconds: float


Losses = Mapping[tuple[str, int, int], Mapping[float, float]]
"""Mean loss over the seeds by parametrization, width and depth, and by exponent."""


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    run(options)
    runs = comparable(options, recorded_runs(options.output))
    lines = list(summary(options, runs))
    print(*lines, sep="\n")
    if options.page is not None:
        write_page(options, runs, lines)
    return 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    add = parser.add_argument
    add("--widths", type=int, nargs="+", default=[64, 128, 256, 512], help="the first is the base")
    add("--depths", type=int, nargs="+", default=[2, 4, 8, 16], help="the first is the base")
    add("--rates", type=int, nargs="+", default=[-10, -9, -8, -7, -6], help="exponents of 2")
    finer = "rates between the powers for the models that are compared, and the second control"
    add("--finer", action="store_true", help=finer)
    add("--seeds", type=int, default=3, help="runs of each model and rate (default: %(default)s)")
    add("--steps", type=int, default=300, help="of a run (default: %(default)s)")
    add("--workers", type=int, default=1, help="processes (default: %(default)s)")
    add("--output", type=Path, required=True, help="file for the results (JSON)")
    add("--page", type=Path, help="page into which tables and picture are written")
    return parser.parse_args(argv)


def run(options: argparse.Namespace) -> None:
    """Trains the models that the output does not have."""
    runs = recorded_runs(options.output)
    missing = [case for case in cases(options) if case not in runs]
    jobs = [(case, options.widths[0], options.depths[0], options.steps) for case in missing]
    if jobs:
        with multiprocessing.get_context("spawn").Pool(options.workers, prepare) as pool:
            for case, result in pool.imap_unordered(run_case, jobs):
                runs[case] = result
                print(*case, f"loss {result.loss:.4f}, {result.cpu_seconds} s", flush=True)
                write_json(options.output, record(options, runs))


def cases(options: argparse.Namespace) -> Iterator[Case]:
    """All runs, by the seed; of each the base and both ends first, between which the best rates are
    compared."""
    widths, depths = studies(options).values()
    base = widths[0]
    widest = widths[-1]
    deepest = depths[-1]
    compared = {(PLAIN, base), (MUP, widest), *((name, deepest) for name in LABELS)}
    models = dict.fromkeys(
        (name, size)
        for size in (base, widest, deepest, *widths, *depths)
        for name in LABELS
        if name == PLAIN
        or (size != base and name == MUP)
        or (name == CONSTANT and size == deepest and options.finer)
    )
    for seed, (name, size) in itertools.product(range(options.seeds), models):
        between = BETWEEN if options.finer and (name, size) in compared else ()
        for exponent in (*options.rates, *between):
            yield Case(name, size[0], size[1], exponent, seed)


def prepare() -> None:
    """Prepares a process of the pool."""
    torch.set_num_threads(1)


def run_case(job: tuple[Case, int, int, int]) -> tuple[Case, Result]:
    """Trains the model of a case.

    Args:
        job: The case, width and depth of the base model, and the number of steps.
    """
    case, base_width, base_depth, steps = job
    start = time.process_time()
    mup: dict[str, Any] = {}
    if case.name == MUP:
        mup = {"use_mup": True, "mup_base_hidden_size": base_width, "mup_base_head_dim": HEAD}
        if case.depth != base_depth:
            mup["mup_base_num_layers"] = base_depth
    model = ModelConfig(
        num_layers=case.depth,
        hidden_size=case.width,
        num_attention_heads=case.width // HEAD,
        ffn_hidden_size=FEED_FORWARD * case.width,
        **SHAPE,
        **mup,
    )
    gain = (case.depth / base_depth) ** 0.5 if case.name == CONSTANT else 1.0
    loss = train(model, 2.0**case.exponent, steps, case.seed, text(), gain)
    return case, Result(loss, round(time.process_time() - start, 1))


def text() -> Tensor:
    """Bytes of the standard library, files in the order of their names."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    content = b"\0".join(file.read_bytes() for file in files)[:TEXT_BYTES]
    return torch.frombuffer(bytearray(content), dtype=torch.uint8).long()


def train(
    config: ModelConfig, lr: float, steps: int, seed: int, data: Tensor, gain: float
) -> float:
    """The mean loss of the last steps.

    Args:
        config: Of the model.
        lr: Highest learning rate.
        steps: Number of steps.
        seed: Of weights and data.
        data: Tokens.
        gain: Factor of the initial weights that write to the residual stream.
    """
    options = OptimizerConfig(lr=lr, adam_beta2=0.95)
    model = GPTModel(config, mesh=Mesh.single(), rng=RngStreams(seed), seed=seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(RESIDUAL):
                parameter.mul_(gain)
    rule = multiplier_rule(options, config)
    groups, factors = parameter_groups(model, 0.0, rule, options.adam_eps)
    optimizer = AdamW(groups, lr=lr, betas=(0.9, 0.95), eps=options.adam_eps, fused=True)
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


def comparable(options: argparse.Namespace, runs: Mapping[Case, Result]) -> dict[Case, Result]:
    """The runs that the options ask for, of the seeds with which all models were trained; without
    one, of all seeds."""
    asked = list(cases(options))
    missing = {case.seed for case in asked if case not in runs}
    complete = {case: runs[case] for case in asked if case.seed not in missing}
    return complete or {case: runs[case] for case in asked if case in runs}


def mean_losses(runs: Mapping[Case, Result]) -> Losses:
    """The mean losses of the runs."""
    losses: dict[tuple[str, int, int], dict[float, list[float]]] = {}
    for case, result in runs.items():
        model = losses.setdefault((case.name, case.width, case.depth), {})
        model.setdefault(case.exponent, []).append(result.loss)
    return {
        model: {exponent: statistics.mean(values) for exponent, values in sorted(rates.items())}
        for model, rates in losses.items()
    }


def best_rate(losses: Mapping[float, float]) -> float:
    """The exponent of the best rate; the smallest or largest rate if no smaller loss is beyond."""
    rates = sorted(losses)
    smallest = min(rates, key=losses.__getitem__)
    near = [rate for rate in rates if abs(rate - smallest) <= 1]
    values = [losses[rate] for rate in near]
    if smallest in (rates[0], rates[-1]) or not all(map(math.isfinite, values)):
        return smallest
    offsets = np.array(near) - smallest
    curvature, slope, _ = np.polyfit(offsets, np.array(values), 2)
    return smallest - float(slope / (2 * curvature))


def studies(options: argparse.Namespace) -> dict[str, list[tuple[int, int]]]:
    """Widths and depths of the models of each study, the base first."""
    width = options.widths[0]
    depth = options.depths[0]
    return {
        "width": [(size, depth) for size in options.widths],
        "depth": [(width, size) for size in options.depths],
    }


def factors(
    options: argparse.Namespace, runs: Mapping[Case, Result], study: str
) -> dict[str, float]:
    """Factor between the best rates of the first and the last model of a study, by
    parametrization, as far as the last one was trained."""
    losses = mean_losses(runs)
    first, *_, last = studies(options)[study]
    base = best_rate(losses[(PLAIN, *first)])
    return {
        name: 2 ** abs(best_rate(losses[(name, *last)]) - base)
        for name in LABELS
        if (name, *last) in losses
    }


def losses_at_base_rate(
    options: argparse.Namespace, runs: Mapping[Case, Result], study: str
) -> tuple[int, dict[str, float]]:
    """Exponent of the rate with the least loss of the base, and the losses of the last model of a
    study at this rate, by parametrization, as far as it was trained."""
    losses = mean_losses(runs)
    first, *_, last = studies(options)[study]
    base = losses[(PLAIN, *first)]
    exponent = min(options.rates, key=base.__getitem__)
    names = (name for name in LABELS if (name, *last) in losses)
    return exponent, {name: losses[(name, *last)][exponent] for name in names}


def by_seed(
    options: argparse.Namespace, runs: Mapping[Case, Result], study: str, name: str
) -> Iterator[str]:
    """The factor of each seed, whose losses are not averaged with others."""
    for seed in sorted({case.seed for case in runs}):
        alone = {case: result for case, result in runs.items() if case.seed == seed}
        yield f"{factors(options, alone, study)[name]:.2f}"


def table(options: argparse.Namespace, runs: Mapping[Case, Result], study: str) -> Iterator[str]:
    """Rows of the mean losses of a study with the best rates, in Markdown."""
    losses = mean_losses(runs)
    models = studies(options)[study]
    exponents = sorted((*options.rates, *(BETWEEN if options.finer else ())))
    header = " | ".join(f"2^{exponent:g}" for exponent in exponents)
    yield f"| | {study} | {header} | best rate | relative to the base |"
    yield "|---" * (len(exponents) + 4) + "|"
    base = best_rate(losses[(PLAIN, *models[0])])
    for name, model in itertools.product(LABELS, models):
        if (name, *model) not in losses:
            continue
        rates = losses[(name, *model)]
        best = best_rate(rates)
        label = "base" if model == models[0] else LABELS[name]
        cells = " | ".join(f"{rates[at]:.3f}" if at in rates else "" for at in exponents)
        size = model[study == "depth"]
        yield f"| {label} | {size} | {cells} | {2**best:.4f} | {2 ** (best - base):.2f} |"


def summary(options: argparse.Namespace, runs: Mapping[Case, Result]) -> Iterator[str]:
    """The tables, and what follows from them, in Markdown."""
    for study, models in studies(options).items():
        yield from table(options, runs, study)
        yield ""
        small, large = (model[study == "depth"] for model in (models[0], models[-1]))
        for name, factor in factors(options, runs, study).items():
            agrees = "within" if factor <= TOLERANCE else "not within"
            yield (
                f"The best rates at {study} {small} and {large} differ by a factor of "
                f"{factor:.2f} {LABELS[name]}, {agrees} {TOLERANCE}; "
                f"by seed: {', '.join(by_seed(options, runs, study, name))}."
            )
        exponent, losses = losses_at_base_rate(options, runs, study)
        if losses:
            texts = [f"{loss:.3f} {LABELS[name]}" for name, loss in losses.items()]
            yield (
                f"At the best of the powers of two for the base, 2^{exponent}, the loss at "
                f"{study} {large} is {', '.join(texts)}."
            )
        yield ""
    seeds = len({case.seed for case in runs})
    seconds = sum(result.cpu_seconds for result in runs.values())
    yield (
        f"{len(runs)} runs of {options.steps} steps with {seeds} of {options.seeds} seeds took "
        f"{seconds:,.0f} s of a processor core, {seconds / 120:.1f} minutes on two."
    )


def write_page(options: argparse.Namespace, runs: Mapping[Case, Result], lines: list[str]) -> None:
    """Writes the tables between the marks of the page, and the picture that it shows."""
    content = options.page.read_text(encoding="utf-8")
    before, _, rest = content.partition(MARKS[0])
    _, _, after = rest.partition(MARKS[1])
    text = "\n".join(line if line[:1] == "|" else fill(line, WIDTH) for line in lines)
    options.page.write_text(f"{before}{MARKS[0]}{text}\n{MARKS[1]}{after}", encoding="utf-8")
    folder = Path(__file__).resolve().parents[1] / "docs" / "images"
    draw(options, mean_losses(runs), folder / "transfer.png")


def draw(options: argparse.Namespace, losses: Losses, path: Path) -> None:
    """Losses against the rate, a panel for each study with muP and without."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6.3), layout="constrained", dpi=72)
    panels = figure.subplots(2, 2, sharex=True, sharey="row")
    for row, (study, models) in zip(panels, studies(options).items(), strict=True):
        for axes, name in zip(row, (PLAIN, MUP), strict=True):
            lines = [(name if index else PLAIN, model) for index, model in enumerate(models)]
            if name == PLAIN:
                lines.append((CONSTANT, models[-1]))
            for index, (label, model) in enumerate(lines):
                rates = losses.get((label, *model), {})
                if not rates:
                    continue
                text = f"{study} {model[study == 'depth']}"
                if label == CONSTANT:
                    text += ", the base's deviations"
                x = [2.0**exponent for exponent in rates]
                axes.plot(x, list(rates.values()), "o-", color=f"C{index}", label=text)
                best = 2 ** best_rate(rates)
                axes.axvline(best, color=f"C{index}", linestyle=":", alpha=0.7)
            axes.set_xscale("log", base=2)
            axes.set_title(f"{LABELS[name]}, over {study}s")
            axes.grid(alpha=0.4)
            axes.legend(frameon=False)
        row[0].set_ylabel("loss (nats per byte)")
    for axes in panels[-1]:
        axes.set_xlabel("learning rate; dotted: the best")
    figure.savefig(path, pil_kwargs={"optimize": True})


def record(options: argparse.Namespace, runs: Mapping[Case, Result]) -> dict[str, Any]:
    """The content of the output."""
    left_out = ("output", "page", "workers")
    return {
        "machine": vars(this_machine()),
        "versions": versions(["torch"]),
        "settings": {name: value for name, value in vars(options).items() if name not in left_out},
        "runs": [case._asdict() | result._asdict() for case, result in sorted(runs.items())],
    }


def recorded_runs(path: Path) -> dict[Case, Result]:
    """The runs of a file of results; none if there is no file."""
    if not path.is_file():
        return {}
    return {
        Case(*(run[name] for name in Case._fields)): Result(*(run[name] for name in Result._fields))
        for run in json.loads(path.read_text(encoding="utf-8"))["runs"]
    }


if __name__ == "__main__":
    sys.exit(main())
