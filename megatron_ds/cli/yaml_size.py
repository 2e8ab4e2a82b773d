"""Limits of what is read from YAML and other files of settings, so that reading them ends."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from yaml.nodes import Node

MOST_VALUES = 200_000
"""Keys and values of a file; an alias has the values of what it refers to."""
MOST_NESTED = 20
"""Lists and mappings within each other."""


def check_nodes(root: Node) -> None:
    """Check that the nodes of a YAML file can be read as a tree.

    Args:
        root: The node of the whole file.

    Raises:
        ValueError: If there are too many, or too many within each other, as in an alias that
            contains itself.
    """
    _check(root, lambda node: node.value if isinstance(node.value, list) else ())


def check_values(values: Any) -> None:
    """The same for lists and mappings that are already read."""
    _check(values, lambda item: item.items() if isinstance(item, dict) else _items(item))


def _items(item: Any) -> Iterable[Any]:
    return item if isinstance(item, list) else ()


def _check(root: Any, children: Callable[[Any], Iterable[Any]]) -> None:
    count = 0
    pending = [(root, 1)]
    while pending:
        item, depth = pending.pop()
        # The entries of a mapping are pairs.
        for node in item if isinstance(item, tuple) else (item,):
            count += 1
            if count > MOST_VALUES:
                raise ValueError(
                    f"it has more than {MOST_VALUES} keys and values, with its aliases"
                )
            if depth > MOST_NESTED:
                reason = "lists and mappings within each other, or an alias contains itself"
                raise ValueError(f"it has more than {MOST_NESTED} {reason}")
            pending += [(child, depth + 1) for child in children(node)]
