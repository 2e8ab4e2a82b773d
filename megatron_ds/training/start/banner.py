"""Formats the banner: layout, model, schedule, engine settings, kernels and memory of a run.

Turns values into text, with bold headings on a terminal. Asks neither engine nor device; callers
collect the values.
"""

from __future__ import annotations

import dataclasses
import io
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from megatron_ds import schedules
from megatron_ds.config import Config
from megatron_ds.config.fields import in_effect
from megatron_ds.config.problems import counted
from megatron_ds.engine.settings import EngineSettings
from megatron_ds.model.declaration.architecture import Layer, is_matrix, is_state, run_spec
from megatron_ds.model.declaration.rates import multiplier_rule
from megatron_ds.model.declaration.transfer_table import transfer_lines
from megatron_ds.model.norm import select_norm_kernel
from megatron_ds.model.stages import layers_per_stage, stage_slices
from megatron_ds.parallel.mesh import Mesh
from megatron_ds.planning.memory_estimate import MemoryEstimate
from megatron_ds.run_phases import RunPhases
from megatron_ds.train_state import TrainState

WIDTH = 100
MIB = 2**20

Lines = list[tuple[str, str]]
"""Labels and texts below a heading."""


@dataclass(frozen=True)
class BannerData:
    """Values that the banner shows."""

    config: Config
    mesh: Mesh
    settings: EngineSettings
    """The engine's settings in effect."""
    estimate: MemoryEstimate
    state: TrainState
    """Initial training state of the run."""
    versions: str
    device: str
    """Device type and communication backend."""
    threads: int
    attention: str
    """Attention implementation and the kernel that torch selects."""
    compiled: str
    """Description of what torch.compile compiles."""
    ops: tuple[str, ...]
    """Loaded C++ ops of DeepSpeed."""


def banner(facts: BannerData, *, width: int = WIDTH, terminal: bool = False) -> str:
    """Formats the banner.

    Args:
        facts: Values to show.
        width: Maximum number of columns, at most WIDTH.
        terminal: Print headings in bold.
    """
    # Only the first rank prints.
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 1))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for heading, lines in sections(facts).items():
        for index, (label, text) in enumerate(lines):
            title = Text(f"{heading if index == 0 else '':<8}", style="bold")
            grid.add_row(title + Text(f" {label}", style="not bold"), Text(text))
    out = io.StringIO()
    console = Console(
        file=out, width=min(width, WIDTH), force_terminal=terminal, highlight=False, emoji=False
    )
    console.print(grid)
    printed = [line.rstrip() for line in out.getvalue().splitlines()]
    rule = "-" * min(width, WIDTH)
    return "\n".join([rule, *printed, rule])


def sections(facts: BannerData) -> dict[str, Lines]:
    """The lines of the banner by heading: settings of the current phase, and the list of phases."""
    phases = RunPhases(facts.config, facts.mesh.dp.size)
    facts = dataclasses.replace(facts, config=phases.at(facts.state))
    return {
        "run": [("", facts.versions)],
        "layout": _layout(facts),
        "model": _model(facts),
        "batch": _batch(facts),
        "schedule": _schedule(facts, phases),
        "in effect": _engine_settings(facts),
        "kernels": _kernels(facts),
        "memory": _memory(facts.estimate),
    }


def _layout(facts: BannerData) -> Lines:
    is_split = in_effect(facts.config.parallel).sequence_parallel
    mesh = facts.mesh.of_model(is_split, facts.config.has_whole_experts)
    kinds = dict.fromkeys(facts.config.parallel.cp_comm_type)
    exchange = " and ".join(kinds)
    processes = (
        f"{mesh.world_size} on {facts.device} = {mesh.describe(detailed=True, exchange=exchange)}, "
        f"{counted(facts.threads, 'thread')} each"
    )
    if mesh.world_size == 1:
        return [("processes", processes)]
    groups = "; ".join(
        f"{_ranks(group.ranks)} ({name} parallel)"
        for name, group in mesh.axes().items()
        if group.size > 1
    )
    stages = [("" if index else "stages", line) for index, line in enumerate(_stages(facts))]
    return [("processes", processes), ("groups", f"of rank 0: {groups}"), *stages]


