"""The user's --deepspeed_config file: read, checked key by key, and put into today's spelling.

Owns which keys there are, which are old names of others, which are dropped because they are off or
mean nothing here, and which are refused and why. Knows the configuration's fields only by the
names of their flags in messages; what a key says about the run is read in `ds_config`. deepspeed
is not imported. Key names: https://www.deepspeed.ai/docs/config-json
"""

from __future__ import annotations

import difflib
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Json = dict[str, Any]

Kind = Callable[[Any], Any]
"""Checks a key's value and gives it in the configuration's type; ValueError if it cannot be."""


def as_flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("must be true or false")
    return value


def as_number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError("must be a number")
    # Python's whole numbers have no end; nothing takes one that no float can be.
    if not abs(value) <= sys.float_info.max:
        raise ValueError("must be a number")
    return float(value)


def as_whole(value: Any) -> int:
    """2e8 is a whole number too."""
    if as_number(value) != int(value):
        raise ValueError("must be a whole number")
    return int(value)


def as_non_negative(value: Any) -> int:
    if as_whole(value) < 0:
        raise ValueError("must not be negative")
    return int(value)


def as_text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("must be a text")
    return value


def as_dtype(value: Any) -> str:
    """ "fp32", "fp16" or "bf16"."""
    names = {"float32": "fp32", "float16": "fp16", "half": "fp16", "bfloat16": "bf16"}
    name = names.get(str(value), str(value))
    if name not in ("fp32", "fp16", "bf16"):
        raise ValueError("must be fp32, fp16 or bf16")
    return name


def as_device(value: Any) -> str:
    if value not in ("none", "cpu", "nvme"):
        raise ValueError('must be "none", "cpu" or "nvme"')
    return str(value)


def as_anything(value: Any) -> Any:
    return value


def as_block(value: Any) -> Json:
    if not isinstance(value, dict):
        raise ValueError("must be an object")
    return value


def _keys(**names: str) -> dict[str, Kind]:
    """Keys by the kind of their values, from one line of names for each kind."""
    kinds: dict[str, Kind] = {
        "flags": as_flag,
        "numbers": as_number,
        "wholes": as_whole,
        "sizes": as_non_negative,
        "texts": as_text,
        "dtypes": as_dtype,
        "devices": as_device,
        "blocks": as_block,
        "others": as_anything,
    }
    return {key: kinds[kind] for kind, words in names.items() for key in words.split()}


PASSED_KEYS = _keys(
    flags="wall_clock_breakdown dump_state disable_python_gc memory_breakdown prescale_gradients "
    "disable_allgather zero_allow_untested_optimizer zero_force_ds_cpu_optimizer",
    numbers="gradient_predivide_factor",
    sizes="steps_per_print",
    dtypes="communication_data_type",
    texts="log_level",
    blocks="comms_logger flops_profiler aio timers tensorboard csv_monitor wandb comet checkpoint",
)
"""Top-level keys that reach DeepSpeed as they are."""

TOP_KEYS = PASSED_KEYS | _keys(
    wholes="train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps",
    numbers="gradient_clipping",
    blocks="zero_optimization fp16 bf16 data_types optimizer scheduler activation_checkpointing "
    "curriculum_learning",
)

