"""Describes the keys of DeepSpeed files, and the origins of a run's values.

The descriptions are in descriptions.toml, and for further keys of the optimizers in the help of
their options. Does not import deepspeed.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from megatron_ds.config import Config, OptimizerConfig, flag_of
from megatron_ds.config.data_files import read_table
from megatron_ds.config.deepspeed_file import Json, get, leaves
from megatron_ds.config.field_help import option_help
from megatron_ds.config.options.optimizer_specs import SPECS
from megatron_ds.config.problems import user_error, with_flags
from megatron_ds.engine.ds_config import keys
from megatron_ds.engine.ds_config.fields import MAPPINGS, as_flag, field_value, mappings
from megatron_ds.engine.ds_config.file import did_you_mean
from megatron_ds.engine.ds_config.generate import value_origins
from megatron_ds.engine.ds_config.values import KINDS

TABLES = read_table(__file__, "descriptions.toml")
PARAMS = "optimizer.params"
FIELDS = {
    f"{PARAMS}.{key}": param
    for spec in SPECS
    for key, param in spec.params.items()
    if isinstance(param, str) and f"{PARAMS}.{key}" not in {key for key, *_ in MAPPINGS}
}
"""Generated keys that files cannot set -> field."""
DERIVED: dict[str, str] = TABLES["derived"]
"""Key -> what its value follows from if nothing gives it."""
TYPES: dict[str, str] = TABLES["types"]
"""Name of a kind of value -> its description."""


def _described() -> dict[str, str]:
    """The descriptions of the table, with the help of the options of keys that it lacks."""
    table: dict[str, str] = TABLES["keys"]
    helps = {
        key: option_help(OptimizerConfig, field)
        for key, field in FIELDS.items()
        if key not in table
    }
    end = max(index for index, key in enumerate(table) if key.startswith(f"{PARAMS}."))
    items = list(table.items())
    further = [(key, f"{text[0].upper()}{text[1:]}.") for key, text in helps.items()]
    return dict(items[: end + 1] + further + items[end + 1 :])


DESCRIPTIONS = _described()
"""Description of each supported key."""


@dataclass(frozen=True)
class Row:
    """A value of a run's configuration, with its origin and what it does."""

    key: str
    value: Any
    origin: str
    description: str


def rows(config: Config, generated: Json) -> list[Row]:
    """Explain the values of a configuration.

    Args:
        config: Configuration of a command line, which `merge_file` has filled.
        generated: Its DeepSpeed configuration.
    """
    origins = value_origins(config)
    names: dict[str, list[str]] = {key: [name] for key, name in FIELDS.items()}
    for key, name, _ in mappings(config):
        names.setdefault(key, []).append(name)
    origins |= {
        key: as_flag(name, field_value(config, name), flag_of)
        for key, name in FIELDS.items()
        if name in config.given
    }
    result = []
    for key in leaves(generated):
        value = get(generated, key)
        if key in origins:
            origin = origins[key]
        elif key in DERIVED:
            origin = f"derived from {DERIVED[key]}"
        elif key in names:
            origin = f"default of {', '.join(map(flag_of, names[key]))}"
        elif keys.DEFAULTS.get(key) == value:
            origin = "default of DeepSpeed"
        else:
            default = json.dumps(keys.DEFAULTS.get(key))
            origin = f"default of megatron_ds (DeepSpeed's: {default})"
        result.append(Row(key, value, with_flags(origin), DESCRIPTIONS.get(key, "")))
    return result


def find(name: str) -> list[str]:
    """The known keys of a name: the key itself, the keys of a block, or those with this last part.

    Raises:
        UserError: If there are none.
    """
    known = known_keys()
    matches = [key for key in known if key == name or key.startswith(f"{name}.")]
    matches = matches or [key for key in known if key.endswith(f".{name}")]
    if not matches:
        lasts = {key.rpartition(".")[2] for key in known}
        raise user_error("ds-key-unknown", key=name, hint=did_you_mean(name, {*known, *lasts}))
    return matches


def known_keys() -> list[str]:
    """All keys that a file may have, that are generated, or that once were valid."""
    return [*dict.fromkeys([*DESCRIPTIONS, *_other_keys()])]


def _other_keys() -> dict[str, str]:
    """Keys that are not supported, or no longer valid -> what became of them."""
    switches = {old: f"former form of {new}" for old, (new, _) in keys.OLD_SWITCHES.items()}
    return {
        **{key: f"not supported: {reason}" for key, reason in keys.REFUSED.items()},
        **{key: f"no effect: {reason}" for key, reason in keys.IGNORED_KEYS.items()},
        **{old: f"former name of {new}" for old, new in keys.RENAMED.items()},
        **switches,
        keys.OLD_PIN_KEY: "former name of pin_memory in offload_optimizer and offload_param",
    }


def facts(key: str) -> dict[str, Any]:
    """Returns the facts about a key: description, type, flags and default."""
    block, _, last = key.rpartition(".")
    kinds = {convert: name for name, convert in KINDS.items()}
    value_type = (keys.BLOCKS.get(block, {}) if block else keys.TOP_KEYS).get(last)
    flags = [flag_of(name) for other, name, _ in mappings(Config()) if other == key]
    flags += [flag_of(FIELDS[key])] if key in FIELDS else []
    return {
        "key": key,
        "description": DESCRIPTIONS.get(key) or _other_keys().get(key, ""),
        "type": TYPES[kinds[value_type]] if value_type else None,
        "flags": [with_flags(flag) for flag in dict.fromkeys(flags)],
        "derived_from": DERIVED.get(key),
        "deepspeed_default": keys.DEFAULTS.get(key),
    }
