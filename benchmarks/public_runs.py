"""Planned speeds (tools/plan.py) of public training runs, relative to published ones.

    python benchmarks/public_runs.py [--fit]

public_runs.yaml has the runs with their sources. By the hash of its name, a run belongs to the half
to which the model of the time is fitted, or to the half on which it is tested; nobody chooses.
`--fit` fits the share of the peak of large products, by kind of device, and the passes over the
memory, and prints what megatron_ds/planning/hardware.toml should have. `python -m tests.pages`
writes the table into docs/running/measured.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import hashlib
import math
import shlex
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

if TYPE_CHECKING:
    from megatron_ds.planning.hardware import Hardware
    from megatron_ds.planning.plan import Plan

DATA = Path(__file__).with_suffix(".yaml")
COMMON = "--bf16 --attention-dropout 0 --hidden-dropout 0"
FAMILIES = {"h100": ("h100", "h200"), "a100": ("a100",)}
"""Devices that share a fitted share of the peak: their products are computed by the same units."""
GRIDS: dict[str, list[float]] = {
    **{f"attention_{family}": [number / 10 for number in range(4, 17, 2)] for family in FAMILIES},
    "passes": [number / 2 for number in range(25)],
    "grouped": [number / 10 for number in range(2, 11)],
    "contention": [number / 4 for number in range(5)],
}
"""Values that are tried."""
OWN = "h200"
"""Source of the rows that are no public runs."""


@dataclass(frozen=True)
class Run:
    """A training run whose speed is known."""

    source: str
    """Where its figures are from."""
    name: str
    model: str
    """Flags of its model."""
    device: str
    """Its kind of device, as named in the file."""
    rates: tuple[tuple[str, Any], ...]
    """`hardware`, and the rates that differ from it."""
    devices: int
    layout: str
    """Flags of its layout."""
    published: float
    """Tokens per second and device."""
    reason: str = ""
    """Why it is not judged; empty if it is."""
    interleaved: int = 1
    """Stages of each pipeline rank."""

    @property
    def is_tested(self) -> bool:
        """Whether it belongs to the half on which the model is tested, by the hash of its name."""
        key = f"{self.source}/{self.name}/{self.device}/{self.devices}"
        return hashlib.sha256(key.encode()).digest()[0] % 2 == 1

    @property
    def hardware(self) -> Hardware:
        from megatron_ds.planning.hardware import HARDWARE

        values = dict(self.rates)
        return dataclasses.replace(HARDWARE[values.pop("hardware")], **values)

    @property
    def family(self) -> str:
        kind = str(dict(self.rates)["hardware"])
        return next(name for name, kinds in FAMILIES.items() if kind in kinds)

    def planned(self, hardware: Hardware | None = None) -> float:
        """Planned tokens per second and device.

        Args:
            hardware: Devices with other rates of their kernels; None: those of the plan.
        """
        from megatron_ds.planning.plan import with_rates

        plan = _plan(self)
        plan = plan if hardware is None else with_rates(plan, hardware)
        idle = plan.bubble / (1 - plan.bubble) / self.interleaved
        return plan.tokens / (plan.seconds - _idle(plan) + plan.compute * idle) / self.devices


def _idle(plan: Plan) -> float:
    """Seconds in which a pipeline rank is idle."""
    return plan.compute / (1 - plan.bubble) - plan.compute


@functools.cache
def _plan(run: Run) -> Plan:
    from megatron_ds.cli import arguments
    from megatron_ds.planning.command import complete
    from megatron_ds.planning.plan import make_plan
    from megatron_ds.tokenizer import build_tokenizer

    words = shlex.split(f"{run.model} {run.layout} {COMMON}")
    config = arguments.parse(
        words, world_size=run.devices, complete=complete, program="public_runs.py", raises=True
    )
    tokenizer = build_tokenizer(config.tokenizer, config.model.vocab_size or None)
    return make_plan(config.with_vocab(tokenizer.vocab_size), run.devices, run.hardware)


@functools.cache
def read() -> tuple[tuple[Run, ...], dict[str, str]]:
    """The runs, and the sources by their names."""
    data = yaml.safe_load(DATA.read_text(encoding="utf-8"))

    def runs(section: str) -> Iterator[Run]:
        for source, rows in data[section].items():
            for name, model, device, devices, layout, published, *rest in rows:
                flags = data["models"].get(model, model)
                rates = tuple(data["devices"][device].items())
                reason = rest[0] if rest else ""
                row = name, flags, device, rates, devices, layout, float(published), reason
                several = data["interleaved"]
                stages = several.get(f"{source}/{name}", several.get(source, 1))
                yield Run(source, *row, stages)

    return (*runs("rows"), *runs("unjudged")), data["sources"]


def judged() -> list[Run]:
    return [run for run in read()[0] if not run.reason]


def errors(runs: Iterable[Run], plan: Callable[[Run], float] = Run.planned) -> list[float]:
    """Planned / published - 1 of each run."""
    return [plan(run) / run.published - 1 for run in runs]


def mean_error(runs: Iterable[Run], plan: Callable[[Run], float] = Run.planned) -> float:
    """Mean of the absolute errors."""
    return statistics.fmean(map(abs, errors(runs, plan)))


@dataclass(frozen=True)
class Fitted:
    """The fitted values of megatron_ds/planning/hardware.toml."""

    passes: float = 4.0
    grouped: float = 0.7
    contention: float = 0.5
    attention_h100: float = 1.0
    attention_a100: float = 1.0
    shares: tuple[tuple[str, float], ...] = ()
    """Share of the peak of each family of devices."""

    def hardware(self, run: Run) -> Hardware:
        """The devices of a run with these values."""
        return dataclasses.replace(
            run.hardware,
            passes=self.passes,
            grouped=self.grouped,
            contention=self.contention,
            attention=getattr(self, f"attention_{run.family}"),
            share=dict(self.shares)[run.family],
        )

    def planned(self, run: Run) -> float:
        """Planned tokens per second and device."""
        return run.planned(self.hardware(run))


def fit(runs: Sequence[Run]) -> Fitted:
    """The values with the lowest mean of |log(planned / published)|, one after the other until
    none changes."""
    best, loss = _best_shares(runs, Fitted())
    while True:
        before = best
        for name, values in GRIDS.items():
            for value in values:
                trial, its_loss = _best_shares(runs, _changed(best, name, value))
                if its_loss < loss:
                    best = trial
                    loss = its_loss
        if best == before:
            return best


def _changed(values: Fitted, name: str, value: float) -> Fitted:
    changes: dict[str, Any] = {name: value}
    return dataclasses.replace(values, **changes)


def _best_shares(runs: Sequence[Run], values: Fitted) -> tuple[Fitted, float]:
    """The values with the shares of the lowest loss, and this loss."""
    shares = {}
    total = 0.0
    for family in FAMILIES:
        members = [run for run in runs if run.family == family]
        share = 0.6
        for step, count in ((0.08, 3), (0.02, 3)):
            near = [round(share + step * number, 2) for number in range(-count, count + 1)]
            losses = {value: _loss(members, values, family, value) for value in near}
            share = min(losses, key=lambda value: losses[value])
        shares[family] = share
        total += losses[share]
    return dataclasses.replace(values, shares=tuple(shares.items())), total / len(runs)


def _loss(runs: Sequence[Run], values: Fitted, family: str, share: float) -> float:
    values = dataclasses.replace(values, shares=((family, share),))
    return sum(abs(math.log(values.planned(run) / run.published)) for run in runs)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--fit", action="store_true", help="fit the model to one half")
    parser.add_argument("--leave-out", action="store_true", help="fit without each source in turn")
    arguments = parser.parse_args(argv)
    runs = judged()
    fitted = [run for run in runs if not run.is_tested]
    tested = [run for run in runs if run.is_tested]
    if arguments.fit:
        print(fit(fitted))
    for name, half in (("fitted", fitted), ("tested", tested)):
        worst = max(half, key=lambda run: abs(run.planned() / run.published - 1))
        print(
            f"{name}: {len(half)} runs, mean error {mean_error(half):.1%}, "
            f"largest {worst.planned() / worst.published - 1:+.0%} ({worst.name}, {worst.source})"
        )
    for run in read()[0]:
        judgement = "not judged" if run.reason else "tested" if run.is_tested else "fitted"
        ratio = run.planned() / run.published
        print(
            f"{run.name:30}{run.device:9}{run.devices:6} {run.planned():10,.0f} "
            f"{run.published:10,.0f} {ratio:6.2f}  {judgement:11}{run.source}"
        )
    if arguments.leave_out:
        for source in dict.fromkeys(run.source for run in runs):
            print(source, f"{_error_without(runs, source):.1%}")
    return 0


def _error_without(runs: Sequence[Run], source: str) -> float:
    """Mean error of the runs of a source after a fit to all others."""
    values = fit([run for run in runs if run.source != source])
    return mean_error([run for run in runs if run.source == source], values.planned)


if __name__ == "__main__":
    raise SystemExit(main())
