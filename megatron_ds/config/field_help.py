"""Help texts of options: the docstrings below their fields.

Reads them from the source when a help is shown, so that a start that shows none parses nothing.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import re
from collections.abc import Mapping

PROPER_NOUNS = ("Adam", "Hugging")
"""First words of docstrings that keep their capital in the middle of a sentence."""
CLASS = re.compile(r"class (\w+)")
FIELD = re.compile(r"    (\w+): ")
OTHER = re.compile(r"\S|    [^\s#)\]}]")
"""The beginning of any other statement of a module or a class."""


def option_help(options: type, name: str) -> str:
    """The help text of an option: the docstring below its field, as a phrase.

    It has no period at its end and, unless the first word is a name, no capital at its beginning.
    The docstring of a field with a negative flag may begin with the flag, which is left out.

    Args:
        options: Dataclass of options.
        name: The field, of `options` or of a class that it extends.

    Raises:
        KeyError: If the field has no docstring.
    """
    for cls in options.__mro__[:-1]:  # without `object`
        docstrings = _docstrings(cls.__module__, inspect.getfile(cls))
        if (text := docstrings.get((cls.__name__, name))) is not None:
            return _phrase(text)
    raise KeyError(f"{options.__name__}.{name} has no docstring")


def _phrase(docstring: str) -> str:
    text = " ".join(docstring.split()).removesuffix(".")
    text = re.sub(r"^`--[\w-]+`: ", "", text)
    first = re.match(r"[A-Z][a-z]*(?=[ ,]|$)", text)
    if first and first[0] not in PROPER_NOUNS:
        text = text[0].lower() + text[1:]
    return text


@functools.cache
def _docstrings(module: str, file: str) -> Mapping[tuple[str, str], str]:
    """The docstrings below the fields of a module's classes, by class and field.

    Args:
        module: Name of the module.
        file: Its file, which tells programs apart that one process runs as `__main__`, in turn.
    """
    # Parsing whole modules would take a tenth of the time of --help. Their layout, which the
    # formatter enforces, is enough; a test compares the result with the modules' syntax trees.
    docstrings: dict[tuple[str, str], str] = {}
    class_name = ""
    field = ""
    lines = iter(inspect.getsource(importlib.import_module(module)).splitlines())
    for line in lines:
        if start := CLASS.match(line):
            class_name = start[1]
            field = ""
        elif start := FIELD.match(line):
            field = start[1]
        elif line.startswith('    """'):
            text = line
            while not (text.endswith('"""') and len(text.strip()) > len('"""')):
                text += "\n" + next(lines)
            if field:
                docstrings[class_name, field] = ast.literal_eval(text.strip())
            field = ""
        elif OTHER.match(line):
            field = ""
    return docstrings