BLOCKS: dict[str, dict[str, Kind]] = {
    "zero_optimization": _keys(
        wholes="stage",
        blocks="offload_optimizer offload_param",
        flags="allgather_partitions overlap_comm reduce_scatter contiguous_gradients "
        "round_robin_gradients ignore_unused_parameters load_from_fp32_weights "
        "use_multi_rank_bucket_allreduce memory_efficient_linear zero_quantized_weights "
        "zero_quantized_gradients parameter_alignment log_trace_cache_warnings "
        "enable_sanity_checks override_module_apply stage3_gather_16bit_weights_on_model_save "
        "stage3_use_all_reduce_for_fetch_params stage3_allgather_sequential",
        sizes="allgather_bucket_size reduce_bucket_size sub_group_size zero_hpz_partition_size "
        "stage3_prefetch_bucket_size stage3_param_persistence_threshold "
        "stage3_model_persistence_threshold stage3_max_live_parameters "
        "stage3_max_reuse_distance stage3_module_granularity_threshold",
    ),
    "zero_optimization.offload_optimizer": _keys(
        devices="device",
        texts="nvme_path",
        sizes="buffer_count",
        flags="pin_memory pipeline_read pipeline_write fast_init",
        numbers="ratio",
    ),
    "zero_optimization.offload_param": _keys(
        devices="device",
        texts="nvme_path",
        sizes="buffer_count buffer_size max_in_cpu",
        flags="pin_memory",
    ),
    "fp16": _keys(
        flags="enabled auto_cast consecutive_hysteresis",
        numbers="loss_scale initial_scale_power min_loss_scale",
        wholes="loss_scale_window hysteresis",
    ),
    "bf16": _keys(flags="enabled check_grad_overflow immediate_grad_update"),
    "data_types": _keys(dtypes="grad_accum_dtype"),
    "optimizer": _keys(texts="type", blocks="params"),
    "optimizer.params": _keys(
        numbers="lr eps weight_decay momentum", others="betas", flags="adam_w_mode torch_adam fused"
    ),
    "scheduler": _keys(texts="type", blocks="params"),
    "scheduler.params": _keys(
        numbers="warmup_min_lr warmup_max_lr warmup_min_ratio cos_min_ratio",
        wholes="warmup_num_steps total_num_steps",
        texts="warmup_type",
    ),
    "curriculum_learning": _keys(
        flags="enabled",
        texts="curriculum_type schedule_type",
        wholes="min_difficulty max_difficulty",
        blocks="schedule_config",
    ),
    "curriculum_learning.schedule_config": _keys(
        wholes="total_curriculum_step difficulty_step",
        numbers="root_degree",
        others="difficulty max_step",
    ),
    "activation_checkpointing": _keys(
        flags="partition_activations cpu_checkpointing contiguous_memory_optimization "
        "synchronize_checkpoint_boundary profile",
        wholes="number_checkpoints",
    ),
    "comms_logger": _keys(flags="enabled prof_all verbose debug", others="prof_ops"),
    "flops_profiler": _keys(
        flags="enabled detailed",
        wholes="profile_step module_depth top_modules",
        numbers="recompute_fwd_factor",
        texts="output_file",
    ),
    "aio": _keys(
        sizes="block_size queue_depth intra_op_parallelism",
        flags="single_submit overlap_events use_gds",
    ),
    "timers": _keys(blocks="throughput"),
    "timers.throughput": _keys(flags="enabled synchronized"),
    "tensorboard": _keys(flags="enabled", texts="output_path job_name"),
    "csv_monitor": _keys(flags="enabled", texts="output_path job_name"),
    "wandb": _keys(flags="enabled", texts="group team project"),
    "comet": _keys(
        flags="enabled online",
        sizes="samples_log_interval",
        texts="project workspace api_key experiment_name experiment_key mode",
    ),
    "checkpoint": _keys(texts="tag_validation"),
}
"""Keys within blocks: dotted block -> key -> kind of its value."""

REMOVED = "the installed DeepSpeed no longer has it"
REFUSED: dict[str, str] = {
    "amp": f"{REMOVED}; use --bf16 or --fp16",
    "compression_training": REMOVED,
    "eigenvalue": REMOVED,
    "elasticity": f"{REMOVED}; give the batch sizes",
    "graph_harvesting": REMOVED,
    "nebula": REMOVED,
    "progressive_layer_drop": REMOVED,
    "quantize_training": REMOVED,
    "sparse_attention": REMOVED,
    "sparse_gradients": REMOVED,
    "zero_optimization.mics_shard_size": REMOVED,
    "zero_optimization.mics_hierarchical_params_gather": REMOVED,
    "zero_optimization.zeropp_loco_param": REMOVED,
    "zero_optimization.legacy_stage1": f"{REMOVED}; stage 1 is what it was replaced by",
    "zero_optimization.elastic_checkpoint": "it changes the layout of checkpoints",
    "zero_optimization.pipeline_loading_checkpoint": "pipeline parallelism is not there yet",
    "zero_optimization.compute_grad_norm": "the norm is always computed; leave the key out",
    "zero_optimization.zenflow": "it is not there yet",
    "zero_optimization.leaf_module": "no module of the model needs it",
    "zero_optimization.zero_quantized_nontrainable_weights": "all weights are trained",
    "zero_optimization.save_muon_momentum_buffer_in_memory": "the optimizers are adam and sgd",
    "zero_optimization.offload_optimizer.super_offload": "it is not there yet",
    "bf16.bf16_master_weights_and_grads": "master weights and their gradients are kept in fp32",
    "bf16.bf16_optimizer_states": "the optimizer's states are kept in fp32",
    "fp16.fp16_master_weights_and_grads": "master weights and their gradients are kept in fp32",
    "optimizer.legacy_fusion": REMOVED,
    "optimizer.params.amsgrad": "adam is AdamW without it",
    "optimizer.params.nesterov": "sgd takes its plain momentum",
    "optimizer.params.dampening": "sgd takes its plain momentum",
    "checkpoint.load_universal": "checkpoints are loaded with --load",
    "checkpoint.use_node_local_storage": "--save must be one folder for all machines",
    "checkpoint.parallel_write": "pipeline parallelism is not there yet",
    "checkpoint.writer": "DeepSpeed cannot load what its own writers write",
    "max_grad_norm": "DeepSpeed ignores it; use gradient_clipping or --clip-grad",
    "managed_gradient_accumulation": "the training loop sets the accumulation boundary",
    "gradient_allreduce_op": "gradients are averaged over data-parallel ranks",
    "torch_autocast": "use --bf16",
    "tensor_parallel": "use --tensor-model-parallel-size",
    "sequence_parallel_size": "sequence parallelism is not there yet",
    "seq_parallel_communication_data_type": "sequence parallelism is not there yet",
    "expert_parallel": "mixture of experts is not there yet",
    "use_data_before_expert_parallelism": "mixture of experts is not there yet",
    "pipeline": "pipeline parallelism is not there yet",
    "data_efficiency": "its data sampling and random-LTD are not there yet",
    "compile": "use --compile",
    "hybrid_engine": "it is not there yet",
    "weight_quantization": "it is for inference",
}
"""Keys that would change the run and are not supported: key -> what to do. One that is off (false,
or a block with nothing enabled) changes nothing and is dropped with a warning."""

