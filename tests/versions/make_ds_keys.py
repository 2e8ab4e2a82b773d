#!/usr/bin/env python
"""Write megatron_ds/engine/ds_config/keys.json: the keys of DeepSpeed's configuration models.

Run it after installing another DeepSpeed version and review the difference: a new key is accepted
in files unless keys.toml refuses it.
"""

from __future__ import annotations

import enum
import json
import types
from pathlib import Path
from typing import Any, Union, get_args, get_origin

OUTPUT = Path(__file__).resolve().parents[2] / "megatron_ds" / "engine" / "ds_config" / "keys.json"


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
    return {"deepspeed": version("deepspeed"), "blocks": blocks}


def main() -> None:
    OUTPUT.write_text(json.dumps(keys(), indent=1) + "\n", encoding="utf-8")
    print(f"wrote {OUTPUT.name}")


if __name__ == "__main__":
    main()
