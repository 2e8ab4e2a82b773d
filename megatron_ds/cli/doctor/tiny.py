"""The flags of a run with every feature of another one, at a size that a CPU trains at once.

Sizes are in frameworks.toml. Knows no torch.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from itertools import cycle, islice
from pathlib import Path

from megatron_ds.cli.doctor.diagnosis import flags_of, joined
from megatron_ds.cli.doctor.frameworks import tables
from megatron_ds.config import Config, ParallelConfig
from megatron_ds.config.deepspeed_file import pop
from megatron_ds.config.options.parallel import ALL_GATHER, HIERARCHICAL, P2P
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
    flags |= _exchanges(config.parallel, axes, 2 * pp_size)
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


def _exchanges(
    parallel: ParallelConfig, axes: Mapping[str, int], layers: int
) -> dict[str, list[str]]:
    """The flags by which layers exchange keys as those of the original do, in turn.

    Args:
        parallel: Settings of the original.
        axes: Sizes of the parallel axes of the run.
        layers: Its layers.
    """
    size = axes["cp_size"]
    ranks = axes["tp_size"] * size * axes["ulysses_size"]
    shares_heads = int(tables()["try"]["always"]["num-attention-heads"]) % ranks == 0
    names = list(dict.fromkeys(parallel.cp_comm_type))
    if size == 1:
        return {}
    if not (parallel.has_mixed_kinds and shares_heads):
        # Where all layers have groups that share heads, these are an axis of their own.
        names = [name for name in names if name in (P2P, ALL_GATHER)] or [P2P]
    by_layer = names if len(names) == 1 else list(islice(cycle(names), layers))
    flags = {"cp-comm-type": by_layer}
    if HIERARCHICAL in by_layer:
        flags["hierarchical-context-parallel-sizes"] = [str(size), "1"]
    return flags
