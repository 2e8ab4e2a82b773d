"""A plan as a page of text, as JSON, and its memory as a picture."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron_ds.config import Config
from megatron_ds.config.problems import counted
from megatron_ds.planning.hardware import DEFAULT, HARDWARE
from megatron_ds.planning.memory_estimate import MemoryEstimate
from megatron_ds.planning.plan import AXES, Plan, make_plan
from megatron_ds.planning.suggest import Suggestion
from megatron_ds.tokenizer import build_tokenizer

GB = 1e9
AXIS_NAMES = {
    "pp": "pipeline",
    "dp": "data",
    "ep": "expert",
    "sp": "sequence",
    "tp": "tensor",
}
UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "KB"), (1, "bytes"))
SHOWN_RANKS = 4
"""First ranks whose positions the text shows; the JSON has all of them."""


def text(plan: Plan, tokens: float | None) -> str:
    """The page.

    Args:
        plan: The plan.
        tokens: Tokens of the complete training. None: those of the run.
    """
    sections = {
        "layout": _layout(plan),
        "memory of a rank": _memory(plan),
        "communication of a rank per step": _communication(plan),
        "time": _time(plan, tokens),
        "checkpoints": _checkpoints(plan),
    }
    return "\n".join(f"{title}\n{_columns(rows)}" for title, rows in sections.items())


def print_plan(config: Config, world_size: int) -> None:
    """Prints the page of a run of pretrain_gpt.py on devices of the default kind."""
    tokenizer = build_tokenizer(config.tokenizer, config.model.vocab_size or None)
    plan = make_plan(config.with_vocab(tokenizer.vocab_size), world_size, HARDWARE[DEFAULT])
    print(f"planned for {DEFAULT} (tools/plan.py --hardware has others)")
    print(text(plan, None), end="")


def suggestions_text(suggestions: Sequence[Suggestion], count: int = 10) -> str:
    """A table of the best layouts."""
    if not suggestions:
        return "no layout fits: more processes, more memory or a smaller model are needed\n"
    rows = [("s/step", "TFLOPS", "GB", "flags, and what limits them")]
    for each in suggestions[:count]:
        plan = each.plan
        figures = f"{plan.seconds:.2f}", f"{plan.tflops:.0f}", f"{plan.memory.peak / GB:.1f}"
        rows += [(*figures, each.flags), ("", "", "", f"  {each.reason}")]
    return _columns(rows)


def as_json(plan: Plan, tokens: float | None, suggestions: Sequence[Suggestion]) -> dict[str, Any]:
    """The plan as plain values; see `Plan` for the units."""
    return {
        "world_size": plan.world_size,
        "hardware": vars(plan.hardware),
        "axes": plan.sizes,
        "rank_map": {"axes": AXES, "ranks": list(plan.rank_map())},
        "layers_per_stage": plan.layers,
        "parameters": plan.parameters,
        "parameters_per_pipeline_rank": plan.rank_parameters,
        "memory": _memory_values(plan.memory),
        "communication": [
            {
                **vars(link.traffic),
                "sent": link.traffic.sent,
                "between_machines": link.between,
                "seconds": link.seconds,
            }
            for link in plan.links
        ],
        "micro_batches": plan.micro_batches,
        "samples_per_step": plan.samples,
        "tokens_per_step": plan.tokens,
        "flops_per_step": plan.flops,
        "seconds": {
            "step": plan.seconds,
            "compute": plan.compute,
            "exposed_communication": plan.exposed,
            "optimizer": plan.optimizer,
        },
        "pipeline_bubble": plan.bubble,
        "tokens_per_second": plan.tokens_per_second,
        "tflops_per_device": plan.tflops,
        "mfu": plan.mfu,
        "days": None if tokens is None else plan.days(tokens),
        "checkpoint": {
            "weights": plan.weights_size,
            "complete": plan.checkpoint_size,
            "save_seconds": plan.save_seconds,
            "async_save_seconds": plan.async_save_seconds,
        },
        "ds_config": plan.ds_config(),
        "suggestions": [
            {
                "flags": each.flags,
                "seconds": each.plan.seconds,
                "peak": each.plan.memory.peak,
                "reason": each.reason,
            }
            for each in suggestions
        ],
    }


def _memory_values(memory: MemoryEstimate) -> dict[str, Any]:
    return {
        "device": memory.device,
        "host": memory.host,
        "disk": memory.disk,
        "activations": memory.activations,
        "output_layer_and_loss": memory.head,
        "gathered_parameters": memory.gathered,
        "reduction": memory.reduction,
        "phases": memory.phases,
        "peak": memory.peak,
    }


def draw_memory(plan: Plan, path: Path) -> None:
    """Draws the memory of each phase of a step, by component."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 1.4 + 0.7 * len(plan.memory.phases)), layout="constrained")
    axes = figure.add_subplot()
    states = dict(plan.memory.device)
    for row, (phase, size) in enumerate(plan.memory.phases.items()):
        left = 0.0
        parts = {**states, "activations and temporary": size - sum(states.values())}
        for number, (name, part) in enumerate(parts.items()):
            width = max(0, part) / GB
            label = name if row == 0 else None
            axes.barh(phase, width, left=left, color=f"C{number}", label=label)
            left += width
        axes.text(left, row, f" {size / GB:.2f} GB", va="center")
    axes.axvline(plan.hardware.memory / GB, color="black", linestyle="--", label=plan.hardware.name)
    axes.set_xlabel("GB of a rank's device")
    axes.set_xlim(0, max(plan.hardware.memory, plan.memory.peak) / GB * 1.15)
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(path)


