"""The page docs/reference/deepspeed_keys.md, from the tables of the package."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron_ds.engine.ds_config import explain, keys
from tests.pages.flags import markdown_table

OUTPUT = Path(__file__).resolve().parents[2] / "docs" / "reference" / "deepspeed_keys.md"
HEAD = f"""\
# Keys of DeepSpeed files

For people with a DeepSpeed file: what each key does in a run, and which default it has.

Written by `python -m tests.pages` from the tables that `pretrain_gpt.py` and `tools/ds_config.py`
use; `tools/ds_config.py explain KEY` shows a row. Defaults are those of DeepSpeed {keys.VERSION}. A
run writes every key that matters, at its default too, so that none of its values depends on the
installed version.
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
    facts = {key: explain.facts(key) for key in explain.known_keys()}
    supported = [facts[key] for key in explain.DESCRIPTIONS]
    rows = [
        (
            f"`{fact['key']}`",
            fact["description"],
            fact["type"] or "",
            _shown(fact["deepspeed_default"]) if fact["deepspeed_default"] is not None else "",
            " ".join(f"`{flag}`" for flag in fact["flags"]),
        )
        for fact in supported
    ]
    others = [
        (f"`{key}`", fact["description"])
        for key, fact in facts.items()
        if key not in explain.DESCRIPTIONS
    ]
    return "\n".join(
        [
            HEAD,
            SUPPORTED,
            markdown_table(("key", "what it does", "type", "default", "set by"), rows),
            OTHER,
            markdown_table(("key", "what became of it"), others),
        ]
    )


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
