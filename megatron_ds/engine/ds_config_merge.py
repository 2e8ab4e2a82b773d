"""Fills the configuration from the user's DeepSpeed file, and finds contradictions between them.

A key of the file sets its field unless the flag was given; `"auto"` and absent keys leave fields
alone. Pure functions that do not import deepspeed, so that a wrong file is reported at once.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from megatron_ds.config import Config
from megatron_ds.config.problems import Problem, UserError, option
from megatron_ds.engine import ds_curriculum, ds_scheduler
from megatron_ds.engine.ds_config import (
    is_read_at,
    number_of_checkpoints,
    uses_torch_adam,
    zero_stage,
)
from megatron_ds.engine.ds_config_file import DeepSpeedFile, read_file
from megatron_ds.engine.ds_fields import (
    MAPPINGS,
    KeyFieldMapping,
    as_flag,
    field_value,
    replace_fields,
)
from megatron_ds.engine.ds_layout import layout_problems
from megatron_ds.engine.ds_values import as_float

Warn = Callable[[Problem], None]


def merge_file(
    config: Config, world_size: int, warn: Warn = lambda _: None
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
        return config, list(layout_problems(config))
    try:
        file = read_file(path)
    except UserError as error:
        return config, list(error.problems)
    merger = _ConfigMerger(config, file, warn)
    for mapping in MAPPINGS:
        if file.get(mapping.key) is not None:
            merger.merge_key(mapping)
    merger.merge_betas()
    merger.merge_accumulation(world_size)
    merger.merge_scheduler(world_size)
    merger.merge_curriculum()
    config = dataclasses.replace(merger.merged(), deepspeed_file=file)
    for warning in (*file.warnings, *_ineffective_keys(config, file)):
        warn(warning)
    return config, [
        *file.problems,
        *merger.problems,
        *_checkpoint_number_problems(config, file),
        *_optimizer_problems(config, file),
        *_zero_problems(config, file),
        *layout_problems(config),
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

    def merged(self) -> Config:
        origins = {
            name: f"{key} of {self._file.location(key)}"
            for name, key in self._keys.items()
            if name not in self._config.given
        }
        filled = replace_fields(self._config, self._values)
        return dataclasses.replace(filled, origins={**self._config.origins, **origins})

    def merge_key(self, mapping: KeyFieldMapping) -> None:
        try:
            value = mapping.read(self._file.get(mapping.key))
        except (ValueError, OverflowError) as error:
            self.problems.append(self._file.invalid(mapping.key, error, mapping.field))
            return
        self.set_field(mapping.key, mapping.field, value)

    def set_field(self, key: str, name: str, value: Any) -> None:
        """Set a field to the value that a key gives it, or note the contradiction."""
        if name in self._config.given:
            current = field_value(self._config, name)
            if current != value:
                self.problems.append(
                    Problem(
                        "ds-key-contradicts-flag",
                        name,
                        as_flag=as_flag(name, current),
                        describe=self._file.describe(key),
                    )
                )
            return
        other = self._keys.setdefault(name, key)
        if self._values.setdefault(name, value) != value:
            self.problems.append(
                Problem(
                    "ds-keys-contradict",
                    name,
                    first=self._file.describe(key),
                    second=self._file.describe(other),
                    flag=option(name),
                )
            )

    def merge_betas(self) -> None:
        key = "optimizer.params.betas"
        betas = self._file.get(key)
        if betas is None:
            return
        try:
            first, second = map(as_float, betas)
        except (TypeError, ValueError):
            invalid = self._file.invalid(key, "must be two numbers", "adam_beta1", "adam_beta2")
            self.problems.append(invalid)
            return
        self.set_field(key, "adam_beta1", first)
        self.set_field(key, "adam_beta2", second)

    def merge_accumulation(self, world_size: int) -> None:
        """Check gradient_accumulation_steps, or compute the global batch size from it."""
        key = "gradient_accumulation_steps"
        steps, config = self._file.get(key), replace_fields(self._config, self._values)
        if steps is None:
            return
        if steps < 1:
            self.problems.append(self._file.invalid(key, "must be positive"))
            return
        micro, model_ranks = config.schedule.micro_batch_size, _model_ranks(config)
        if not micro or not model_ranks or world_size % model_ranks:
            return  # reported by the checks of these fields
        dp_size = world_size // model_ranks
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
        """Set the schedule's fields from a scheduler block."""
        config = replace_fields(self._config, self._values)
        problems = list(ds_scheduler.problems(config, self._file))
        self.problems += problems
        micro = config.schedule.micro_batch_size
        if not micro or micro < 1 or not _model_ranks(config):
            return
        batch_size = config.final_global_batch_size(config.parallel.data_parallel_size(world_size))
        flags = []
        for translated in ds_scheduler.translate(config, self._file, batch_size):
            self.set_field(translated.key, translated.field, translated.value)
            flags.append(as_flag(translated.field, translated.value))
        if flags and not problems:
            self._warn(
                Problem(
                    "ds-scheduler-translated",
                    location=self._file.location("scheduler.type"),
                    flags=" ".join(flags),
                )
            )

    def merge_curriculum(self) -> None:
        """Set the fields of the sequence-length curriculum from its block."""
        self.problems += ds_curriculum.problems(self._file)
        lengths = ds_curriculum.lengths(self._file)
        if lengths is None:
            return
        step, before = int(self._file.get(ds_curriculum.STEP)), len(self.problems)
        self.set_field(ds_curriculum.BLOCK, "curriculum_seqlen", lengths)
        self.set_field(ds_curriculum.STEP, "curriculum_seqlen_step", step)
        if len(self.problems) == before:
            self._warn(
                Problem(
                    "ds-curriculum-translated",
                    location=self._file.location(ds_curriculum.BLOCK),
                    block=ds_curriculum.BLOCK,
                    first=as_flag("curriculum_seqlen", lengths),
                    second=as_flag("curriculum_seqlen_step", step),
                )
            )


