"""The search for parts of NVIDIA's apex, which is optional."""

from __future__ import annotations

import importlib
from typing import Any


def apex_class(module: str, name: str, extension: str, base: type) -> type[Any] | None:
    """A class of NVIDIA's apex with its compiled part; None if it is not installed.

    Found by the class: the package index has another package of the name `apex`.

    Args:
        module: Module of the class.
        name: Name of the class.
        extension: Compiled module that the class needs.
        base: Class that it must be derived from.
    """
    try:
        cls = getattr(importlib.import_module(module), name)
        importlib.import_module(extension)
    except Exception:  # whatever a package of this name raises when it is imported
        return None
    return cls if isinstance(cls, type) and issubclass(cls, base) else None
