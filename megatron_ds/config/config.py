"""All options of a run, and what holds among options of several groups."""

from __future__ import annotations

import dataclasses
import functools
import math
import typing
from collections.abc import Iterator, Mapping
from dataclasses import field
from types import SimpleNamespace
from typing import Any

from megatron_ds.config.checks import divisors, list_numbers, nearest_multiples
from megatron_ds.config.deepspeed_file import DeepSpeedFile
from megatron_ds.config.fields import (
    Decides,
    InPhase,
    exclusive_problem,
    field_problems,
    in_effect,
    ineffective,
    option_fields,
)
from megatron_ds.config.model.experts import MoEConfig
from megatron_ds.config.model.model import ModelConfig
from megatron_ds.config.options.checkpoint import CheckpointConfig
from megatron_ds.config.options.data import DataConfig
from megatron_ds.config.options.deepspeed import DeepSpeedConfig
from megatron_ds.config.options.evaluation import EvaluationConfig
from megatron_ds.config.options.logging import (
    LoggingConfig,
    ProfilingConfig,
    RerunConfig,
    StoppingConfig,
)
from megatron_ds.config.options.optimizer import OptimizerConfig
from megatron_ds.config.options.parallel import ParallelConfig, RecomputeConfig
from megatron_ds.config.options.precision import PrecisionConfig
from megatron_ds.config.options.runtime import RuntimeConfig
from megatron_ds.config.options.schedule import ScheduleConfig
from megatron_ds.config.options.tokenizer import TokenizerConfig
from megatron_ds.config.parallel_axes import AXES
from megatron_ds.config.phases import by_phase, phase_problems, resolved_phases
from megatron_ds.config.problems import Problem, option, with_value, without_passwords
from megatron_ds.dataclass import dataclass

SIZES = ("context_parallel_size", "ds_sequence_parallel_size")
"""Options of ranks that share sequences."""
TP_SIZE = "tensor_model_parallel_size"