RENAMED: dict[str, str] = {
    "bfloat16": "bf16",
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": (
        "zero_optimization.stage3_gather_16bit_weights_on_model_save"
    ),
    "zero_optimization.gather_16bit_weights_on_model_save": (
        "zero_optimization.stage3_gather_16bit_weights_on_model_save"
    ),
    "zero_optimization.prefetch_bucket_size": "zero_optimization.stage3_prefetch_bucket_size",
    "zero_optimization.param_persistence_threshold": (
        "zero_optimization.stage3_param_persistence_threshold"
    ),
    "zero_optimization.model_persistence_threshold": (
        "zero_optimization.stage3_model_persistence_threshold"
    ),
    "zero_optimization.max_live_parameters": "zero_optimization.stage3_max_live_parameters",
    "zero_optimization.max_reuse_distance": "zero_optimization.stage3_max_reuse_distance",
    "optimizer.params.max_grad_norm": "gradient_clipping",
}
"""Old and short spellings of keys."""

OLD_SWITCHES: dict[str, tuple[str, Any]] = {
    "zero_optimization.cpu_offload": ("zero_optimization.offload_optimizer", {"device": "cpu"}),
    "zero_optimization.cpu_offload_param": ("zero_optimization.offload_param", {"device": "cpu"}),
    "zero_optimization.cpu_offload_params": ("zero_optimization.offload_param", {"device": "cpu"}),
    "fp32_allreduce": ("communication_data_type", "fp32"),
    "allreduce_always_fp32": ("communication_data_type", "fp32"),
}
"""Old switches: what stands in their place where they are true."""

OLD_PIN_KEY = "zero_optimization.cpu_offload_use_pin_memory"
IGNORED_KEYS: dict[str, str] = {
    "dataloader_drop_last": "batches are always whole",
    "optimizer.params.bias_correction": "adam always corrects its bias",
    "vocabulary_size": "the tokenizer says it",
    "zero_optimization.offload_optimizer.cpuadam_cores_perc": "it is an option of super_offload",
}
"""Keys that mean nothing here."""
DROPPED_IF: dict[str, Any] = {"optimizer.params.bias_correction": True}
"""The value that alone may be dropped."""


@dataclass(frozen=True)
class DeepSpeedFile:
    """What a file says, in today's keys."""

    path: str
    values: Json
    warnings: tuple[str, ...] = ()
    """What was put into other words or dropped, a line each."""
    problems: tuple[str, ...] = ()
    lines: Mapping[str, int] = field(default_factory=dict)
    """Line of each dotted key, by the spelling in the file and today's."""

    def get(self, dotted: str) -> Any:
        """A key's value; None if it is absent or "auto", which leave it to the flags."""
        value = _get(self.values, dotted)
        return None if value == "auto" else value

    def location(self, dotted: str) -> str:
        """`ds.json:4`, or the path alone where the line is not known."""
        line = self.lines.get(dotted)
        return self.path if line is None else f"{self.path}:{line}"


