"""The values of a config.json as the family's configuration class of transformers has them.

When transformers reads a file, the class renames keys of other versions, replaces values, and
ignores keys that its model does not use. This module does the same without importing transformers;
tests compare the results of both. Rotary parameters are in `rope_parameters.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from megatron_ds.config.data_files import read_table
from megatron_ds.conversion.huggingface.config_rows import FULL, ConfigValues

if TYPE_CHECKING:
    from megatron_ds.conversion.huggingface.families import Family

TABLES = read_table(__file__)
WITHOUT_EFFECT = frozenset(TABLES["without_effect"]["keys"])
"""Keys that change nothing that a model computes, in any family."""
OF_MODELS = frozenset(TABLES["of_models"]["keys"])
"""Keys by which the model of some family is another one."""
ONLY: Mapping[str, Any] = TABLES["only"]
"""Keys that every family has, with the value that is supported."""


def standard_values(values: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """The values under the names that the class gives them.

    Args:
        values: The values in the file.
        family: Family of the model.
    """
    standard = dict(values)
    for other, key in family.renamed.items():
        # The class sets its own keys first, so that the other spelling takes precedence.
        if (value := standard.pop(other, None)) is not None:
            standard[key] = value
    for key, replacements in family.replaced.items():
        value = standard.get(key)
        if isinstance(value, str) and value in replacements:
            standard[key] = replacements[value]
    for key in family.null_is_false:
        if key in standard and standard[key] is None:
            standard[key] = False
    return standard


def refuse_unused(config: ConfigValues, family: Family) -> Iterator[str]:
    """Notes keys that the family's model does not use as lacking, if they change another's.

    Args:
        config: The values, after everything that is used was read.
        family: Family of the model.

    Yields:
        The other unused keys, which are not known.
    """
    for key, supported in ONLY.items():
        if (value := config.values.get(key, supported)) != supported:
            config.lack("another kind of model", key, value)
    for key in config.values.keys() - config.used - ONLY.keys():
        value = config.values[key]
        is_harmless = key.startswith("_") or key in WITHOUT_EFFECT
        if is_harmless or not value or _has_full_attention(key, config):
            continue
        if key in family.unused:
            accepted = family.unused[key]
            if accepted and value not in accepted:
                config.lack(f"{family.architecture} does not use", key, value)
        elif key in OF_MODELS:
            config.lack(f"{family.architecture} does not use", key, value)
        else:
            yield key


def _has_full_attention(key: str, config: ConfigValues) -> bool:
    """Whether a key lists full attention in all layers of a family without windows."""
    types = config.values[key]
    is_listed = key == "layer_types" and isinstance(types, list) and {*map(str, types)} == {FULL}
    return is_listed and "sliding_window" not in config.used
