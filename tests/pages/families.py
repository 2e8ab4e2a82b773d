"""The table of docs/training/model.md: the flags that give a family of models its parts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_ds.config import ModelConfig, MoEConfig, yaml_file
from megatron_ds.conversion.huggingface.config_rows import ConfigValues
from megatron_ds.conversion.huggingface.families import FAMILIES, Family
from megatron_ds.conversion.huggingface.read_config import settings_of
from megatron_ds.conversion.huggingface.standard_values import standard_values
from tests.pages.flags import REPOSITORY, markdown_table

OUTPUT = REPOSITORY / "docs" / "training" / "model.md"
BEGIN = "<!-- begin: generated table of families -->\n"
END = "<!-- end -->\n"
SMALL = {
    **dict.fromkeys(("hidden_size", "intermediate_size", "max_position_embeddings"), 128),
    "num_hidden_layers": 6,
    "num_attention_heads": 16,
    "vocab_size": 8,
    "rotary_dim": None,
}
"""Keys of a config.json that have no default, or one that exceeds these sizes."""
SAME_HEADS = ("mistral", "qwen2", "qwen3", "deepseek_v3")
"""Families whose number of key-value heads has no default, or that of one model."""
SIZES = (
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "seq_length",
    "max_position_embeddings",
    "ffn_hidden_size",
    "vocab_size",
)
OF_SIZES = {
    "num_query_groups": "num_attention_heads",
    "moe_ffn_hidden_size": "ffn_hidden_size",
}
"""Options that are left out where they equal another one."""
SCALES = ("embedding_multiplier", "moe_router_topk_scaling_factor")
"""Factors that follow from the size, or are 1."""


def page() -> str:
    """docs/training/model.md with a row for each family."""
    head, _, rest = OUTPUT.read_text(encoding="utf-8").partition(BEGIN)
    rows = [(f"`{name}`", f"`{' '.join(flags(name, FAMILIES[name]))}`") for name in FAMILIES]
    table = markdown_table(("`model_type`", "flags"), rows)
    return f"{head}{BEGIN}{table}{END}{rest.partition(END)[2]}"


def flags(name: str, family: Family) -> Iterator[str]:
    """The words that differ from the defaults where a `config.json` has sizes alone."""
    heads = {"num_key_value_heads": SMALL["num_attention_heads"]} if name in SAME_HEADS else {}
    values = standard_values({**SMALL, **heads, "model_type": name}, family)
    settings = settings_of(family.rows, ConfigValues(Path(), values))
    model = settings.model
    default = ModelConfig(**{size: getattr(model, size) for size in SIZES})
    for group, before in ((model, default), (settings.moe, MoEConfig())):
        defaults = dict(yaml_file.entries(before))
        for field, (key, value) in yaml_file.entries(group):
            if defaults[field] != (key, value) and not _follows(field, value, model):
                yield f"--{key}"
                yield from () if value is True else _words(field, value)


def _follows(field: str, value: Any, model: ModelConfig) -> bool:
    """Whether an option follows from the sizes."""
    if field == "kv_channels":
        heads = model.hidden_size // model.num_attention_heads
        return model.multi_latent_attention or value == heads
    if field in OF_SIZES:
        return bool(value == getattr(model, OF_SIZES[field]))
    return field == SCALES[0] or (field == SCALES[1] and value == 1)


def _words(field: str, value: Any) -> Iterator[str]:
    """The values of a flag; a window in all but every N-th layer as N."""
    if field == "window_attn_skip_freq":
        by_layer = [int(word) for word in value.strip("[]").split(",")]
        for period in range(2, len(by_layer) + 1):
            if by_layer == [int((layer + 1) % period != 0) for layer in range(len(by_layer))]:
                value = period
    for item in value if isinstance(value, tuple) else (value,):
        whole = isinstance(item, float) and item == int(item)
        yield str(int(item)) if whole else str(item).replace("e-0", "e-")