def _stages(facts: BannerData) -> Iterator[str]:
    """The layers of each pipeline stage, and its parameters on a tensor-parallel rank."""
    config = facts.config
    mesh = facts.mesh
    if mesh.pp.size == 1:
        return
    layers = layers_per_stage(config.model, config.parallel, config.moe)
    first = 0
    last = len(layers) - 1
    ranks = enumerate(config.parallel.stages_of_ranks)
    owners = {stage: rank for rank, rank_stages in ranks for stage in rank_stages}
    spec = run_spec(config)
    for stage, part in enumerate(stage_slices(spec, layers)):
        end = first + layers[stage] - 1
        names = [f"layers {first} to {end}" if end > first else f"layer {first}"]
        names += [_title(layer) for layer in spec.after] if stage == last else []
        names = [*map(_title, spec.before), *names] if stage == 0 else names
        first += layers[stage]
        rank = f" (pipeline rank {owners[stage]})" if len(layers) > mesh.pp.size else ""
        yield f"{stage}{rank}: {', '.join(names)}; {spec.elements(spec.layers[part]):,} parameters"


def _title(end: Layer) -> str:
    return "output layer" if end.name == "head" else end.name.replace("_", " ")


def _model(facts: BannerData) -> Lines:
    model = facts.config.model
    mesh = facts.mesh
    tp = mesh.tp.size
    spec = run_spec(facts.config)
    parts = [part for layer in spec.layers[:-1] for part in layer.parts.values()]
    shape = ", ".join(
        (
            counted(model.num_layers, "layer"),
            f"hidden {model.hidden_size}",
            *dict.fromkeys(part.describe() for part in parts),
        )
    )
    size = (
        f"{spec.elements():,} parameters{_per_rank(mesh)}; "
        f"vocabulary {model.vocab_size}, padded to {model.padded_vocab(tp)}; "
        f"sequence {model.seq_length}"
    )
    return [("shape", shape), ("size", size)]


def _per_rank(mesh: Mesh) -> str:
    """Ranks that the parameter count covers; empty if every rank has all parameters."""
    if mesh.ep.size > 1:
        return " per rank, with its experts"
    return " per model-parallel rank" if mesh.tp.size > 1 else ""


def _batch(facts: BannerData) -> Lines:
    config = facts.config
    dp_size = facts.mesh.dp.size
    total = config.final_global_batch_size(dp_size)
    schedule = config.schedule
    micro = schedule.micro_batch_size
    text = (
        f"{counted(total, 'sample')} = micro-batch {micro} x data parallel {dp_size} "
        f"x accumulation {total // (micro * dp_size)}; {total * config.model.seq_length:,} tokens"
    )
    lines = [("step", text)]
    if schedule.rampup_batch_size is not None:
        start, increment, samples = schedule.rampup_batch_size
        lines.append(("ramp-up", f"from {start} in steps of {increment} over {samples:,} samples"))
    return lines + schedules.describe_schedules(config)


