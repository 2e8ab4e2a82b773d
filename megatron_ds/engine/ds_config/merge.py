"""Fills the configuration from the user's DeepSpeed file, and finds contradictions between them.

A key of the file sets its field unless the flag was given; `"auto"` and absent keys leave fields
alone. Pure functions that do not import deepspeed, so that a wrong file is reported at once.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from megatron_ds.config import Config, flag_of, support_matrix
from megatron_ds.config.deepspeed_file import DeepSpeedFile, get
from megatron_ds.config.fields import exclusive_problem, in_effect
from megatron_ds.config.problems import Problem, UserError, ignore, option
from megatron_ds.engine.ds_config import passthrough
from megatron_ds.engine.ds_config import schedules as ds_schedules
from megatron_ds.engine.ds_config.fields import MAPPINGS, as_flag, field_value, mappings
from megatron_ds.engine.ds_config.generate import (
    adam_kernel,
    compiles_efficient_linear,
    is_read_at,
    number_of_checkpoints,
)
from megatron_ds.engine.ds_config.values import Kind, as_optimizer
from megatron_ds.engine.optimizers.adam_kernels import AdamKernel

Warn = Callable[[Problem], None]
NUMBER_OF_CHECKPOINTS = "activation_checkpointing.number_checkpoints"


def merge_file(
    config: Config, world_size: int, warn: Warn = ignore
) -> tuple[Config, list[Problem]]:
    """Fill the configuration from its DeepSpeed file, if it has one.

    Args:
        config: Configuration of the flags.
        world_size: Number of processes.
        warn: Called with a warning for each key that was translated or has no effect.

    Returns:
        The filled configuration, which knows where its values come from, and every problem.
    """
    path = config.deepspeed.deepspeed_config
    if path is None or not Path(path).is_file():
        _warn_of_stage_0(config, warn)
        return config, list(_layout_problems(config, world_size))
    from megatron_ds.engine.ds_config.file import read_file  # the parser of Hjson

    try:
        file = read_file(path)
    except UserError as error:
        return config, list(error.problems)
    config = _without_loss_scaling(config, file, warn)
    merger = _ConfigMerger(config, file, warn)
    if file.get("optimizer.type") is not None:
        merger.merge_key("optimizer.type", "optimizer", as_optimizer)
    for key, name, convert in mappings(merger.filled()):
        if file.get(key) is not None and name != "optimizer":
            merger.merge_key(key, name, convert)
    merger.merge_accumulation(world_size)
    merger.merge_scheduler(world_size)
    merger.merge_curriculum()
    config = dataclasses.replace(merger.merged(), deepspeed_file=file)
    _warn_of_stage_0(config, warn)
    is_contradicted = any("zero_stage" in problem.fields for problem in merger.problems)
    for warning in (*file.warnings, *([] if is_contradicted else _ineffective_keys(config, file))):
        warn(warning)
    return config, [
        *file.problems,
        *merger.problems,
        *_checkpoint_number_problems(config, file),
        *_optimizer_problems(config, file),
        *_zero_problems(config, file),
        *passthrough.problems(config),
        *_layout_problems(config, world_size),
    ]


class _ConfigMerger:
    """Carries keys of a file into a configuration, one at a time."""

    def __init__(self, config: Config, file: DeepSpeedFile, warn: Warn) -> None:
        self._config = config
        self._file = file
        self._warn = warn
        self._values: dict[str, Any] = {}
        self._keys: dict[str, str] = {}
        self.problems: list[Problem] = []

    def filled(self) -> Config:
        return self._config.with_values(self._values)

    def merged(self) -> Config:
        places = {name: f"{k} of {self._file.location(k)}" for name, k in self._keys.items()}
        repeated = {name: at for name, at in places.items() if name in self._config.given}
        origins = {name: at for name, at in places.items() if name not in repeated}
        origins = {**self._config.origins, **origins}
        return dataclasses.replace(self.filled(), origins=origins, repeated=repeated)

    def merge_key(self, key: str, name: str, convert: Kind) -> None:
        try:
            value = convert(self._file.get(key))
        except (ValueError, OverflowError) as error:
            self.problems.append(self._file.invalid(key, error, name))
        else:
            self.set_field(key, name, value)

    def set_field(self, key: str, name: str, value: Any) -> None:
        """Set a field to the value that a key gives it, or note the contradiction."""
        described = self._file.describe(key)
        if name in self._config.given:
            current = field_value(self._config, name)
            self._keys[name] = key
            if current != value and not (name == "zero_stage" and self._is_one_stage(value)):
                flag = as_flag(name, current)
                self.problems.append(
                    Problem("ds-key-contradicts-flag", name, as_flag=flag, describe=described)
                )
            return
        other = self._file.describe(self._keys.setdefault(name, key))
        if self._values.setdefault(name, value) != value:
            flag = option(name)
            self.problems.append(
                Problem("ds-keys-contradict", name, first=described, second=other, flag=flag)
            )

    def _is_one_stage(self, stage: int) -> bool:
        """Whether a ZeRO stage is the flag's, given that 0 is 1 in half precision."""
        config = self.filled()
        return config.with_values({"zero_stage": stage}).zero_stage == config.zero_stage

    def set_fields(self, values: ds_schedules.FieldValues, problems: Iterator[Problem]) -> str:
        """Set the fields of a block, and return their flags; "" if there is any problem."""
        before = len(self.problems)
        flags = []
        self.problems += problems
        for key, name, value in values:
            self.set_field(key, name, value)
            flags.append(as_flag(name, value))
        return " ".join(flags) if len(self.problems) == before else ""

    def merge_accumulation(self, world_size: int) -> None:
        """Check gradient_accumulation_steps, or compute the global batch size from it."""
        key = "gradient_accumulation_steps"
        steps = self._file.get(key)
        config = self.filled()
        if steps is None:
            return
        if steps < 1:
            self.problems.append(self._file.invalid(key, "must be positive"))
            return
        micro = config.schedule.micro_batch_size
        dp_size = config.parallel.data_parallel_size(world_size)
        if not micro or not dp_size:
            return  # reported by the checks of these fields
        product = int(steps) * micro * dp_size
        total = config.schedule.global_batch_size
        if total is None:
            self.set_field(key, "global_batch_size", product)
        elif total != product:
            self.problems.append(
                Problem(
                    "ds-accumulation-contradicts-batch",
                    describe=self._file.describe(key),
                    micro=micro,
                    dp_size=dp_size,
                    product=product,
                    total=total,
                )
            )

    def merge_scheduler(self, world_size: int) -> None:
        """Set the fields of the learning rate's schedule from its block."""
        config = self.filled()
        micro = config.schedule.micro_batch_size
        parallel = config.parallel
        model_sizes = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
        fields: ds_schedules.FieldValues = iter(())
        if min(micro, *model_sizes) > 0:  # else reported by the checks of these fields
            batch_size = config.final_global_batch_size(parallel.data_parallel_size(world_size))
            fields = ds_schedules.scheduler_fields(config, self._file, batch_size)
        flags = self.set_fields(fields, ds_schedules.scheduler_problems(config, self._file))
        if flags:
            has_warmup = self.filled().schedule.has_warmup
            hint = "" if has_warmup else f", without a warmup: {option('lr_warmup_iters')} sets it"
            problem = Problem("ds-scheduler-translated", flags=flags, hint=hint)
            self._warn(self._file.at("scheduler.type", problem))

    def merge_curriculum(self) -> None:
        """Set the fields of the sequence-length curriculum from its block."""
        file = self._file
        block = ds_schedules.CURRICULUM
        flags = self.set_fields(
            ds_schedules.curriculum_fields(file), ds_schedules.curriculum_problems(file)
        )
        if flags:
            problem = Problem("ds-curriculum-translated", block=block, flags=flags)
            self._warn(file.at(block, problem))


