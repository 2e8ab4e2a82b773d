"""The architectures of llama.cpp that the model has the parts of: keys and tensor names.

architectures.toml lists them; the rows of keys that no table can describe are in key_rows.py.
Imports no torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_ds.config import ModelConfig, MoEConfig
from megatron_ds.config.data_files import read_table
from megatron_ds.conversion.gguf import key_rows
from megatron_ds.conversion.huggingface.config_rows import Row, number

TABLES = read_table(__file__)


@dataclass(frozen=True)
class Architecture:
    """One value of `general.architecture`; architectures.toml explains what it has."""

    name: str
    families: Sequence[str]
    names: Mapping[str, str]
    inner: Mapping[str, str]
    rows: tuple[Row, ...]
    split: Mapping[str, str] = field(default_factory=dict)
    is_interleaved: bool = False
    output: str = "optional"

    @property
    def family(self) -> str:
        """model_type of a file's model."""
        return self.families[0]


SPECIAL_ROWS: dict[str, tuple[Row, ...]] = {
    "gpt2": (key_rows.POSITIONS,),
    "llama": (key_rows.experts("llama"),),
    "qwen3moe": (key_rows.experts("qwen3moe"),),
    "gpt-oss": (key_rows.experts("gpt-oss"), key_rows.windows()),
    "glm4moe": (key_rows.experts("glm4moe"), key_rows.QUERY_NORMS),
    "deepseek2": (key_rows.experts("deepseek2"), key_rows.LATENT_SIZES),
    "smollm3": (key_rows.EVERY_FOURTH_WITHOUT_POSITIONS,),
    "olmo2": (key_rows.windows(is_required=False, scales_windows=False),),
    "gemma": (key_rows.SCALED_EMBEDDING,),
    "gemma2": (key_rows.SCALED_EMBEDDING, key_rows.windows(), key_rows.query_scale(46)),
    "gemma3": (
        key_rows.SCALED_EMBEDDING,
        key_rows.windows(scales_windows=False, window_base=10000.0),
        key_rows.query_scale(62),
    ),
    "granite": (key_rows.GRANITE,),
    "gptneox": (key_rows.PARALLEL_RESIDUAL,),
}
"""Rows by architecture, in addition to architectures.toml."""


def _take_rows(name: str, entry: dict[str, Any]) -> Iterator[Row]:
    """The rows of an architecture's keys, which are removed from its entry."""
    always = entry.pop("always")
    gelu = always.pop("gelu_approximation", None)
    norms = always.pop("apply_layernorm_1p", False)
    yield Row(lambda config: always, lambda model: {})
    options = (*dataclasses.fields(ModelConfig), *dataclasses.fields(MoEConfig))
    types = {item.name: item.type for item in options}
    for option, column in entry.pop("numbers").items():
        cls = float if "float" in types[option] else int
        if isinstance(column, str) and column:
            yield number(column, option, cls)
        elif column:
            key, *default = column
            yield number(key, option, cls, *default or [None])
    if entry.pop("has_head_sizes", False):
        yield key_rows.HEAD_SIZES
    if gelu is not None:
        yield key_rows.stated("gelu_approximation", gelu)
    yield key_rows.stated("apply_layernorm_1p", norms)
    yield key_rows.output(entry["output"])
    yield key_rows.biases(entry.pop("biases"))
    rotates_part = entry.pop("rotates_part", False)
    reads_factors = entry.pop("reads_factors", False)
    if entry.pop("is_rotary", False):
        yield key_rows.rope(name, rotates_part=rotates_part, reads_factors=reads_factors)


def _architectures() -> Iterator[tuple[str, Architecture]]:
    """The architectures of architectures.toml."""
    complete: dict[str, dict[str, Any]] = {}
    for name, values in TABLES.items():
        like = complete.get(values.pop("like", ""), {})
        tables = {key for key, value in (like | values).items() if type(value) is dict}
        inner = {key: like.get(key, {}) | values.get(key, {}) for key in tables}
        complete[name] = like | values | inner
    for name, values in complete.items():
        entry: dict[str, Any] = {
            key: {**value} if type(value) is dict else value for key, value in values.items()
        }
        rows = (*_take_rows(name, entry), *SPECIAL_ROWS.get(name, ()))
        yield name, Architecture(name=name, rows=rows, **entry)


ARCHITECTURES = dict(_architectures())
"""Architectures by name, in the order in which an export tries them."""
