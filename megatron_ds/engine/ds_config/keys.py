"""The keys of DeepSpeed files: accepted, renamed, ignored and refused ones.

The tables are in keys.toml. The keys of blocks that DeepSpeed defines as pydantic models, and the
defaults of all keys, are in keys.json, written by `python tests/versions/make_ds_keys.py`.
"""

from __future__ import annotations

import json
from typing import Any

from megatron_ds.config.data_files import read_table, read_text
from megatron_ds.engine.ds_config.values import KINDS, Kind

TABLES: dict[str, Any] = read_table(__file__)
REFUSED: dict[str, str] = TABLES["refused"]
"""Unsupported keys that would change the run -> reason or replacement. A key that is off (false, or
an object with nothing enabled) changes nothing: it is dropped with a warning."""
IGNORED_KEYS: dict[str, str] = TABLES["ignored"]
"""Keys without effect -> reason."""
DROPPED_IF: dict[str, Any] = TABLES["ignored_values"]
"""Keys of IGNORED_KEYS that may only be dropped with this value."""
RENAMED: dict[str, str] = TABLES["renamed"]
"""Old and short spellings of keys -> current key."""
OLD_SWITCHES: dict[str, tuple[str, Any]] = {
    old: (new["key"], new["value"]) for old, new in TABLES["switches"].items()
}
"""Old switches -> the key and value that replace them if they are true."""
OLD_PIN_KEY = "zero_optimization.cpu_offload_use_pin_memory"
INSTALLED: dict[str, Any] = json.loads(read_text(__file__, "keys.json"))
"""Keys and defaults of the supported DeepSpeed."""
VERSION: str = INSTALLED["deepspeed"]
DEFAULTS: dict[str, Any] = INSTALLED["defaults"]
"""Default by dotted key, without those that are None."""


def _keys_of_models() -> dict[str, dict[str, Kind]]:
    """Keys of DeepSpeed's models that are not in the tables above."""
    blocks = INSTALLED["blocks"]
    treated = {*REFUSED, *RENAMED, *OLD_SWITCHES, *IGNORED_KEYS}
    return {
        block: {key: KINDS[name] for key, name in keys.items() if f"{block}.{key}" not in treated}
        for block, keys in blocks.items()
    }


BLOCKS: dict[str, dict[str, Kind]] = _keys_of_models() | {
    block: {key: KINDS[name] for name, keys in by_kind.items() for key in keys}
    for block, by_kind in TABLES["kinds"].items()
}
"""Supported keys of each block by its dotted name -> kind of the value."""
CHECKED_BLOCKS = {*INSTALLED["blocks"], "optimizer.params", "scheduler.params"}
"""Blocks in which DeepSpeed refuses unknown keys. It ignores them elsewhere."""
PASSED_KEYS = BLOCKS.pop("passed")
"""Top-level keys that are passed to DeepSpeed unchanged."""
TOP_KEYS = PASSED_KEYS | BLOCKS.pop("")
"""All supported top-level keys."""