def _without_loss_scaling(config: Config, file: DeepSpeedFile, warn: Warn) -> Config:
    """Drop flags of loss scaling, next to which the file's fp16 block alone decides.

    The forks build no loss scaler of their own with DeepSpeed. Keys that are "auto" leave it to
    the flags.
    """
    keys = [row for row in MAPPINGS if row[0].startswith("fp16.") and row[1] != "fp16"]
    dropped: dict[str, Any] = {}
    for key, name, convert in keys if file.get("fp16") else ():
        default = field_value(Config(), name)
        value = file.get(key)
        with suppress(ValueError, OverflowError):  # reported by the merger
            default = default if value is None else convert(value)
        is_left = value is None and get(file.values, key) is not None
        if name not in config.given or is_left or field_value(config, name) == default:
            continue
        dropped[name] = field_value(Config(), name)
        flag = as_flag(name, field_value(config, name))
        by = f"fp16 of {file.location('fp16')}" if value is None else file.describe(key)
        warn(Problem("ds-loss-scaling-by-file", name, flag=flag, by=by))
    names = config.given - dropped.keys()
    return dataclasses.replace(config.with_values(dropped), given=names) if dropped else config


def _warn_of_stage_0(config: Config, warn: Warn) -> None:
    """Warn of a ZeRO stage 0 that runs as stage 1."""
    file = config.deepspeed_file
    key = "zero_optimization.stage"
    stage = config.deepspeed.zero_stage
    if stage == 0 != config.zero_stage:
        precision = flag_of(config.precision.name)
        problem = Problem("zero0-in-half-precision", precision=precision)
        is_in_file = file is not None and "zero_stage" not in config.given
        warn(file.at(key, problem) if file and is_in_file else config.with_origin(problem))


