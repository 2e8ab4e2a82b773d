"""The frozen list of the public names; `python -m tests.public_names` rewrites it."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from enum import EnumType
from pathlib import Path

GOLDEN = Path(__file__).parent / "golden" / "public_names.txt"
READ_ONLY = ("Config", "Extensions", "TrainState")
"""Classes whose fields a program reads or sets; it calls no methods of them."""
WITH_PROPERTIES = ("LanguageModel", "RunControl", "RunRecord")
MODULES = ("megatron_ds", "megatron_ds.extend", "megatron_ds.extend.layers")


def public_names() -> str:
    """Functions and classes with their signatures, the methods of classes, and the members of
    enumerations."""
    return "\n".join(line for module in MODULES for line in (module, *_lines(module), ""))


def _lines(module: str) -> Iterator[str]:
    listed = importlib.import_module(module)
    for name in sorted(listed.__all__):
        value = getattr(listed, name)
        if isinstance(value, str):
            continue
        if isinstance(value, EnumType):  # whose signature depends on the version of Python
            yield f"  {name}: {', '.join(value.__members__)}"
            continue
        yield f"  {name}{inspect.signature(value)}"
        if inspect.isclass(value) and name not in READ_ONLY:
            for method, function in sorted(vars(value).items()):
                if isinstance(function, property) and name in WITH_PROPERTIES:
                    yield f"    {method}"
                if inspect.isfunction(function) and not method.startswith("_"):
                    yield f"    {method}{inspect.signature(function)}"


if __name__ == "__main__":
    GOLDEN.write_text(public_names())
