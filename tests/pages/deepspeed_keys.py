"""The page docs/reference/deepspeed_keys.md, from the tables of the package."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron_ds.config import Config, flag_of
from megatron_ds.config.data_files import read_table
from megatron_ds.config.problems import with_default_flags
from megatron_ds.engine.ds_config import keys
from megatron_ds.engine.ds_config.fields import mappings
from megatron_ds.engine.ds_config.values import KINDS
from tests.pages.flags import markdown_table

TABLES = read_table(__file__)
DESCRIPTIONS: dict[str, str] = TABLES["keys"]
"""What each supported key does."""
FIELDS: dict[str, str] = TABLES["flags"]
"""Generated keys that files cannot set -> field."""
TYPES: dict[str, str] = TABLES["types"]
"""Name of a kind of value -> its description."""

OUTPUT = Path(__file__).resolve().parents[2] / "docs" / "reference" / "deepspeed_keys.md"
HEAD = f"""\
# Keys of DeepSpeed files

This page describes what each key of a DeepSpeed file does in a run, and which default it has.

Written by `python -m tests.pages`. Defaults are those of DeepSpeed {keys.VERSION}. A run writes
every key that matters, at its default too, so that none of its values depends on the installed
version.
"""
SUPPORTED = """\
## Keys
"""
OTHER = """\
## Not supported, without effect, former

A key that would change the run and is not supported is an error, unless it is off. Former names are
translated, with a warning.
"""


def page() -> str:
    """The text of docs/reference/deepspeed_keys.md."""
    rows = [
        (
            f"`{key}`",
            description,
            _type(key),
            _shown(default) if (default := keys.DEFAULTS.get(key)) is not None else "",
            " ".join(f"`{flag}`" for flag in flags_of_key(key)),
        )
        for key, description in DESCRIPTIONS.items()
    ]
    others = [(f"`{key}`", text) for key, text in other_keys().items() if key not in DESCRIPTIONS]
    return "\n".join(
        [
            *(HEAD, SUPPORTED),
            markdown_table(("key", "what it does", "type", "default", "set by"), rows),
            *(OTHER, markdown_table(("key", "what became of it"), others)),
        ]
    )


def other_keys() -> dict[str, str]:
    """Keys that are not supported, or no longer valid -> what became of them."""
    switches = {old: f"former form of {new}" for old, (new, _) in keys.OLD_SWITCHES.items()}
    return {
        **{key: f"not supported: {reason}" for key, reason in keys.REFUSED.items()},
        **{key: f"no effect: {reason}" for key, reason in keys.IGNORED_KEYS.items()},
        **{old: f"former name of {new}" for old, new in keys.RENAMED.items()},
        **switches,
        keys.OLD_PIN_KEY: "former name of pin_memory in offload_optimizer and offload_param",
    }


def flags_of_key(key: str) -> list[str]:
    """The flags that set a key."""
    flags = [flag_of(name) for other, name, _ in mappings(Config()) if other == key]
    flags += [flag_of(FIELDS[key])] if key in FIELDS else []
    return [with_default_flags(flag) for flag in dict.fromkeys(flags)]


def _type(key: str) -> str:
    block, _, last = key.rpartition(".")
    kinds = {convert: name for name, convert in KINDS.items()}
    kind = (keys.BLOCKS.get(block, {}) if block else keys.TOP_KEYS).get(last)
    return TYPES[kinds[kind]] if kind else ""


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
