"""The flags of a run with every feature of another one, at a size that a CPU trains at once.

Sizes are in frameworks.toml. Knows no torch.
"""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

from megatron_ds.cli.doctor.diagnosis import flags_of, joined
from megatron_ds.cli.doctor.frameworks import tables
from megatron_ds.config import Config
from megatron_ds.config.deepspeed_file import pop
from megatron_ds.config.parallel_axes import AXES

LARGEST_AXIS = 2
"""Ranks of a parallel axis."""


def shrink(config: Config, world_size: int, folder: Path) -> tuple[list[str], int]:
    """The flags and the number of processes.

    Args:
        config: Settings of the original.
        world_size: Its number of processes.
        folder: Where data, checkpoints and the DeepSpeed file are.
    """
    table = tables()["try"]
    model = config.model
    moe = config.moe
    axes = {name: min(ranks, LARGEST_AXIS) for name, ranks in config.axis_sizes.items()}
    tp_size = axes["tp_size"]
    pp_size = axes["pp_size"]
    processes = max(min(world_size, 2), math.prod(axes.values()))
    replica = [axes[f"{axis.name}_size"] for axis in AXES if axis.option and axis.adds_processes]
    dp_size = processes // math.prod(replica)
    batch = 2 * dp_size * pp_size
    tokens = int(table["always"]["seq-length"])
    has_all_heads = model.kv_heads == model.num_attention_heads
    sizes: dict[str, object] = {"folder": folder, "dp_size": dp_size, "layers": 2 * pp_size, **axes}
    sizes |= {"batch": batch, "samples": 2 * batch, "increased": 2 * dp_size}
    sizes |= {"tokens": 2 * batch * tokens, "first_tokens": batch * tokens}
    sizes["groups"] = table["always"]["num-attention-heads"] if has_all_heads else tp_size
    sizes |= {"interval": min(2, moe.expert_interval), "topk": min(2, moe.moe_router_topk)}
    sizes["experts"] = 4 if moe.is_used else 1
    names = config.given | config.origins.keys()
    set_values = dict(flags_of(dataclasses.replace(config, given=names)))
    flags = {
        name: values for name, values in flags_of(config) if name not in table["left_out"].split()
    }
    flags |= {
        name: [word.format(**sizes) for word in text.split()]
        for when in ("always", "if_set")
        for name, text in table[when].items()
        if when == "always" or set_values.get(name, ["0"]) != ["0"]
    }
    if config.precision.fp16:
        flags["allow-fp16-on-cpu"] = []
    if config.deepspeed_file is not None:
        content = json.loads(json.dumps(config.deepspeed_file.values))
        for key in table["keys"].split():
            pop(content, key)
        path = folder / "tiny_ds_config.json"
        path.write_text(json.dumps(content, indent=2), "utf-8")
        flags["deepspeed_config"] = [str(path)]
    return joined(flags.items()), processes