def _optimizer_problems(config: Config, file: DeepSpeedFile) -> Iterator[Problem]:
    name = str(file.get("optimizer.type")).lower()
    params = "optimizer.params"
    is_offloaded = config.deepspeed.optimizer_offload != "none"
    if name.endswith("cpuadam") and not is_offloaded:
        yield Problem("ds-cpu-adam-without-offload", describe=file.describe("optimizer.type"))
    if file.get(f"{params}.adam_w_mode") is False:
        yield file.invalid(f"{params}.adam_w_mode", "adam is always AdamW", "optimizer")
    if file.get(f"{params}.torch_adam") and is_offloaded:
        reason = "offloaded optimizer states need DeepSpeed's CPU Adam"
        yield file.invalid(f"{params}.torch_adam", reason, "cpu_optimizer")
    key = "zero_allow_untested_optimizer"
    optimizer = config.optimizer.optimizer
    if optimizer != "adam" and file.get(key) is False:
        reason = f"DeepSpeed then rejects {as_flag('optimizer', optimizer)}"
        yield file.invalid(key, reason, "optimizer")


def _zero_problems(config: Config, file: DeepSpeedFile) -> Iterator[Problem]:
    for name in ("offload_optimizer", "offload_param"):
        key = f"zero_optimization.{name}"
        block = file.get(key)
        if block is not None and block.get("device") is None:
            yield file.invalid(key, 'needs a device: "cpu", "nvme" or "none"')
    stage = config.zero_stage
    key = "zero_optimization.memory_efficient_linear"
    if stage == 3 and config.runtime.compile and file.get(key) and not compiles_efficient_linear():
        reason = f"the installed torch compiles it wrongly: remove it or {option('compile')}"
        yield file.invalid(key, reason, "compile")
    if stage < 2 or file.get("zero_optimization.reduce_scatter") is False:
        return
    for key, neutral in (("prescale_gradients", False), ("gradient_predivide_factor", 1)):
        if file.get(key) not in (None, neutral):
            reason = (
                f"not supported at ZeRO stage {stage}, whose reduce_scatter averages by itself; "
                f"write {json.dumps(neutral)}"
            )
            yield file.invalid(key, reason, "zero_stage")


def _ineffective_keys(config: Config, file: DeepSpeedFile) -> Iterator[Problem]:
    """Warn of keys that the stage or the optimizer does not read."""
    stage = config.zero_stage
    ineffective = {
        f"zero_optimization.{key}": f"not read at ZeRO stage {stage}"
        for key, value in file.values.get("zero_optimization", {}).items()
        if value != "auto" and not is_read_at(key, stage)
    }
    is_torch = adam_kernel(config, file.values) in (AdamKernel.TORCH, AdamKernel.TORCH_FUSED)
    if file.get("optimizer.params.fused") and not is_torch:
        ineffective["optimizer.params.fused"] = "an option of torch_adam"
    if not file.get(passthrough.SUPER_OFFLOAD) and file.get(passthrough.CORES) is not None:
        ineffective[passthrough.CORES] = "an option of super_offload"
    if not file.get(passthrough.DEEPCOMPILE):
        options = [
            f"compile.{key}" for key, value in file.values.get("compile", {}).items() if value
        ]
        ineffective |= dict.fromkeys(options, "an option of deepcompile")
    written = (None, number_of_checkpoints(config))
    if file.get(NUMBER_OF_CHECKPOINTS) not in written and not config.recompute.is_by_deepspeed:
        ineffective[NUMBER_OF_CHECKPOINTS] = "an option of DeepSpeed's activation checkpointing"
    by_reason: dict[str, list[str]] = {}
    for key, reason in ineffective.items():
        by_reason.setdefault(reason, []).append(key)
    for reason, keys in by_reason.items():
        problem = Problem("ds-keys-ineffective", keys=", ".join(keys), reason=reason)
        yield file.at(keys[0], problem)
    if str(file.get("optimizer.type")).lower() in ("fusedadam", "cpuadam", "deepspeedcpuadam"):
        yield Problem("ds-optimizer-is-class-name", describe=file.describe("optimizer.type"))


