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
from megatron_ds.config.options.deepspeed_file import pop

LARGEST_AXIS = 2
"""Ranks of a parallel axis."""


def shrink(config: Config, world_size: int, folder: Path) -> tuple[list[str], int]:
    """The flags and the number of processes.

    Args:
        config: Settings of the original.
        world_size: Its number of processes.
        folder: Where data, checkpoints and the DeepSpeed file are.
    """
    table, model, moe = tables()["try"], config.model, config.moe
    axes = {name: min(ranks, LARGEST_AXIS) for name, ranks in config.axis_sizes.items()}
    tp_size, pp_size, sp_size, _ = axes.values()
    processes = max(min(world_size, 2), math.prod(axes.values()))
    dp_size = processes // (tp_size * pp_size * sp_size)
    batch, tokens = 2 * dp_size * pp_size, int(table["always"]["seq-length"])
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