def _model_ranks(config: Config) -> int:
    """Ranks that hold one copy of the model; 0 if the sizes, which are not checked yet, are
    invalid.
    """
    tp_size = config.parallel.tensor_model_parallel_size
    pp_size = config.parallel.pipeline_model_parallel_size
    return tp_size * pp_size if min(tp_size, pp_size) > 0 else 0


def _optimizer_problems(config: Config, file: DeepSpeedFile) -> Iterator[Problem]:
    kind, params = str(file.get("optimizer.type")).lower(), "optimizer.params"
    if kind.endswith("cpuadam") and not config.deepspeed.cpu_optimizer:
        yield Problem("ds-cpu-adam-without-offload", describe=file.describe("optimizer.type"))
    if file.get(f"{params}.adam_w_mode") is False:
        yield file.invalid(f"{params}.adam_w_mode", "adam is always AdamW", "optimizer")
    if file.get(f"{params}.torch_adam") and config.deepspeed.cpu_optimizer:
        reason = "offloaded optimizer states need DeepSpeed's CPU Adam"
        yield file.invalid(f"{params}.torch_adam", reason, "cpu_optimizer")
    key = "zero_allow_untested_optimizer"
    if config.optimizer.optimizer == "sgd" and file.get(key) is False:
        reason = f"DeepSpeed then rejects {as_flag('optimizer', 'sgd')}"
        yield file.invalid(key, reason, "optimizer")


def _zero_problems(config: Config, file: DeepSpeedFile) -> Iterator[Problem]:
    for name in ("offload_optimizer", "offload_param"):
        key = f"zero_optimization.{name}"
        block = file.get(key)
        if block is None:
            continue
        if block.get("device") is None:
            yield file.invalid(key, 'needs a device: "cpu", "nvme" or "none"')
        if block.get("device") == "nvme" and not block.get("nvme_path"):
            yield file.invalid(key, "the device nvme needs an nvme_path")
    stage = zero_stage(config)
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
    stage = zero_stage(config)
    ineffective = {
        f"zero_optimization.{key}": f"not read at ZeRO stage {stage}"
        for key in file.values.get("zero_optimization", {})
        if not is_read_at(key, stage)
    }
    if file.get("optimizer.params.fused") and not uses_torch_adam(config, file.values):
        ineffective["optimizer.params.fused"] = "an option of torch_adam"
    by_reason: dict[str, list[str]] = {}
    for key, reason in ineffective.items():
        by_reason.setdefault(reason, []).append(key)
    for reason, keys in by_reason.items():
        yield Problem(
            "ds-keys-ineffective",
            location=file.location(keys[0]),
            keys=", ".join(keys),
            reason=reason,
        )
    if str(file.get("optimizer.type")).lower() in ("fusedadam", "cpuadam", "deepspeedcpuadam"):
        yield Problem("ds-optimizer-is-class-name", describe=file.describe("optimizer.type"))


def _checkpoint_number_problems(config: Config, file: DeepSpeedFile) -> Iterator[Problem]:
    key = "activation_checkpointing.number_checkpoints"
    layers, per_chunk = config.model.num_layers, config.recompute.checkpoint_num_layers
    if file.get(key) is None or not layers or per_chunk <= 0:
        return
    if file.get(key) != number_of_checkpoints(config):
        reason = (
            f"{as_flag('num_layers', layers)} with {as_flag('checkpoint_num_layers', per_chunk)} "
            f"gives {number_of_checkpoints(config)}; leave it out"
        )
        yield file.invalid(key, reason, "num_layers", "checkpoint_num_layers")