def _checkpoint_number_problems(config: Config, file: DeepSpeedFile) -> Iterator[Problem]:
    key = NUMBER_OF_CHECKPOINTS
    layers = config.model.num_layers
    per_chunk = config.recompute.checkpoint_num_layers
    if file.get(key) is None or not config.recompute.is_by_deepspeed:
        return
    if not layers or per_chunk <= 0:
        return
    if file.get(key) != number_of_checkpoints(config):
        reason = (
            f"{as_flag('num_layers', layers)} with {as_flag('checkpoint_num_layers', per_chunk)} "
            f"gives {number_of_checkpoints(config)}; leave it out"
        )
        yield file.invalid(key, reason, "num_layers", "checkpoint_num_layers")


def _layout_problems(config: Config, world_size: int) -> Iterator[Problem]:
    """Find combinations that the pinned DeepSpeed computes wrongly or does not support."""
    yield from support_matrix.problems(config)
    precision = config.precision
    deepspeed = config.deepspeed
    device = deepspeed.param_offload
    if deepspeed.uses_nvme and deepspeed.nvme_path is None:
        yield Problem("nvme-path-missing")
    if device == "nvme" and deepspeed.optimizer_offload == "none":
        yield Problem("nvme-parameters-without-offloaded-optimizer")
    is_partial = in_effect(deepspeed).optimizer_offload_fraction < 1
    spec = config.optimizer.spec
    if "partial-offload-of-other-optimizer" in spec.excludes and is_partial:
        yield Problem("partial-offload-of-other-optimizer", settings=config.optimizer)
    layout = support_matrix.layout_of(config) if spec.excluded_axes else {}
    for axis in spec.excluded_axes:
        if layout[axis] != support_matrix.AXES[axis].default:
            words = support_matrix.AXES[axis].flags_text(layout[axis])
            yield Problem(
                "adam-variant-layout", spec.switch, switch=option(spec.switch), layout=words
            )
    yield from _step_problems(config)
    dp_size = config.parallel.data_parallel_size(world_size)
    if dp_size and dp_size % max(1, in_effect(deepspeed).zero_hpz_partition_size):
        yield Problem("hpz-size-not-a-divisor", settings=deepspeed, dp_size=dp_size)
    scale = in_effect(precision).initial_loss_scale
    if precision.fp16 and not (scale > 0 and math.log2(scale).is_integer()):
        yield Problem("initial-loss-scale-not-power-of-two", scale=scale)


def _step_problems(config: Config) -> Iterator[Problem]:
    """Find options of a step that DeepSpeed or another package would not take as they are."""
    options = in_effect(config.optimizer)
    file = config.deepspeed_file
    reasons = {
        "use_bnb_optimizer": options.use_bnb_optimizer,
        "nvme_optimizer": config.deepspeed.optimizer_offload == "nvme",
    }
    key = "zero_optimization.offload_optimizer.super_offload"
    chosen = [name for name, value in options.moment_dtypes.items() if value != "fp32"]
    only_moments = {
        "bf16_master_weights": in_effect(config.precision).bf16_master_weights,
        "optimizer_offload_fraction": in_effect(config.deepspeed).optimizer_offload_fraction < 1,
    }
    others = [name for name in ("cautious_weight_decay", "qk_clip") if getattr(options, name)]
    if options.bf16_stochastic_round:
        if not only_moments["bf16_master_weights"]:
            yield Problem("bf16-stochastic-round-without-bf16-masters")
        for name in ("use_bnb_optimizer", "cautious_weight_decay"):
            if getattr(options, name):
                yield exclusive_problem(name, "bf16_stochastic_round")
    for name in (*chosen, *others):
        excluded = reasons | (only_moments if name in (*chosen, "qk_clip") else {})
        yield from (exclusive_problem(other, name) for other, holds in excluded.items() if holds)
        if file is not None and file.get(key):
            yield file.invalid(key, f"excludes {option(name)}", name)
