"""The frozen list of all flags; `python -m tests.golden_flags` rewrites it."""

from __future__ import annotations

from pathlib import Path

from megatron_ds.cli.flags import Flag, training_flags
from tests.pages.flags import tool_tables

GOLDEN = Path(__file__).parent / "golden" / "flags.txt"


def flag_lists() -> str:
    """The flags of pretrain_gpt.py and of every tool: names and kind of value."""
    tables = {"pretrain_gpt.py": training_flags(), **tool_tables()}
    parts = []
    for program, table in tables.items():
        lines = sorted(_entry(flag) for group in table.shown for flag in group.flags)
        parts.append("\n".join([program, *(f"  {line}" for line in lines)]))
    return "\n\n".join(parts) + "\n"


def _entry(flag: Flag) -> str:
    kind = "switch" if flag.nargs == 0 else flag.kind.__name__.replace("str", "text")
    if flag.positional:
        return f"{flag.metavar}: {kind}"
    return f"{' '.join(f'--{name}' for name in flag.names)}: {kind}"


if __name__ == "__main__":
    GOLDEN.write_text(flag_lists())
