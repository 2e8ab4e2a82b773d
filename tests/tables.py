"""Tables of cases: in the YAML files next to their tests, and collected by name in dictionaries.

A case whose name another case has would never run, so that two cases with one name are an error:
here for keys and names of tables, and for all tests by `strict_parametrization_ids` of pytest.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml

Value = TypeVar("Value")


class UniqueNames(dict[str, Value]):
    """Values by name, such as cases or jobs.

    An assignment, `update` and `|=` add names. `setdefault` is for what several tests need under
    the same name.

    Args:
        items: Names and values, to start with.

    Raises:
        ValueError: A name is there already.
    """

    def __init__(self, items: Mapping[str, Value] | Iterable[tuple[str, Value]] = ()) -> None:
        super().__init__()
        self.update(items)

    def __setitem__(self, name: str, value: Value) -> None:
        if name in self:
            raise ValueError(f"two cases have the name {name!r}, and one of them would never run")
        super().__setitem__(name, value)

    def update(  # type: ignore[override]
        self, items: Mapping[str, Value] | Iterable[tuple[str, Value]]
    ) -> None:
        for name, value in items.items() if isinstance(items, Mapping) else items:
            self[name] = value

    def __ior__(  # type: ignore[override, misc]
        self, items: Mapping[str, Value] | Iterable[tuple[str, Value]]
    ) -> UniqueNames[Value]:
        self.update(items)
        return self


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """Reads tables, whose keys are unique. PyYAML keeps the last value of a repeated key.

    The parser in C, where PyYAML has it, takes a tenth of the time.
    """


def _unique_keys(loader: _Loader, node: yaml.MappingNode) -> dict[Hashable, Any]:
    keys = set()
    for key_node, _ in node.value:
        if key_node.tag != "tag:yaml.org,2002:merge":
            key = loader.construct_object(key_node, deep=True)  # type: ignore[no-untyped-call]
            if key in keys:
                raise yaml.constructor.ConstructorError(
                    None, None, f"two entries have the key {key!r}", key_node.start_mark
                )
            keys.add(key)
    return loader.construct_mapping(node, deep=True)


_Loader.add_constructor("tag:yaml.org,2002:map", _unique_keys)


def parse_tables(text: str) -> Any:
    """The tables of a YAML file.

    Raises:
        yaml.YAMLError: It is no YAML, or a mapping has a key twice.
        ValueError: Two rows of a table have the same `name`.
    """
    loaded = yaml.load(text, _Loader)
    _check_names(loaded)
    return loaded


def _check_names(value: Any) -> None:
    """Rows of a table that have a name have one each."""
    if isinstance(value, list):
        rows = [row for row in value if isinstance(row, dict) and "name" in row]
        UniqueNames((str(row["name"]), row) for row in rows)
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            _check_names(item)


def tables(test: str, sequence: Callable[[Any], Any] = list) -> dict[str, Any]:
    """The tables in the YAML file with the name of a test's file.

    Args:
        test: `__file__` of the test.
        sequence: Type of lists, such as tuple for those of options.

    Raises:
        yaml.YAMLError, ValueError: As `parse_tables`.
    """

    def convert(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: convert(item) for key, item in value.items()}
        return sequence(map(convert, value)) if isinstance(value, list) else value

    loaded = parse_tables(Path(test).with_suffix(".yaml").read_text(encoding="utf-8"))
    return {name: convert(table) for name, table in loaded.items()}
