"""Layouts of the covering array on worlds of any size."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from megatron_ds.config import Config, support_matrix
from megatron_ds.config.parallel_axes import AXES
from tests.dist.layouts import RunLayout, configure
from tests.tables import UniqueNames, tables
from tests.typed.runs import check_stage, fake_mesh

SHAPE: dict[str, Any] = {
    "num_layers": 8,
    "hidden_size": 40,
    "ffn_hidden_size": 96,
    "num_attention_heads": 8,
    "seq_length": 64,
    "vocab_size": 90,
    "make_vocab_size_divisible_by": 8,
}


def config_of(run: RunLayout, size: int, **changes: Mapping[str, Any]) -> Config:
    """The configuration of a layout, in which each axis with several ranks has `size`.

    Args:
        run: The layout.
        size: Ranks of each axis with several.
        changes: Further options by their group.
    """
    config, problems = configure(run)
    assert not problems
    parallel = {
        axis.option: size
        for axis in AXES
        if axis.option and getattr(config.parallel, axis.option) > 1
    }
    heads = 4 * size * size
    shape = SHAPE | {
        "num_attention_heads": heads,
        "hidden_size": 4 * heads,
        "ffn_hidden_size": 10 * size,
        "num_layers": 2 * size if config.parallel.pipeline_model_parallel_size > 1 else 2,
        "seq_length": 4 * size * size,
    }
    if config.model.num_query_groups:
        shape["num_query_groups"] = heads // 2
    moe = {}
    if config.moe.is_used:
        moe = {"num_experts": (3 * size * size,), "moe_ffn_hidden_size": 8 * size}
    if changes.get("parallel", {}).get("expert_tensor_parallel_size") == 1:
        parallel["expert_model_parallel_size"] = size * size  # with the tensor-parallel ranks
    groups: dict[str, dict[str, Any]] = {"model": shape, "parallel": parallel, "moe": moe}
    changed = {
        name: dataclasses.replace(getattr(config, name), **values | changes.get(name, {}))
        for name, values in groups.items()
    }
    return dataclasses.replace(config, **changed)


WORLDS = ((8, 2), (1024, 4), (4096, 4))
"""Ranks, and those of each axis with several."""


def layout(**values: str) -> RunLayout:
    """A run with these values, and otherwise the defaults."""
    run = {name: axis.default for name, axis in support_matrix.AXES.items()}
    return {
        **run,
        "world": "4",
        "accumulation": "1",
        "dropout": "off",
        "model": "learned",
        **values,
    }


TABLES = tables(__file__, tuple)
LAYOUTS: dict[str, dict[str, str]] = TABLES["layouts"]
PARTS: dict[str, dict[str, Any]] = TABLES["parts"]
ALL = "all, stages"
"""Most of the parts together, on the stages of a pipeline."""


def _further() -> dict[str, tuple[RunLayout, dict[str, Any]]]:
    cases = UniqueNames[tuple[RunLayout, dict[str, Any]]]()
    for part, table in PARTS.items():
        changes = {group: values for group, values in table.items() if group != "layout"}
        for name, values in LAYOUTS.items():
            needed = "cp" if "cp_comm_type" in changes.get("parallel", {}) else "sequence"
            if "parallel" in changes and needed not in values:
                continue  # whole experts need sequence parallelism
            cases[f"{part}, {name}"] = (layout(**values, **table.get("layout", {})), changes)
    return cases


FURTHER = _further()
"""Parts of the model that the covering array lacks in each layout, with their options."""


def check(run: RunLayout, world: int, size: int, **changes: Mapping[str, Any]) -> None:
    """Check the passes of a layout's stages: the first, the last and one between them.

    Args:
        run: The layout.
        world: Number of ranks.
        size: Those of each axis with several.
        changes: Further options by their group.

    Raises:
        TypesError: A tensor does not lie on the ranks as it must.
    """
    config = config_of(run, size, **changes)
    model = config.model
    has_experts = config.moe.is_used
    assert not list(model.problems(config.parallel.tensor_model_parallel_size))
    assert not list(config.parallel.problems(world, model.num_layers, has_experts=has_experts))
    sizes = {name.removesuffix("_size"): size for name, size in config.mesh_sizes.items()}
    stages = sizes["pp"]
    for stage in sorted({0, stages // 2, stages - 1}):
        with fake_mesh(world, rank=stage * (world // stages), **sizes) as axes:
            check_stage(config, axes)
