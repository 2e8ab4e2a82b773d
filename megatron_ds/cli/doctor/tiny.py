"""The settings of a run with every feature of another one, at a size that a CPU trains at once.

Sizes are in frameworks.toml. Knows no torch.
"""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

from megatron_ds.cli.doctor.frameworks import tables
from megatron_ds.config import GROUP_OF_FIELD, Config
from megatron_ds.config.deepspeed_file import pop

EXPERTS = 4
LARGEST_AXIS = 2
"""Ranks of a parallel axis."""


def size(name: str) -> Any:
    """The value of an option of every tiny run."""
    return tables()["try"]["size"][name]


def shrink(config: Config, world_size: int, folder: Path) -> tuple[Config, int]:
    """The small settings and their number of processes.

    Args:
        config: Settings of the original.
        world_size: Its number of processes.
        folder: Where data, checkpoints and the DeepSpeed file are.
    """
    table = tables()["try"]
    axes = {name: min(ranks, LARGEST_AXIS) for name, ranks in config.axis_sizes.items()}
    processes = max(min(world_size, 2), math.prod(axes.values()))
    dp_size = processes // (axes["tp_size"] * axes["pp_size"] * axes["sp_size"])
    batch = 2 * dp_size * axes["pp_size"]
    values: dict[str, Any] = {
        **dict.fromkeys(table["none"].split()),
        **dict.fromkeys(table["false"].split(), False),
        **table["size"],
        "deepspeed_config": None,
        "tensor_model_parallel_size": axes["tp_size"],
        "pipeline_model_parallel_size": axes["pp_size"],
        "ds_sequence_parallel_size": axes["sp_size"],
        "expert_model_parallel_size": axes["ep_size"],
        "num_layers": 2 * axes["pp_size"],
        "global_batch_size": batch,
        "data_path": (str(folder / "data"),),
        "data_cache_path": str(folder / "cache"),
        "save": str(folder / "checkpoints"),
        "allow_fp16_on_cpu": config.precision.fp16,
    }
    small = _small(config, axes["tp_size"], dp_size, batch)
    small["tensorboard_dir"] = str(folder / "tensorboard")
    given = config.given | config.origins.keys()
    values |= {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in small.items()
        if name in given and getattr(getattr(config, GROUP_OF_FIELD[name]), name)
    }
    if config.deepspeed_file is not None:
        content = json.loads(json.dumps(config.deepspeed_file.values))
        for key in table["keys"].split():
            pop(content, key)
        path = folder / "tiny_ds_config.json"
        path.write_text(json.dumps(content, indent=2), "utf-8")
        values["deepspeed_config"] = str(path)
    values = {name: value for name, value in values.items() if name in GROUP_OF_FIELD}
    tiny = config.with_values(values)
    return dataclasses.replace(tiny, given=config.given | values.keys()), processes


def _small(config: Config, tp_size: int, dp_size: int, batch: int) -> dict[str, Any]:
    """Values of options that the original may have set."""
    model, moe = config.model, config.moe
    has_all_heads = model.kv_heads == model.num_attention_heads
    small: dict[str, Any] = {
        **tables()["try"]["size_if_set"],
        "num_query_groups": size("num_attention_heads") if has_all_heads else tp_size,
        "num_experts": (EXPERTS if moe.is_used else 1,),
        "expert_interval": min(2, moe.expert_interval),
        "moe_router_topk": min(2, moe.moe_router_topk),
        "rampup_batch_size": (dp_size, dp_size, 2 * dp_size),
    }
    units = {"iters": 1, "samples": batch, "tokens": batch * size("seq_length")}
    for stem, steps in tables()["try"]["steps"].items():
        small |= {f"{stem}_{unit}": steps * samples for unit, samples in units.items()}
    return small