def read_file(path: str) -> DeepSpeedFile:
    """Reads and checks a file. Raises ValueError if it is not a JSON object."""
    try:
        text = Path(path).read_text(encoding="utf-8")
        values = json.loads(text, object_pairs_hook=_unique)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}:{error.lineno}:{error.colno}: not JSON: {error.msg}") from error
    except RecursionError:
        raise ValueError(f"{path}: is nested too deeply") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--deepspeed_config {path}: {error}") from error
    except ValueError as error:  # a key that stands twice, or a number of thousands of digits
        raise ValueError(f"{path}: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path}: must hold a JSON object")
    return _Normalizer(path, values, _key_lines(text)).read()


class _Normalizer:
    """Rewrites a file's values in place and keeps what there is to say about it."""

    def __init__(self, path: str, values: Json, lines: dict[str, int]) -> None:
        self._path = path
        self._values = values
        self._lines = lines
        self._warnings: list[str] = []
        self._problems: list[str] = []

    def read(self) -> DeepSpeedFile:
        self._switch_off()
        self._blocks()
        self._convert()
        self._drop()
        self._check()
        return DeepSpeedFile(
            self._path, self._values, tuple(self._warnings), tuple(self._problems), self._lines
        )

    def _switch_off(self) -> None:
        """A block that is off, or "auto", says nothing, whatever stands in it."""
        key = "curriculum_learning"
        if _get(self._values, key) == "auto":
            _pop(self._values, key)
        elif _has(self._values, key) and _is_off(_get(self._values, key)):
            _pop(self._values, key)
            self._warn(key, "is off: dropped")

    def _blocks(self) -> None:
        """Blocks must be objects; one that is not is taken out, so that the rest can be read. null
        says nothing, as for every key."""
        zero = self._values.get("zero_optimization")
        if isinstance(zero, bool):
            self._values["zero_optimization"] = {"stage": int(zero)}
            self._warn("zero_optimization", f'{json.dumps(zero)} becomes {{"stage": {int(zero)}}}')
        if "bfloat16" in self._values and "bf16" not in self._values:
            self._rename("bfloat16", "bf16")
        for block in BLOCKS:
            value = _get(self._values, block)
            if value is None:
                _pop(self._values, block)
            elif not isinstance(value, dict):
                self._problem(block, f"{json.dumps(value)}: must be an object")
                _pop(self._values, block)

    def _convert(self) -> None:
        for old, new in RENAMED.items():
            if _has(self._values, old):
                self._rename(old, new)
        pin = _pop(self._values, OLD_PIN_KEY)
        pinned = False
        for old, (new, meaning) in OLD_SWITCHES.items():
            if not _has(self._values, old):
                continue
            value = _pop(self._values, old)
            if not isinstance(value, bool):
                self._problem(old, f"{json.dumps(value)}: must be true or false")
            elif not value:
                self._warn(old, "false says nothing: dropped")
            else:
                if isinstance(meaning, dict) and isinstance(pin, bool):
                    meaning, pinned = {**meaning, "pin_memory": pin}, True
                self._place(old, new, meaning)
        if pin is not None:
            self._warn(OLD_PIN_KEY, "becomes pin_memory" if pinned else "offloads nothing: dropped")

    def _rename(self, old: str, new: str) -> None:
        self._place(old, new, _pop(self._values, old))

    def _place(self, old: str, new: str, value: Any) -> None:
        """Puts the value of an old key where today's stands, unless that says something else."""
        present = _get(self._values, new)
        agrees = present == value
        if isinstance(present, dict) and isinstance(value, dict):
            agrees = all(present.get(key, one) == one for key, one in value.items())
        if present is not None and not agrees:
            self._problem(
                old,
                f"contradicts {new} {json.dumps(present)}"
                f" of {self._path}:{self._lines.get(new, '?')}: leave the old key out",
            )
            return
        if present is None:
            _put(self._values, new, value)
            for key in (new, *(f"{new}.{key}" for key in _child_keys(value))):
                self._lines.setdefault(key, self._lines.get(old, 1))
        self._warn(old, f"is an old key: taken as {new} {json.dumps(value)}")

    def _drop(self) -> None:
        for key, reason in IGNORED_KEYS.items():
            if not _has(self._values, key):
                continue
            value = _pop(self._values, key)
            if value != DROPPED_IF.get(key, value):
                self._problem(key, f"{json.dumps(value)} is not supported: {reason}")
            else:
                self._warn(key, f"has no effect: {reason}")
        for key, reason in REFUSED.items():
            if not _has(self._values, key):
                continue
            if _is_off(_pop(self._values, key)):
                self._warn(key, f"is off: dropped ({reason})")
            else:
                self._problem(key, f"is not supported: {reason}")

    def _check(self) -> None:
        """Names keys that nobody reads, with the nearest name, and values of the wrong kind."""
        for block, kinds in {"": TOP_KEYS, **BLOCKS}.items():
            if block == "scheduler.params" and not _warms_up(self._values):
                continue  # its type is refused, and the keys are that type's
            values = (_get(self._values, block) or {}) if block else self._values
            for key, value in list(values.items()):
                dotted = f"{block}.{key}" if block else key
                if key not in kinds:
                    near = _suggestion(key, sorted(kinds))
                    self._problems.append(f"{self._at(dotted)}: there is no key {dotted}{near}")
                elif value not in (None, "auto"):
                    self._check_kind(dotted, kinds[key], value)

    def _check_kind(self, key: str, kind: Kind, value: Any) -> None:
        try:
            kind(value)
        except ValueError as error:
            self._problem(key, f"{json.dumps(value)}: {error}")
            _pop(self._values, key)  # so that the others can be read

    def _warn(self, key: str, words: str) -> None:
        self._warnings.append(f"{self._at(key)}: {key} {words}")

    def _problem(self, key: str, words: str) -> None:
        self._problems.append(f"{self._at(key)}: {key} {words}")

    def _at(self, key: str) -> str:
        line = self._lines.get(key)
        return self._path if line is None else f"{self._path}:{line}"