@dataclass(frozen=True)
class Config:
    """All options of a run. What changes during a run is in `TrainState`."""

    model: ModelConfig = field(default_factory=ModelConfig)
    moe: MoEConfig = field(default_factory=MoEConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    recompute: RecomputeConfig = field(default_factory=RecomputeConfig)
    data: DataConfig = field(default_factory=DataConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    deepspeed: DeepSpeedConfig = field(default_factory=DeepSpeedConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    stopping: StoppingConfig = field(default_factory=StoppingConfig)
    rerun: RerunConfig = field(default_factory=RerunConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    profiling: ProfilingConfig = field(default_factory=ProfilingConfig)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)
    given: frozenset[str] = frozenset()
    """Names of the fields set by the user."""
    origins: Mapping[str, str] = field(default_factory=dict, compare=False)
    """Origins of values that no flag set: by field, key and line of the DeepSpeed file."""
    repeated: Mapping[str, str] = field(default_factory=dict, compare=False)
    """Key and line of the DeepSpeed file for values that a flag gives as well, by field."""
    deepspeed_file: DeepSpeedFile | None = field(default=None, compare=False)
    """The parsed file of --deepspeed_config, so that it is read once."""
    start_samples: int = 0
    """Samples that the loaded checkpoint's run has consumed."""
    custom_parts: Mapping[str, str] = field(default_factory=dict, compare=False)
    """Names of the functions that the program uses instead of the package's own, by what they are:
    dataset, loss, layer."""
    published: Mapping[str, Any] = field(default_factory=dict, compare=False)
    """Description of the model that the run was initialized from, for exports of its checkpoints;
    see `Publication`."""

    def problems(self, world_size: int) -> list[Problem]:
        """Check all options.

        Args:
            world_size: Number of processes.

        Returns:
            Every problem; empty if the run can start.
        """
        if self.schedule.stages:
            phase_errors = by_phase(self, lambda phase: phase.problems(world_size))
            return [*phase_problems(self), *phase_errors]
        by_group = {name: list(field_problems(getattr(self, name), self.given)) for name in GROUPS}
        infinite = [
            item for problems in by_group.values() for item in problems if item.code == "not-finite"
        ]
        if infinite:
            return infinite  # comparisons with them mean nothing
        model = self.model
        parallel = self.parallel
        has_vocab_size = model.vocab_size != 0 or "vocab_size" in self.given
        # A NullTokenizer adds an end-of-document id.
        ids = model.vocab_size + (self.tokenizer.tokenizer_type == "NullTokenizer")
        counted = dataclasses.replace(model, vocab_size=ids)
        related: dict[str, Iterator[Problem]] = {
            "model": counted.problems(parallel.tensor_model_parallel_size),
            "moe": self.moe.problems(
                model, parallel.tensor_model_parallel_size, parallel.expert_model_parallel_size
            ),
            "parallel": parallel.problems(
                world_size, model.num_layers, has_experts=self.moe.is_used
            ),
            "recompute": self.recompute.problems(model.num_layers),
            "data": self.data.problems(
                has_own_data="dataset" in self.custom_parts,
                is_read=self.evaluation.eval_only is None,
            ),
            "tokenizer": self.tokenizer.problems(model.vocab_size if has_vocab_size else None),
            "optimizer": self.optimizer.problems(),
            "schedule": self.schedule.problems(parallel, world_size, self.start_samples),
            "precision": self.precision.problems(),
            "deepspeed": self.deepspeed.problems(),
            "checkpoint": self.checkpoint.problems(),
            "evaluation": self.evaluation.problems(),
            "logging": self.logging.problems(),
            "profiling": self.profiling.problems(
                world_size,
                has_folder=self.checkpoint.save is not None
                or self.logging.tensorboard_dir is not None,
            ),
        }
        group_problems = [
            problem for name in GROUPS for problem in (*by_group[name], *related.get(name, ()))
        ]
        return [*group_problems, *_combination_problems(self)]

    def warnings(self) -> Iterator[Problem]:
        """Warn of flags, and of values of the DeepSpeed file, that have no effect."""
        if self.schedule.stages:
            yield from by_phase(self, Config.warnings)
            return
        for group in (getattr(self, name) for name in GROUPS):
            changed = {
                item.name
                for item, _ in option_fields(group)
                if item.name in self.origins and getattr(group, item.name) != item.default
            }
            names = self.given | changed
            yield from map(self.with_origin, ineffective(group, names, self._values))
        yield from self.data.warnings()
        yield from self.optimizer.warnings()
        yield from _transfer_warnings(self.model, self.optimizer)

    def with_origin(self, problem: Problem) -> Problem:
        """Add to a problem where the values of its fields come from, other than from flags."""
        places = {name: f"is {origin}" for name, origin in self.origins.items()}
        places |= {name: f"is also {key}" for name, key in self.repeated.items()}
        named = "; ".join(
            f"{flag_of(name)} {origin}"
            for name, origin in places.items()
            if name in problem.mentioned
        )
        return problem.extended(f" ({named})") if named else problem

    def with_vocab(self, vocab_size: int) -> Config:
        """A copy with the vocabulary size of the tokenizer."""
        return self.with_values({"vocab_size": vocab_size})

    def with_values(self, values: Mapping[str, Any]) -> Config:
        """A copy with other values of some fields.

        Args:
            values: Value by name of the field.
        """
        changes: dict[str, dict[str, Any]] = {}
        for name, value in values.items():
            changes.setdefault(GROUP_OF_FIELD[name], {})[name] = value
        groups: dict[str, Any] = {
            group: dataclasses.replace(getattr(self, group), **changed)
            for group, changed in changes.items()
        }
        return dataclasses.replace(self, **groups)

    @functools.cached_property
    def phase_configs(self) -> tuple[Config, ...]:
        """The configuration of each phase; without --stages, this one alone."""
        return resolved_phases(self)

    def in_phase(self, index: int) -> Config:
        """The configuration in a phase, by its position; without --stages, this one."""
        return self.phase_configs[index] if self.schedule.stages else self

    @property
    def lengths_vary(self) -> bool:
        """Whether the steps of the run have sequences of several lengths."""
        lengths = {phase.model.seq_length for phase in self.phase_configs}
        configs = (phase.schedule for phase in self.phase_configs)
        return len(lengths) > 1 or any(item.curriculum_seqlen is not None for item in configs)

    def final_global_batch_size(self, dp_size: int) -> int:
        """Samples per optimizer step at the end of the run."""
        steps = self.schedule.batch_size_steps
        if steps:
            return steps[-1][1]
        return self.schedule.global_batch_size or self.schedule.micro_batch_size * dp_size

    @property
    def zero_stage(self) -> int:
        """ZeRO stage in effect. DeepSpeed's stage 0 computes a wrong norm in half precision, where
        stage 1 has the same results; bigscience's stage 0 of bf16 partitions the states as well."""
        stage = self.deepspeed.zero_stage
        return 1 if stage is None or (stage == 0 and self.precision.name != "fp32") else stage

    @property
    def expert_parallel_size(self) -> int:
        """Data-parallel ranks with different experts."""
        return self.parallel.expert_data_ranks if self.moe.is_used else 1

    @property
    def has_whole_experts(self) -> bool:
        """Whether tensor-parallel ranks have different experts."""
        return self.moe.is_used and self.parallel.has_whole_experts

    @property
    def measures_logits(self) -> bool:
        """Whether the attention logits are measured, for the log or for QK-clip."""
        return self.optimizer.qk_clip or self.logging.log_max_attention_logit

    @property
    def axis_sizes(self) -> dict[str, int]:
        """Sizes in effect of the parallel axes, by the names of `axis_groups`."""
        sizes = {f"{axis.name}_size": self.parallel.size_of(axis) for axis in AXES if axis.option}
        return sizes | {"ep_size": self.expert_parallel_size}

    @property
    def mesh_sizes(self) -> dict[str, int]:
        """The arguments of `Mesh.build`: `axis_sizes`, and groups within an axis."""
        return self.axis_sizes | {"cp_inner_size": self.parallel.cp_inner_size}

    def effective_values(self) -> dict[str, dict[str, Any]]:
        """The values by group that have an effect, with defaults that follow from other fields."""
        values = self._values
        return {
            name: {
                item.name: without_passwords(getattr(values, item.name))
                for item, spec in option_fields(group)
                if spec.unmet(values) is None
            }
            | getattr(getattr(self, name), "derived_values", {})
            for name, group in GROUPS.items()
        }

    def in_effect(self, name: str) -> Any:
        """The value of a field; its default if it has no effect next to the other values."""
        item, _ = _OPTIONS[name]
        return getattr(self._values, name) if self.has_effect(name) else item.default

    def has_effect(self, name: str) -> bool:
        """Whether the value of a field has an effect next to the other values."""
        return _OPTIONS[name][1].unmet(self._values) is None

    @functools.cached_property
    def _values(self) -> SimpleNamespace:
        """The values of all groups by field."""
        groups = (getattr(self, name) for name in GROUPS)
        return SimpleNamespace(**{k: v for group in groups for k, v in vars(group).items()})

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Plain values by group, for JSON, without passwords in URLs."""
        groups = {name: dataclasses.asdict(getattr(self, name)) for name in GROUPS}
        return {name: without_passwords(values) for name, values in groups.items()}


GROUPS: dict[str, type] = {
    name: hint
    for name, hint in typing.get_type_hints(Config).items()
    if isinstance(hint, type) and dataclasses.is_dataclass(hint)
}
"""The groups of `Config` in the order of --help."""
GROUP_OF_FIELD = {
    item.name: name for name, group in GROUPS.items() for item in dataclasses.fields(group)
}
_OPTIONS = {
    item.name: (item, spec) for group in GROUPS.values() for item, spec in option_fields(group)
}
MODEL_SIZE_FIELDS = tuple(
    item.name
    for item, spec in option_fields(ModelConfig)
    if spec.required and spec.decides is Decides.WEIGHTS
)
"""Sizes of the model without a default. If no size is given, the checkpoint defines the model."""


def fields_that_decide(kinds: Decides) -> frozenset[str]:
    """The fields whose values decide one of these kinds, among others."""
    return frozenset(name for name, (_, spec) in _OPTIONS.items() if spec.decides & kinds)


def fields_that_only_decide(kinds: Decides) -> frozenset[str]:
    """The fields whose values decide nothing but these kinds."""
    return frozenset(name for name, (_, spec) in _OPTIONS.items() if spec.decides in kinds)


def fields_in_phase(*kinds: InPhase) -> frozenset[str]:
    """The fields that are one of these to a phase of a run."""
    return frozenset(name for name, (_, spec) in _OPTIONS.items() if spec.in_phase in kinds)


def flag_of(name: str) -> str:
    """The main flag of a field of `Config`.

    Raises:
        KeyError: If no group has the field.
    """
    item, spec = _OPTIONS[name]
    return f"--{spec.flag_name(name, item.default)}"


def _combination_problems(config: Config) -> Iterator[Problem]:
    """Yields problems of options of several groups."""
    yield from _compile_problems(config)
    yield from _fp8_problems(config)
    yield from _logit_problems(config)
    yield from _pipeline_problems(config)
    yield from _sequence_problems(config)
    if config.model.has_depth_transfer and not config.optimizer.spec.has_bounded_steps:
        yield Problem("mup-depth-with-sgd", settings=config.model)


def _transfer_warnings(model: ModelConfig, optimizer: OptimizerConfig) -> Iterator[Problem]:
    """Warns of what muP makes of a learning rate, a factor or a base that is not meant so."""
    spec = optimizer.spec
    is_orthogonal = spec.matrices is not None and spec.matrices.is_orthogonal
    if model.use_mup and is_orthogonal and optimizer.muon_scale_mode == "spectral":
        yield Problem("mup-with-spectral-muon", settings=optimizer)
    std = model.embedding_init_method_std
    has_rate = spec.has_bounded_steps and not is_orthogonal
    yield from model.transfer_warnings(
        optimizer.lr if has_rate else 0.0, model.init_method_std if std is None else std
    )


def _compile_problems(config: Config) -> Iterator[Problem]:
    """Yields what prevents that layers are compiled."""
    if config.recompute.tiled_mlp and config.runtime.compile:
        yield Problem("tiled-mlp-with-compile")
    if config.runtime.compile and config.runtime.no_compile:
        yield Problem("compile-and-no-compile")


def _fp8_problems(config: Config) -> Iterator[Problem]:
    """Yields what prevents that linear layers are computed in fp8."""
    name = "fp8_format"
    layers = config.model.num_layers
    if config.precision.fp8_format is None or layers < 1:
        return
    if not config.precision.fp8_layers(layers):
        yield Problem("fp8-without-layers", settings=config.precision, layers=layers)
    if "layer" in config.custom_parts:
        yield Problem("fp8-of-own-layers")
    if config.model.multi_latent_attention:
        reason = "its projections are not computed in fp8"
        yield exclusive_problem("multi_latent_attention", name, reason=reason)


def _logit_problems(config: Config) -> Iterator[Problem]:
    """Yields what prevents that attention logits are measured, or clipped by their weights."""
    clips = config.optimizer.qk_clip
    model = config.model
    name = "qk_clip" if clips else "log_max_attention_logit"
    if not config.measures_logits:
        return
    if "layer" in config.custom_parts:
        yield Problem("logits-of-own-layers", name)
    if config.runtime.compile:
        yield exclusive_problem(name, "compile", reason="the logits would be in the graphs")
    if config.data.reset_attention_mask:
        reason = "the logits between documents would count"
        yield exclusive_problem(name, "reset_attention_mask", reason=reason)
    for norm in ("qk_layernorm", "qk_l2_norm"):
        # That of latent attention is before the weights.
        if clips and getattr(model, norm) and not model.multi_latent_attention:
            yield exclusive_problem(norm, name, reason="the norm undoes the scaling of the weights")


def _pipeline_problems(config: Config) -> Iterator[Problem]:
    """Yields problems of pipeline stages with other options."""
    if config.parallel.pipeline_model_parallel_size <= 1:
        return
    if in_effect(config.recompute).contiguous_checkpointing:
        yield Problem("contiguous-checkpointing-with-pipeline", settings=config.parallel)
    for name in ("eval_tasks", "eval_only"):
        if getattr(config.evaluation, name) is not None:
            fields = name, "pipeline_model_parallel_size"
            yield Problem("tasks-with-pipeline", *fields, settings=config.parallel)


def _sequence_problems(config: Config) -> Iterator[Problem]:
    """Yields problems of sequence parallelism: Megatron's, context parallelism, DeepSpeed-Ulysses.

    All split the sequence evenly over their ranks, together over the product of the sizes. Inside
    attention, Ulysses also splits the heads of a tensor-parallel rank.
    """
    yield from _sequence_length_problems(config)
    model = config.model
    tp_size = config.parallel.tensor_model_parallel_size
    sizes = (tp_size, model.num_attention_heads, model.kv_heads)
    if min(sizes) > 0 and not any(heads % tp_size for heads in sizes[1:]):
        for size in config.parallel.head_sharing_sizes:
            problems = list(_head_problems(config, size)) if size > 1 else []
            yield from problems
            if problems:  # which larger sizes have, too
                return


def _sequence_length_problems(config: Config) -> Iterator[Problem]:
    """Check that every sequence length of the run can be split over the ranks."""
    parallel = in_effect(config.parallel)
    schedule = config.schedule
    fields = [name for name in SIZES if getattr(parallel, name) > 1]
    flags = [with_value(parallel, name) for name in fields]
    parts = parallel.ulysses_size
    if parallel.sequence_parallel:
        parts *= parallel.tensor_model_parallel_size
        flags.append(f"{with_value(parallel, TP_SIZE)} with {option('sequence_parallel')}")
        fields += ["sequence_parallel", TP_SIZE]
    if parallel.cp_size > 1:  # of 2 chunks
        parts = parallel.cp_size * math.lcm(2, parts)
    lengths: dict[str, tuple[object, int]] = {"seq_length": (config.model, config.model.seq_length)}
    if schedule.curriculum_seqlen is not None:
        start, end, _ = schedule.curriculum_seqlen
        lengths["curriculum_seqlen"] = (schedule, end)
        if start < end:  # the lengths before END are multiples of it
            lengths["curriculum_seqlen_step"] = (schedule, schedule.curriculum_seqlen_step)
    for name, (options, length) in lengths.items():
        if length > 0 and parts > 1 and length % parts:
            yield Problem(
                "sequence-not-divisible",
                name,
                *fields,
                setting=with_value(options, name),
                length=length,
                size=" x ".join(flags),
                part="two equal chunks" if parallel.cp_size > 1 else "an equal part",
                parts=parts,
                nearest=nearest_multiples(length, parts),
            )


def _head_problems(config: Config, size: int) -> Iterator[Problem]:
    model = config.model
    tp_size = config.parallel.tensor_model_parallel_size
    heads = model.num_attention_heads // tp_size
    kv_heads = model.kv_heads // tp_size
    if heads % size == 0 and (kv_heads % size == 0 or size % kv_heads == 0):
        return
    valid = [
        degree for degree in divisors(heads) if kv_heads % degree == 0 or degree % kv_heads == 0
    ]
    parallel = in_effect(config.parallel)
    used = [name for name in SIZES if getattr(parallel, name) > 1]
    if parallel.context_parallel_size > 1:
        used.insert(1, "cp_comm_type")
    yield Problem(
        "heads-not-divisible-by-sequence-parallel-size",
        "num_attention_heads",
        "num_query_groups",
        *used,
        sizes=" ".join(with_value(parallel, name) for name in used),
        heads=heads,
        kv_heads=kv_heads,
        valid=list_numbers(valid),
    )
