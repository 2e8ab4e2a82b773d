"""Predicts the memory, communication and time of a run, for any number of processes."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

from megatron_ds import cli
from megatron_ds.cli import arguments
from megatron_ds.config import MODEL_SIZE_FIELDS, Config
from megatron_ds.config.checks import drawing_problems, folder_problems
from megatron_ds.config.devices import HOST
from megatron_ds.config.fields import option_field
from megatron_ds.config.problems import Problem
from megatron_ds.dataclass import dataclass
from megatron_ds.engine.ds_config.merge import merge_file
from megatron_ds.planning import plan_report
from megatron_ds.planning.hardware import DEFAULT, HARDWARE, Hardware
from megatron_ds.planning.ladder_cost import ladder_cost
from megatron_ds.planning.plan import Plan
from megatron_ds.planning.settings import (
    Completed,
    completed,
    with_values,
    without_tokenizer,
)
from megatron_ds.planning.suggest import Suggestion, suggest
from megatron_ds.tokenizer import build_tokenizer

UNITS = {"MB": 1e6, "GB": 1e9, "MIB": 2**20, "GIB": 2**30}
SIZE = re.compile(r"([0-9.]+)\s*([A-Za-z]*)")
RATES = {item.name for item in dataclasses.fields(Hardware)} - {"name"}
PICTURES = (".png", ".pdf", ".svg")


@dataclass(frozen=True)
class Options:
    """Plans a run on any number of processes in one: ranks, memory, communication, time.

    Nothing is started, and neither data nor weights need exist. Parameters, states and messages
    follow from the settings; times assume a share of the device's peak, and are lower bounds where
    data or checkpoints limit a run.

        python tools/plan.py --load hf:FOLDER --world-size 8 --device-memory 80GB --tokens 1T
        python tools/plan.py --world-size 512 --hardware h100 --suggest FLAGS OF pretrain_gpt.py

    Accepts all flags of pretrain_gpt.py. --lr, the length of the run and the data may be left out,
    the model with --load hf:FOLDER, the tokenizer with --vocab-size, and with --micro-batch-size
    the layout, which is then suggested.
    """

    PROGRAM: ClassVar[str] = "plan.py"

    world_size: int = option_field(1, minimum=1)
    """Number of processes of the run."""
    hardware: str = option_field(DEFAULT, choices=tuple(HARDWARE))
    """Kind of device (docs/running/planning.md lists their rates)."""
    rates: str | None = option_field(None, metavar="FILE")
    """JSON file with rates that replace those of --hardware, such as measured ones
    (benchmarks/planned_time.py writes one)."""
    device_memory: str | None = option_field(None)
    """Memory of a device, such as 80GB or 75GiB (default: that of --hardware)."""
    peak_tflops: float | None = option_field(None, above=0)
    """Peak of a device in 10^12 operations per second."""
    efficiency: float | None = option_field(None, above=0, maximum=1)
    """Share of the peak that products reach; TFLOPS of a log / the peak calibrates it."""
    devices_per_machine: int | None = option_field(None, minimum=1)
    """Devices of a machine."""
    tokens: float | None = option_field(None, above=0)
    """Tokens of the complete training, such as 15T or 15e12, whose days are shown (default: those
    of --train-tokens, --train-samples or --train-iters)."""
    suggest: bool = option_field(
        False,
    )
    """List layouts that fit the device, the fastest first (always without --micro-batch-size)."""
    print_json: bool = option_field(False, flag="json")
    """Print JSON, which also has the position of every rank."""
    plot: str | None = option_field(
        None,
        help=f"draw the memory by component into this file ({' '.join(PICTURES)})",
        metavar="FILE",
    )

    def problems(self) -> Iterator[Problem]:
        if self.device_memory is not None and _bytes_of(self.device_memory) is None:
            yield Problem("not-a-size", "device_memory", value=self.device_memory)
        try:
            self._rates()
        except (OSError, ValueError) as error:
            names = ", ".join(sorted(RATES))
            yield Problem("rates-unreadable", "rates", path=self.rates, error=error, names=names)
        if self.plot is not None:
            yield from drawing_problems("plot", self.plot, PICTURES)
            yield from folder_problems("plot", str(Path(self.plot).parent))

    def _rates(self) -> dict[str, float]:
        """The content of the file.

        Raises:
            OSError: If it cannot be read.
            ValueError: If it is not an object of known rates.
        """
        if self.rates is None:
            return {}
        values = json.loads(Path(self.rates).read_bytes())
        if not isinstance(values, dict) or not values.keys() <= RATES | {"name"}:
            raise ValueError("unknown keys")
        rates = {name: value for name, value in values.items() if name != "name"}
        if not all(type(value) in (int, float) and value > 0 for value in rates.values()):
            raise ValueError("values that are not positive numbers")
        return rates

    @property
    def device(self) -> Hardware:
        """The device with the given rates."""
        device = dataclasses.replace(HARDWARE[self.hardware], **self._rates())  # type: ignore[arg-type]
        changes: dict[str, float | int | None] = {
            "memory": None if self.device_memory is None else _bytes_of(self.device_memory),
            "tflops_16": self.peak_tflops,
            "tflops_32": self.peak_tflops,
            "tflops_8": self.peak_tflops and self.peak_tflops / device.fp8_operations,
            "efficiency": self.efficiency,
            "per_machine": self.devices_per_machine,
        }
        chosen = {name: value for name, value in changes.items() if value is not None}
        return dataclasses.replace(device, **chosen)  # type: ignore[arg-type]


def _bytes_of(text: str) -> float | None:
    """Bytes that a text such as 80GB denotes; None if it is not a size."""
    match = SIZE.fullmatch(text.strip())
    unit = UNITS.get(match[2].upper()) if match else None
    try:
        return None if match is None or unit is None else float(match[1]) * unit
    except ValueError:
        return None


def complete(
    config: Config,
    world_size: int,
    warn: Callable[[Problem], None],
    *,
    is_host: bool = False,
    plans: list[Completed] | None = None,
) -> tuple[Config, list[Problem]]:
    """Fills in the model that --load names, the DeepSpeed file, and what a plan does not need."""
    config, model_problems = _with_loaded_model(config, warn)
    names = (*MODEL_SIZE_FIELDS, "seq_length")
    if not model_problems and not any(getattr(config.model, name) for name in names):
        model_problems = [Problem("plan-needs-a-model")]
    if model_problems:  # not also that the sizes are missing
        unknown = [name for name in names if not getattr(config.model, name)]
        config = with_values(config, **dict.fromkeys(unknown, 1))
    config, file_problems = merge_file(config, world_size, warn)
    plan = completed(without_tokenizer(config), world_size, is_host=is_host)
    if plans is not None:
        plans.append(plan)
    return plan.config, [
        *model_problems,
        *file_problems,
        *([] if model_problems else plan.problems),
    ]


def _with_loaded_model(
    config: Config, warn: Callable[[Problem], None]
) -> tuple[Config, list[Problem]]:
    """Takes the options of the model from --load or --pretrained-checkpoint, if one is given."""
    if not (config.checkpoint.load or config.checkpoint.pretrained_checkpoint):
        return config, []
    from megatron_ds.loading.plan import model_options  # reads checkpoints of all programs

    return model_options(config, warn)


def main(argv: Sequence[str]) -> int:
    training: list[str] = []
    return cli.run(Options, lambda options: _work(options, training), argv, unknown=training)


@dataclass(frozen=True)
class PlannedRun:
    """The plan of a run, with what is known of it besides."""

    stages: plan_report.StagePlans
    plan: Plan
    tokens: float | None
    """Tokens of the complete training; None if they are unknown."""
    layouts: Sequence[Suggestion] | None
    """Layouts that fit, the fastest first; None if they were not asked for."""
    assumed: Sequence[str]
    """Flags that were not given."""

    def values(self) -> dict[str, Any]:
        """Plain values; see `Plan` for the units."""
        values = plan_report.as_json(self.plan, self.tokens, self.layouts or (), self.assumed)
        ladder = ladder_cost(self.plan, self.tokens)
        return values | {
            "stages": self.stages.values(),
            "ladder": None if ladder is None else ladder.values(),
        }


def plan_values(options: Options, training: Sequence[str]) -> dict[str, Any]:
    """The plan of the flags of pretrain_gpt.py as plain values.

    Raises:
        SettingsRejected: If the settings have problems.
    """
    return _planned(options, training, raises=True).values()


def _planned(options: Options, training: Sequence[str], *, raises: bool = False) -> PlannedRun:
    completions: list[Completed] = []
    device = options.device
    complete_plan = functools.partial(complete, is_host=device.kind == HOST, plans=completions)
    config = arguments.parse(
        training,
        world_size=options.world_size,
        complete=complete_plan,
        program="plan.py",
        raises=raises,
    )
    tokenizer = build_tokenizer(config.tokenizer, config.model.vocab_size or None)
    world_size = config.runtime.dry_run or options.world_size
    stages = plan_report.StagePlans.of(config.with_vocab(tokenizer.vocab_size), world_size, device)
    config = stages.largest.config
    (settings,) = completions
    samples = settings.samples
    assumed = settings.assumed
    report = None if raises else _print_on_standard_error
    layouts = None
    if options.suggest or samples:
        layouts = suggest(config, world_size, device, samples, report)
    plan = layouts[0].plan if layouts and samples else stages.largest
    tokens = options.tokens or stages.planned_tokens(plan.samples)
    return PlannedRun(stages, plan, tokens, layouts, assumed)


def _print_on_standard_error(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _work(options: Options, training: Sequence[str]) -> None:
    """Prints the plan of the flags of pretrain_gpt.py."""
    run = _planned(options, training)
    if options.print_json:
        print(json.dumps(run.values(), indent=1))
    else:
        shown = plan_report.text(run.plan, run.tokens, run.layouts, run.assumed)
        ladder = ladder_cost(run.plan, run.tokens)
        print(run.stages.text() + shown + ("" if ladder is None else ladder.text()), end="")
    if options.plot is not None:
        plan_report.draw_memory(run.plan, Path(options.plot))
