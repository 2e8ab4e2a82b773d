"""Keyword arguments as the flags of a command line, so that both have the same errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_ds.cli.flags import Flag, FlagTable, dashed


def words_of(settings: Mapping[str, object], *tables: FlagTable) -> list[str]:
    """The flags of settings.

    Args:
        settings: Values by the name of the option field, or of the flag with underscores. True and
            False stand for flags without a value, a list for several values; None leaves the
            setting out.
        tables: Flags of the program. Unknown names become flags, too, which it reports.
    """
    words: list[str] = []
    for name, value in settings.items():
        if value is None:
            continue
        flag = next((item for table in tables if (item := _flag(table, name))), None)
        label = f"--{dashed(name)}" if flag is None else flag.label
        if isinstance(value, bool):
            wanted = True if flag is None or flag.field != name else flag.const
            words += [label] if value == wanted else []
        else:
            is_list = isinstance(value, Sequence) and not isinstance(value, str)
            values: Any = value if is_list else [value]
            words += [label, *map(str, values)]
    return words


def _flag(table: FlagTable, name: str) -> Flag | None:
    return table.by_field.get(name) or table.by_name.get(dashed(name))