def _schedule(facts: BannerData, phases: RunPhases) -> Lines:
    config = facts.config
    dp = facts.mesh.dp.size
    run = phases.totals(facts.state)[-1]
    last = phases.total_iterations(facts.state)
    steps = f"iterations {facts.state.iteration + 1:,} to {last:,}"
    if facts.state.iteration >= last:
        planned = counted(last, "iteration", ",")
        steps = f"complete: the checkpoint has {facts.state.iteration:,} of {planned}"
    used = f"{counted(run.samples, 'sample', ',')}, {run.tokens:,} tokens in total"
    length = f"{steps}; the run uses {used}"
    warmup = schedules.warmup_length(config, dp)
    decay = schedules.decay_length(config, dp)
    schedule = config.schedule
    options = config.optimizer
    unit = schedules.lr_unit(config)
    course = f"from {options.lr:g}, "
    if warmup:
        start = f"{schedule.lr_warmup_init:g} to {options.lr:g}"
        ramp = "logarithmic warmup" if schedule.lr_warmup_style == "log" else "warmup"
        course = f"{ramp} from {start} in {warmup:,.0f} {unit}, then "
    course += schedule.lr_decay_style
    if schedule.lr_decay_style == "piecewise":
        course += f" {' '.join(schedule.lr_decay_points or ())}"
    elif schedule.lr_decay_style != "constant":
        course += f" to {schedule.min_lr:g} at {unit.removesuffix('s')} {decay:,.0f}"
    saves = config.checkpoint
    validation = config.evaluation.eval_interval
    saving = " iterations; no checkpoints (no --save)"
    if saves.save is not None:
        saving = f", checkpoint {saves.save_interval} iterations, to {saves.save}"
        if saves.save_interval is None:
            saving = f" iterations, checkpoint at the end, to {saves.save}"
    intervals = f"log {config.logging.log_interval}, validation {validation}{saving}"
    described = [f"{name}: {text}" for name, text in phases.describe(facts.state)]
    lines = [("" if index else "stages", text) for index, text in enumerate(described)]
    return [("length", length), *lines, ("rate", course), ("intervals", intervals)]


def _engine_settings(facts: BannerData) -> Lines:
    settings = facts.settings
    options = facts.config.optimizer
    zero = (
        f"stage {settings.zero_stage}; offloaded: optimizer {settings.optimizer_offload}, "
        f"parameters {settings.param_offload}"
    )
    if settings.hpz_size > 1:
        zero += f"; second copies of the parameters on {settings.hpz_size} ranks each (hpZ)"
    if settings.passed_keys:
        zero += f"; passed on without a test: {', '.join(settings.passed_keys)}"
    coefficients = f"momentum {settings.momentum:g}" if settings.momentum is not None else ""
    if settings.betas is not None:
        betas = f"betas {' '.join(f'{beta:g}' for beta in settings.betas)}"
        epsilons = " or ".join(dict.fromkeys(f"{value:g}" for value in settings.epsilon or ()))
        coefficients = f"{betas}, epsilon {epsilons}" if epsilons else betas
    if (update := options.spec.matrices) is not None:
        spec = run_spec(facts.config)
        tensors = spec.sizes()
        matrices = spec.sizes(keep=is_matrix)
        momentum = "" if settings.momentum is None else f"momentum {settings.momentum:g}, "
        description = update.description.format_map(vars(options))
        coefficients = (
            f"{momentum}on {settings.matrices} matrices ({_elements(matrices)}), {description}; "
            f"AdamW on {(tensors - matrices).total()} other parameters "
            f"({_elements(tensors - matrices)}), {coefficients}"
        )
    decay = " or ".join(dict.fromkeys(f"{value:g}" for value in settings.weight_decay))
    cautious = "cautious " if in_effect(options).cautious_weight_decay else ""
    decoupled = "" if options.decoupled_lr is None else f" (decoupled {options.decoupled_lr:g})"
    optimizer = (
        f"{settings.optimizer}, {coefficients}, learning rate "
        f"{options.lr:g}{decoupled}, {cautious}weight decay {decay}, "
        f"gradient clipping {settings.clip_grad:g}"
    )
    groups = [("" if index else "groups", line) for index, line in enumerate(_groups(facts))]
    types = (
        f"parameters {settings.param_dtype}; gradients summed in {settings.accumulation_dtype}, "
        f"averaged over ranks in {settings.reduction_dtype}; master weights {settings.master_dtype}"
    )
    if settings.moment_dtypes:
        types += f", moments {' and '.join(settings.moment_dtypes)}"
    tiles = "; MLP in tiles" if facts.config.recompute.tiled_mlp else ""
    return [
        ("ZeRO", zero),
        ("optimizer", optimizer),
        *groups,
        *(("" if row else "muP", line) for row, line in enumerate(transfer_lines(facts.config))),
        ("data types", types),
        ("loss scale", str(settings.loss_scale or "none")),
        ("recompute", _recompute(facts.config) + tiles),
    ]


