"""Layouts of the covering array on worlds of any size."""

from __future__ import annotations

import dataclasses
from typing import Any

from megatron_ds.config import Config, support_matrix
from tests.dist.layouts import RunLayout, configure
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


def config_of(run: RunLayout, size: int, **model: Any) -> Config:
    """The configuration of a layout, in which each axis with several ranks has `size`.

    Args:
        run: The layout.
        size: Ranks of each axis with several.
        model: Further options of the model.
    """
    config, problems = configure(run)
    assert not problems
    parallel = {
        name: size
        for name in (
            "tensor_model_parallel_size",
            "pipeline_model_parallel_size",
            "ds_sequence_parallel_size",
            "expert_model_parallel_size",
        )
        if getattr(config.parallel, name) > 1
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
    return dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, **shape, **model),
        parallel=dataclasses.replace(config.parallel, **parallel),
        moe=dataclasses.replace(config.moe, **moe),
    )


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


TENSOR = {"tp": support_matrix.MANY}
FURTHER: dict[str, tuple[RunLayout, dict[str, Any]]] = {
    "norms of heads": (layout(**TENSOR), {"qk_layernorm": True}),
    "norms of heads, sequence parallel": (
        layout(**TENSOR, sequence="on"),
        {"qk_layernorm": True},
    ),
}
"""Parts of the model that the covering array lacks, with their options."""


def check(run: RunLayout, world: int, size: int, **model: Any) -> None:
    """Check the passes of a layout's stages: the first, the last and one between them.

    Raises:
        TypesError: A tensor does not lie on the ranks as it must.
    """
    config = config_of(run, size, **model)
    sizes = {name.removesuffix("_size"): size for name, size in config.axis_sizes.items()}
    stages = sizes["pp"]
    for stage in sorted({0, stages // 2, stages - 1}):
        with fake_mesh(world, rank=stage * (world // stages), **sizes) as axes:
            check_stage(config, axes)
