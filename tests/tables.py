"""Tables of tests, in YAML files beside them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml


def tables(test: str, sequence: Callable[[Any], Any] = list) -> dict[str, Any]:
    """The tables in the YAML file with the name of a test's file.

    Args:
        test: `__file__` of the test.
        sequence: Type of lists, such as tuple for those of options.
    """

    def convert(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: convert(item) for key, item in value.items()}
        return sequence(map(convert, value)) if isinstance(value, list) else value

    loaded = yaml.safe_load(Path(test).with_suffix(".yaml").read_text(encoding="utf-8"))
    return {name: convert(table) for name, table in loaded.items()}
