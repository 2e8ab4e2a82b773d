"""A plan as a page of text, as JSON, and its memory as a picture."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron_ds.config import Config
from megatron_ds.config.options.schedule import SUFFIXES
from megatron_ds.config.parallel_axes import AXES, RANK_ORDER
from megatron_ds.config.problems import counted, sized
from megatron_ds.dataclass import dataclass
from megatron_ds.launch.output import columns
from megatron_ds.model.declaration.architecture import is_matrix
from megatron_ds.model.declaration.fp8 import fp8_matrices
from megatron_ds.planning.hardware import DEFAULT, HARDWARE, Hardware
from megatron_ds.planning.plan import Plan, make_plan
from megatron_ds.planning.settings import planned_tokens
from megatron_ds.planning.suggest import MARGIN, Suggestion
from megatron_ds.run_phases import RunPhases
from megatron_ds.tokenizer import build_tokenizer

GB = 1e9
AXIS_NAMES = {axis.name: axis.title for axis in AXES}
MANY_RANKS = 512
"""Ranks above which the page names the latency of ZeRO 3."""
SHOWN_LAYOUTS = 5
SHOWN_RANKS = 4
"""First ranks whose positions the text shows; the JSON has all of them."""


def text(
    plan: Plan,
    tokens: float | None,
    suggestions: Sequence[Suggestion] | None = None,
    assumed: Sequence[str] = (),
) -> str:
    """The page.

    Args:
        plan: The plan.
        tokens: Tokens of the complete training, if they are known.
        suggestions: Layouts that fit, which come first. None: they were not asked for.
        assumed: Flags that were not given.
    """
    first = (
        "" if suggestions is None else f"layouts that fit\n{_suggestions(suggestions, tokens)}\n"
    )
    sections = {
        "run": _run(plan, assumed),
        "memory of a rank": _memory(plan),
        "time": _time(plan, tokens),
        "communication of a rank per step": _communication(plan),
        "checkpoints": _checkpoints(plan),
        "ranks": _ranks(plan),
    }
    return first + "\n".join(f"{title}\n{_indented(rows)}" for title, rows in sections.items())


def print_plan(config: Config, world_size: int) -> None:
    """Prints the page of a run of pretrain_gpt.py on devices of the default kind."""
    tokenizer = build_tokenizer(config.tokenizer, config.model.vocab_size or None)
    stages = StagePlans.of(config.with_vocab(tokenizer.vocab_size), world_size, HARDWARE[DEFAULT])
    print(f"planned for {DEFAULT} (tools/plan.py --hardware has others)")
    print(
        stages.text() + text(stages.largest, stages.planned_tokens(stages.largest.samples)), end=""
    )


@dataclass(frozen=True)
class StagePlans:
    """The plans of the stages of a run; one without --stages has one plan."""

    config: Config
    """Configuration of the run."""
    plans: tuple[Plan, ...]

    @classmethod
    def of(cls, config: Config, world_size: int, hardware: Hardware) -> StagePlans:
        """Plans a run; see `make_plan`."""
        plans = (make_plan(stage, world_size, hardware) for stage in config.phase_configs)
        return cls(config, tuple(plans))

    @property
    def largest(self) -> Plan:
        """The plan that needs the most memory."""
        return max(self.plans, key=lambda plan: plan.memory.peak)

    def planned_tokens(self, samples: int) -> float | None:
        """Tokens of a run with `samples` samples per step, or of the stage of `largest`; None if
        the length is not given."""
        values = self.values()
        if values:
            return float(values[self.plans.index(self.largest)]["tokens"])
        return planned_tokens(self.config, samples)

    def values(self) -> list[dict[str, Any]]:
        """Description of each stage as plain values; empty without --stages."""
        phases = RunPhases(self.config, self.plans[0].dp_size)
        iterations = 0
        tokens = 0
        result = []
        rows = zip(phases.describe(), self.plans, phases.totals(), strict=False)
        for (name, text), plan, end in rows:
            counts = {"iterations": end.iterations - iterations, "tokens": end.tokens - tokens}
            costs = {"days": plan.days(counts["tokens"]), "peak": plan.memory.peak}
            costs["operations"] = plan.flops * counts["iterations"]
            result.append({"name": name, **counts, **costs, "text": text.partition("; ")[2]})
            iterations = end.iterations
            tokens = end.tokens
        return result

    def text(self) -> str:
        """A table of the stages; empty without --stages."""
        rows = [
            (
                item["name"],
                f"{item['iterations']:,}",
                _count(item["tokens"]),
                duration(item["days"]),
                f"{item['peak'] / GB:.1f}",
                item["text"],
            )
            for item in self.values()
        ]
        if not rows:
            return ""
        title = "stages, and below the one that needs the most memory"
        head = ("", "iterations", "tokens", "time", "GB", "")
        return f"{title}\n{_indented([head, *rows])}"


def _suggestions(suggestions: Sequence[Suggestion], tokens: float | None) -> str:
    """A table of the best layouts, and of the best one without model parallelism."""
    if not suggestions:
        return "  none: more processes, more memory or a smaller model are needed\n"
    rows = [("s/step", "tokens/s", "TFLOPS", "GB", "flags, and what limits them")]
    times = ["" if tokens is None else f"{_count(tokens)} tokens"]
    for index, suggestion in enumerate(suggestions):
        if index < SHOWN_LAYOUTS or suggestion.has_data_parallelism_only:
            plan = suggestion.plan
            speed = f"{plan.seconds:.2f}", f"{plan.tokens_per_second:,.0f}", f"{plan.tflops:.0f}"
            rows += [(*speed, f"{plan.memory.peak / GB:.1f}", suggestion.flags)]
            rows += [("", "", "", "", f"  {suggestion.reason}")]
            times += ["" if tokens is None else duration(plan.days(tokens)), ""]
    return _indented(
        (*([] if tokens is None else [time]), *row) for time, row in zip(times, rows, strict=True)
    )


def as_json(
    plan: Plan, tokens: float | None, suggestions: Sequence[Suggestion], assumed: Sequence[str] = ()
) -> dict[str, Any]:
    """The plan as plain values; see `Plan` for the units."""
    return {
        "assumed": assumed,
        **_plan_values(plan),
        "hardware": vars(plan.hardware),
        "rank_map": {"axes": RANK_ORDER, "ranks": list(plan.rank_map())},
        "communication": [
            {
                **vars(link.traffic),
                "sent": link.traffic.sent,
                "between_machines": link.between,
                "seconds": link.seconds,
                "latency": link.latency,
            }
            for link in plan.links
        ],
        "days": None if tokens is None else plan.days(tokens),
        "ds_config": plan.ds_config(),
        "suggestions": [
            {
                "flags": suggestion.flags,
                "seconds": suggestion.plan.seconds,
                "peak": suggestion.plan.memory.peak,
                "reason": suggestion.reason,
                "days": None if tokens is None else suggestion.plan.days(tokens),
            }
            for suggestion in suggestions
        ],
    }


def _plan_values(plan: Plan) -> dict[str, Any]:
    """The attributes of a plan by their names in the JSON."""
    memory = plan.memory
    return {
        "efficiency_origin": plan.efficiency_origin,
        "world_size": plan.world_size,
        "axes": plan.sizes,
        "layers_per_stage": plan.layers,
        "parameters": plan.parameters,
        "parameters_per_pipeline_rank": plan.rank_parameters,
        "micro_batches": plan.micro_batches,
        "samples_per_step": plan.samples,
        "tokens_per_step": plan.tokens,
        "flops_per_step": plan.flops,
        "pipeline_bubble": plan.bubble,
        "tokens_per_second": plan.tokens_per_second,
        "tflops_per_device": plan.tflops,
        "mfu": plan.mfu,
        "memory": {
            "device": memory.device,
            "host": memory.host,
            "disk": memory.disk,
            "activations": memory.activations,
            "output_layer_and_loss": memory.head,
            "gathered_parameters": memory.gathered,
            "reduction": memory.reduction,
            "phases": memory.phases,
            "peak": memory.peak,
        },
        "seconds": {
            "step": plan.seconds,
            "compute": plan.compute,
            "exposed_communication": plan.exposed,
            "optimizer": plan.optimizer,
        },
        "checkpoint": {
            "weights": plan.weights_size,
            "complete": plan.checkpoint_size,
            "save_seconds": plan.save_seconds,
            "async_save_seconds": plan.async_save_seconds,
        },
    }


def draw_memory(plan: Plan, path: Path) -> None:
    """Draws the memory of each phase of a step, by component."""
    from matplotlib.figure import Figure

    memory = plan.memory
    device = plan.hardware.memory / GB
    figure = Figure(figsize=(9, 1.9 + 0.7 * len(memory.parts)), layout="constrained", dpi=110)
    axes = figure.add_subplot()
    left = dict.fromkeys(memory.parts, 0.0)
    for index, name in enumerate((*memory.device, *memory.temporary)):
        widths = [parts.get(name, 0) / GB for parts in memory.parts.values()]
        if any(widths):
            color = f"C{index}"
            axes.barh(list(left), widths, left=list(left.values()), color=color, label=name)
        left = {phase: x + width for (phase, x), width in zip(left.items(), widths, strict=True)}
    for row, size in enumerate(left.values()):
        axes.text(size, row, f" {size:.1f} GB", va="center")
    axes.invert_yaxis()
    axes.axvline(device, color="black", linestyle="--", label=f"{device:.0f} GB of the device")
    axes.axvline(MARGIN * device, color="gray", linestyle=":", label=f"{MARGIN:.0%} of it")
    axes.set_xlabel("GB of a rank's device, at the times of a step")
    axes.set_xlim(0, max(device, memory.peak / GB) * 1.15)
    axes.set_title(f"{_model(plan)}\n{_sizes(plan)}: {memory.peak / GB:.1f} of {device:.0f} GB")
    figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _model(plan: Plan) -> str:
    length = plan.config.model.seq_length
    precision = plan.config.precision.name
    return f"{_count(plan.parameters)} parameters, sequence length {length:,}, {precision}"


def _sizes(plan: Plan) -> str:
    """The layout in short."""
    config = plan.config
    sizes = ", ".join(f"{axis} {size}" for axis, size in plan.sizes.items() if size > 1)
    recomputed = config.recompute.recompute_granularity
    return (
        f"{counted(plan.world_size, 'process', ',')}{sizes and f' ({sizes})'}, "
        f"ZeRO {config.zero_stage}, micro-batch size {config.schedule.micro_batch_size}"
        + (f", {recomputed} recomputation" if recomputed else "")
    )


def _fp8(plan: Plan) -> str:
    """What is multiplied in fp8, and how its time is planned."""
    config = plan.config
    spec = plan.run.spec
    matrices = fp8_matrices(config, spec.blocks)
    weights = [weight for weight in spec.weights(spec.blocks).values() if is_matrix(weight)]
    total = sum(math.prod(weight.shape) for weight in weights)
    share = sum(math.prod(weight.shape) for weight in matrices) / total
    rate = plan.hardware.tflops_8
    if not rate or config.precision.name == "fp32":
        return f"{share:.0%} of the layers' matrices; planned at the rate of other products"
    return f"{share:.0%} of the layers' matrices at {rate:,.0f} TFLOP/s; not measured on a device"


def _run(plan: Plan, assumed: Sequence[str]) -> Iterator[tuple[str, ...]]:
    yield "model", _model(plan)
    if assumed:
        yield "assumed", " ".join(assumed)
    yield "layout", _sizes(plan)
    if plan.config.precision.fp8_format is not None:
        yield "fp8", _fp8(plan)
    yield (
        "batch",
        f"{plan.samples:,} samples, {plan.tokens:,} tokens: "
        f"{counted(plan.micro_batches, 'micro-batch')} on each data-parallel rank",
    )
    counts = [(count, len(list(same))) for count, same in itertools.groupby(plan.rank_parameters)]
    shown = ", ".join(f"{count:,}" + (f" (x {n})" if n > 1 else "") for count, n in counts)
    yield "parameters", f"{plan.parameters:,}; of a rank by stage: {shown}"


def _ranks(plan: Plan) -> Iterator[tuple[str, ...]]:
    sizes = " x ".join(f"{AXIS_NAMES[axis]} {size}" for axis, size in plan.sizes.items())
    yield "sizes", f"{sizes}, the last one fastest, on {counted(plan.machines, 'machine', ',')}"
    yield "stages", f"{', '.join(map(str, plan.layers))} layers"
    for rank in range(min(SHOWN_RANKS, plan.world_size)):
        positions = zip(RANK_ORDER, plan.coordinates(rank), strict=True)
        yield f"rank {rank}", ", ".join(f"{axis} {position}" for axis, position in positions)


def _memory(plan: Plan) -> Iterator[tuple[str, ...]]:
    memory = plan.memory
    for name, size in (memory.device | memory.temporary).items():
        if size:
            yield name, sized(size)
    free = plan.hardware.memory - memory.peak
    fits = f"{sized(free)} free" if free >= 0 else f"{sized(-free)} too much"
    if 0 <= free < (1 - MARGIN) * plan.hardware.memory:
        fits += f", less than the {1 - MARGIN:.0%} that libraries and fragmentation need"
    yield (
        "peak",
        f"{sized(memory.peak)} of {sized(plan.hardware.memory)}: {fits} ({memory.peak_phase})",
    )
    if memory.host:
        size = sum(memory.host.values())
        ranks = min(plan.hardware.per_machine, plan.world_size)
        there = sized(ranks * plan.hardware.host_memory)
        of_machine = f"{sized(ranks * size)} of {there} of each machine"
        yield "on the host", f"{sized(size)}; {of_machine} (host_memory of --rates)"
    if memory.disk:
        yield "on the disk", sized(sum(memory.disk.values()))


def _communication(plan: Plan) -> Iterator[tuple[str, ...]]:
    for link in plan.links:
        item = link.traffic
        where = "between machines" if link.between else "inside a machine"
        hidden = ", behind computation" if item.overlaps or item.operation == "send" else ""
        yield (
            f"{item.axis} {item.operation}",
            f"{sized(item.size)}, sent {sized(item.sent)} {where}, {link.seconds:.3g} s{hidden}",
            f"{item.what}, {item.ranks} ranks",
        )
    if not plan.links:
        yield "none", ""


def _time(plan: Plan, tokens: float | None) -> Iterator[tuple[str, ...]]:
    share = f"{plan.hardware.efficiency:.0%} of the peak ({plan.efficiency_origin})"
    ranks = plan.sizes["dp"] * plan.config.parallel.sequence_ranks
    if tokens is not None:
        fits = plan.memory.peak <= plan.hardware.memory
        time = f"{duration(plan.days(tokens))}, with products at {share}"
        yield f"{_count(tokens)} tokens", time if fits else f"{time}, if it fitted the memory"
    yield "step", f"{plan.seconds:.3g} s, {plan.tokens_per_second:,.0f} tokens/s"
    yield "per device", f"{plan.tflops:.4g} TFLOPS, {plan.mfu:.1%} of the peak"
    yield "operations", f"{plan.flops:.4g} per step on all ranks"
    yield "products", f"{plan.compute:.3g} s at {share}; --efficiency sets it"
    yield "pipeline", f"idle for {plan.bubble:.1%}"
    yield "communication", f"{plan.exposed:.3g} s not behind computation"
    if plan.config.zero_stage == 3 and ranks > MANY_RANKS:
        latency = f"{plan.latency:.3g} s of it the latency of messages"
        yield "", f"{latency}: ZeRO 3 collects each layer from {ranks:,} ranks"
    yield "optimizer", f"{plan.optimizer:.3g} s"


def _checkpoints(plan: Plan) -> Iterator[tuple[str, ...]]:
    size = plan.checkpoint_size
    yield "weights", sized(plan.weights_size)
    yield "complete", f"{sized(size)}, {sized(size / plan.world_size)} per rank"
    rate = f"{sized(plan.hardware.storage)}/s of each machine"
    yield "save", f"{plan.save_seconds:.3g} s at {rate}, {plan.async_save_seconds:.3g} s if async"


def duration(days: float) -> str:
    """A time in short: days, below a day hours, and below an hour minutes."""
    if days >= 1:
        return f"{days:,.1f} days"
    if days >= 1 / 24:
        return f"{days * 24:.1f} hours"
    return f"{days * 1440:.1f} minutes"


def _count(value: float) -> str:
    """A number in short: 8.03B."""
    suffix, unit = next(
        ((name, unit) for name, unit in reversed(SUFFIXES.items()) if value >= unit), ("", 1)
    )
    return f"{value / unit:.3g}{suffix}"


def _indented(rows: Iterable[tuple[str, ...]]) -> str:
    return "".join(f"  {line}\n" for line in columns(rows))