def _groups(facts: BannerData) -> Iterator[str]:
    """Describes the settings of each --param-group, its parameters, and the settings of the
    remaining ones."""
    options = facts.config.optimizer
    mesh = facts.mesh
    if not options.param_group:
        return
    spec = run_spec(facts.config)
    rule = multiplier_rule(options, facts.config.model)
    sizes = Counter[tuple[str, float, float]]()
    for weight in spec.weights().values():
        if not is_state(weight):
            patterns = (
                group.pattern for group in options.param_groups if group.matches(weight.name)
            )
            factors = rule(weight)
            base = options.decoupled_lr if factors.is_decoupled else options.lr
            rates = (base or 0.0) * factors.lr, options.weight_decay * factors.weight_decay
            sizes[next(patterns, "all other weights"), *rates] += weight.size(
                mesh.tp.size, mesh.ep.size, has_whole_experts=facts.config.has_whole_experts
            )
    for (pattern, lr, decay), size in sizes.items():
        yield (
            f"{pattern}: {size:,} parameters{_per_rank(mesh)}, learning rate {lr:g} "
            f"({lr / options.lr if options.lr else 1:g}x), weight decay {decay:g}"
        )


def _elements(sizes: Counter[int]) -> str:
    return f"{sum(size * count for size, count in sizes.items()):,} elements"


def _recompute(config: Config) -> str:
    recompute = in_effect(config.recompute)
    if recompute.recompute_granularity != "full":
        return recompute.recompute_granularity or "none"
    switches = (
        "partition_activations",
        "checkpoint_in_cpu",
        "contiguous_checkpointing",
        "synchronize_each_layer",
        "profile_backward",
    )
    chosen = [name.replace("_", " ") for name in switches if getattr(recompute, name)]
    by = "DeepSpeed" if recompute.is_by_deepspeed else "torch"
    return ", ".join(
        (f"full, every {counted(recompute.checkpoint_num_layers, 'layer')}, by {by}", *chosen)
    )


def _kernels(facts: BannerData) -> Lines:
    config = facts.config
    normalization = facts.config.model.normalization
    positions = "positions restart" if config.data.reset_position_ids else "positions continue"
    crosses = "stays within" if config.data.reset_attention_mask else "crosses"
    documents = f"{positions}, attention {crosses} document boundaries"
    if not (config.data.reset_position_ids or config.data.reset_attention_mask):
        documents = "samples are packed without document masks"
    return [
        ("attention", facts.attention),
        ("norm", f"{normalization}, {select_norm_kernel(normalization)}"),
        ("documents", documents),
        ("loss", "fused with the output layer: no tensor of all logits"),
        ("compiled", facts.compiled),
        ("C++ ops", ", ".join(facts.ops) or "none"),
    ]


def _memory(estimate: MemoryEstimate) -> Lines:
    peak = f"{_mib(estimate.peak)} MiB per process, estimated for the {estimate.peak_phase}"
    return [
        ("states", _sum(estimate.device)),
        ("temporary", f"{', '.join(_sizes(estimate.temporary))} (at different times)"),
        *([("on host", _sum(estimate.host))] if estimate.host else []),
        *([("on disk", _sum(estimate.disk))] if estimate.disk else []),
        ("peak", peak),
    ]


def _sizes(parts: Mapping[str, int]) -> list[str]:
    return [f"{name} {_mib(size)}" for name, size in parts.items() if size]


def _sum(parts: Mapping[str, int]) -> str:
    terms = _sizes(parts)
    total = f"{_mib(sum(parts.values()))} MiB"
    return f"{' + '.join(terms)} = {total}" if terms else total


def _mib(size: int) -> str:
    return f"{size / MIB:,.1f}"


def _ranks(ranks: tuple[int, ...]) -> str:
    """The ranks of a group, abbreviated if there are many."""
    shown = [str(rank) for rank in ranks]
    if len(shown) > 5:
        shown = [*shown[:3], "...", shown[-1]]
    return " ".join(shown)