def _layout(plan: Plan) -> Iterator[tuple[str, ...]]:
    sizes = ", ".join(f"{AXIS_NAMES[axis]} {size}" for axis, size in plan.sizes.items())
    yield "processes", f"{plan.world_size:,} on {plan.machines:,} machines: {sizes}"
    order = " x ".join(AXIS_NAMES[axis] for axis in AXES)
    yield "ranks", f"in the order {order}, the last one fastest"
    for rank in range(min(SHOWN_RANKS, plan.world_size)):
        positions = zip(AXES, plan.coordinates(rank), strict=True)
        yield f"  rank {rank}", ", ".join(f"{axis} {position}" for axis, position in positions)
    yield "stages", f"{', '.join(map(str, plan.layers))} layers"
    counts = [(count, len(list(same))) for count, same in itertools.groupby(plan.rank_parameters)]
    shown = ", ".join(f"{count:,}" + (f" (x {n})" if n > 1 else "") for count, n in counts)
    yield "parameters", f"{plan.parameters:,}; of a rank by stage: {shown}"
    yield (
        "batch",
        f"{plan.samples:,} samples, {plan.tokens:,} tokens: "
        f"{counted(plan.micro_batches, 'micro-batch')} of "
        f"{counted(plan.config.schedule.micro_batch_size, 'sample')} per data-parallel rank",
    )


def _memory(plan: Plan) -> Iterator[tuple[str, ...]]:
    memory = plan.memory
    for name, size in (memory.device | memory.temporary).items():
        if size:
            yield name, _bytes(size)
    free = plan.hardware.memory - memory.peak
    fits = f"{_bytes(free)} free" if free >= 0 else f"{_bytes(-free)} too much"
    yield (
        "peak",
        f"{_bytes(memory.peak)} of {_bytes(plan.hardware.memory)}: {fits} ({memory.peak_phase})",
    )
    for place, parts in (("host", memory.host), ("disk", memory.disk)):
        if parts:
            yield f"on the {place}", _bytes(sum(parts.values()))


def _communication(plan: Plan) -> Iterator[tuple[str, ...]]:
    for link in plan.links:
        each = link.traffic
        place = "between machines" if link.between else "inside a machine"
        hidden = ", behind computation" if each.overlaps or each.operation == "send" else ""
        yield (
            f"{each.axis} {each.operation}",
            f"{_bytes(each.size)}, sent {_bytes(each.sent)} {place}, {link.seconds:.3g} s{hidden}",
            f"{each.what}, {each.ranks} ranks",
        )
    if not plan.links:
        yield "none", ""


def _time(plan: Plan, tokens: float | None) -> Iterator[tuple[str, ...]]:
    yield "operations", f"{plan.flops:.4g} per step on all ranks"
    yield "products", f"{plan.compute:.3g} s at {plan.hardware.efficiency:.0%} of the peak"
    yield "pipeline", f"idle for {plan.bubble:.1%}"
    yield "communication", f"{plan.exposed:.3g} s not behind computation"
    yield "optimizer", f"{plan.optimizer:.3g} s"
    yield "step", f"{plan.seconds:.3g} s, {plan.tokens_per_second:,.0f} tokens/s"
    yield "per device", f"{plan.tflops:.4g} TFLOPS, {plan.mfu:.1%} of the peak"
    if tokens is not None:
        yield f"{tokens:.4g} tokens", f"{plan.days(tokens):.2f} days"


def _checkpoints(plan: Plan) -> Iterator[tuple[str, ...]]:
    size = plan.checkpoint_size
    yield "weights", _bytes(plan.weights_size)
    yield "complete", f"{_bytes(size)}, {_bytes(size / plan.world_size)} per rank"
    rate = f"{_bytes(plan.hardware.storage)}/s of each machine"
    yield "save", f"{plan.save_seconds:.3g} s at {rate}, {plan.async_save_seconds:.3g} s if async"


def _bytes(size: float) -> str:
    number, unit = next(
        (size / scale, unit) for scale, unit in UNITS if abs(size) >= scale or scale == 1
    )
    return f"{number:,.3g} {unit}" if abs(number) < 1000 else f"{number:,.0f} {unit}"


def _columns(rows: Iterable[tuple[str, ...]]) -> str:
    listed = [tuple(row) for row in rows]
    widths = [
        max(len(row[column]) for row in listed if column < len(row) - 1)
        if any(column < len(row) - 1 for row in listed)
        else 0
        for column in range(max(map(len, listed)))
    ]
    lines = (
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)).rstrip()
        for row in listed
    )
    return "".join(f"  {line}\n" for line in lines)