def _unique(pairs: list[tuple[str, Any]]) -> Json:
    seen: set[str] = set()
    for key, _ in pairs:
        if key in seen:
            raise ValueError(f"the key {key!r} stands twice")
        seen.add(key)
    return dict(pairs)


TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\],:\n]')


def _key_lines(text: str) -> dict[str, int]:
    """Line of every dotted key of a text that is valid JSON; keys within lists are left out."""
    lines: dict[str, int] = {}
    stack: list[str | None] = []  # the key that each open object stands under; None for a list
    key, line, last = "", 1, ""
    for match in TOKEN.finditer(text):
        token = match.group()
        if token == "\n":
            line += 1
        elif token == "{":
            stack.append(key)
        elif token == "[":
            stack.append(None)
        elif token in "}]":
            stack.pop()
        elif token == ":":
            if None not in stack:
                key = json.loads(last)
                prefix = [name for name in stack[1:] if name is not None]
                lines[".".join([*prefix, key])] = line
        elif token != ",":
            last = token
    return lines


def _is_off(value: Any) -> bool:
    """Whether a block or key says that nothing of it is used."""
    if not isinstance(value, dict):
        return not value
    if "enabled" in value:
        return value["enabled"] is False
    switches = list(_switches(value))
    return not value or (switches != [] and not any(switches))


def _switches(block: Json) -> Iterator[bool]:
    """What the switches say that stand anywhere below a block."""
    for key, value in block.items():
        if key == "enabled":
            yield value is not False
        elif isinstance(value, dict):
            yield from _switches(value)


def _warms_up(values: Json) -> bool:
    return str(_get(values, "scheduler.type")).startswith("Warmup")


def _child_keys(value: Any) -> list[str]:
    return list(value) if isinstance(value, dict) else []


def _suggestion(key: str, known: list[str]) -> str:
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    return f"; did you mean {near[0]!r}?" if near else ""


def _parent(values: Json, dotted: str) -> tuple[Any, str]:
    *above, last = dotted.split(".")
    value: Any = values
    for part in above:
        value = value.get(part) if isinstance(value, dict) else None
    return value, last


def _get(values: Json, dotted: str) -> Any:
    parent, last = _parent(values, dotted)
    return parent.get(last) if isinstance(parent, dict) else None


def _has(values: Json, dotted: str) -> bool:
    parent, last = _parent(values, dotted)
    return isinstance(parent, dict) and last in parent


def _pop(values: Json, dotted: str) -> Any:
    parent, last = _parent(values, dotted)
    return parent.pop(last, None) if isinstance(parent, dict) else None


def _put(values: Json, dotted: str, value: Any) -> None:
    parent, last = _parent(values, dotted)
    parent[last] = value
