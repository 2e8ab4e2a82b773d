#!/usr/bin/env python
"""Write megatron_ds/engine/ds_config/keys.json: keys and defaults of the installed DeepSpeed.

Run it after installing another DeepSpeed version and review the difference: a new key is accepted
in files unless keys.toml refuses it.
"""

from __future__ import annotations

import enum
import importlib
import inspect
import json
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Union, get_args, get_origin

from megatron_ds.engine.ds_config.keys import TABLES

OUTPUT = Path(__file__).resolve().parents[2] / "megatron_ds" / "engine" / "ds_config" / "keys.json"

CONSTANTS = {
    "": "deepspeed.runtime.constants",
    "data_types": "deepspeed.runtime.constants",
    "activation_checkpointing": "deepspeed.runtime.activation_checkpointing.config",
    "aio": "deepspeed.runtime.swap_tensor.constants",
    "flops_profiler": "deepspeed.profiling.constants",
}
"""Modules that define `NAME = key` and `NAME_DEFAULT = value` for the keys of a block."""


def models() -> dict[str, Any]:
    """DeepSpeed's pydantic model of each block of a file that has one."""
    from deepspeed.comm.config import CommsLoggerConfig
    from deepspeed.compile.config import CompileConfig
    from deepspeed.monitor import config as monitor
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.zero import offload_config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.utils.config import DeepSpeedThroughputTimerConfig

    return {
        "zero_optimization": DeepSpeedZeroConfig,
        "zero_optimization.offload_optimizer": offload_config.DeepSpeedZeroOffloadOptimizerConfig,
        "zero_optimization.offload_param": offload_config.DeepSpeedZeroOffloadParamConfig,
        "fp16": DeepSpeedFP16Config,
        "bf16": DeepSpeedBF16Config,
        "comms_logger": CommsLoggerConfig,
        "compile": CompileConfig,
        "tensorboard": monitor.TensorBoardConfig,
        "csv_monitor": monitor.CSVConfig,
        "wandb": monitor.WandbConfig,
        "comet": monitor.CometConfig,
        "timers.throughput": DeepSpeedThroughputTimerConfig,
    }


def kind_of(field: Any) -> str:
    """The kind of a model's field, a name of `values.KINDS`."""
    annotation = field.annotation
    if get_origin(annotation) in (Union, types.UnionType):  # Optional
        annotation = next(kind for kind in get_args(annotation) if kind is not type(None))
    if not isinstance(annotation, type):
        return "any"
    if issubclass(annotation, bool):
        return "bool"
    if issubclass(annotation, enum.Enum):
        return "int" if isinstance(next(iter(annotation)).value, int) else "device"
    if issubclass(annotation, int):
        is_size = any(hasattr(bound, "ge") or hasattr(bound, "gt") for bound in field.metadata)
        return "size" if is_size else "int"
    if issubclass(annotation, float):
        return "float"
    if issubclass(annotation, str | Path):
        return "str"
    return "object" if hasattr(annotation, "model_fields") else "any"


def defaults() -> Iterator[tuple[str, Any]]:
    """Dotted key and default of every key that has one in DeepSpeed's code."""
    for block, model in models().items():
        for name, field in model.model_fields.items():
            if kind_of(field) != "object" and not (field.json_schema_extra or {}).get("deprecated"):
                value = field.get_default(call_default_factory=True)
                value = value.value if isinstance(value, enum.Enum) else value
                yield f"{block}.{field.alias or name}", value
    kinds = TABLES["kinds"]
    for block, module in CONSTANTS.items():
        names = vars(importlib.import_module(module))
        tables = [kinds["passed"], kinds[""]] if block == "" else [kinds[block]]
        known = {
            key for table in tables for kind in table if kind != "object" for key in table[kind]
        }
        for name, key in names.items():
            if isinstance(key, str) and key in known and f"{name}_DEFAULT" in names:
                yield f"{block}.{key}".removeprefix("."), names[f"{name}_DEFAULT"]
    from deepspeed.ops.adam import FusedAdam

    adam = inspect.signature(FusedAdam.__init__).parameters
    for name in ("lr", "betas", "eps", "weight_decay"):
        default = adam[name].default
        yield f"optimizer.params.{name}", list(default) if name == "betas" else default


def keys() -> dict[str, Any]:
    """The content of the file."""
    from importlib.metadata import version

    blocks = {
        block: {
            field.alias or name: kind_of(field)
            for name, field in model.model_fields.items()
            if not (field.json_schema_extra or {}).get("deprecated")
        }
        for block, model in models().items()
    }
    return {
        "deepspeed": version("deepspeed"),
        "blocks": blocks,
        "defaults": {key: value for key, value in sorted(defaults()) if value is not None},
    }


def main() -> None:
    OUTPUT.write_text(json.dumps(keys(), indent=1) + "\n", encoding="utf-8")
    print(f"wrote {OUTPUT.name}")


if __name__ == "__main__":
    main()
