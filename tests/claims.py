"""Claims about the package, stated at the tests that verify them.

`claim` decorates a test, or is called at the top of a file for all of its tests.
docs/development/verified.md lists all claims: `python -m tests.pages` writes it from the source of
the tests.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

Test = TypeVar("Test", bound=Callable[..., object])

SECTIONS = {
    "data": "Token files and preprocessing",
    "samples": "Samples and blends",
    "cleaning": "Cleaning",
    "tokenizers": "Tokenizers",
    "parallel": "Parallel training",
    "deepspeed": "DeepSpeed JSON",
    "precision": "Precision and kernels",
    "accelerators": "Accelerators",
    "non-finite": "Steps with non-finite gradients",
    "schedules": "Schedules",
    "checkpoints": "Checkpoints and resume",
    "stopping": "Stopping and failures",
    "logging": "Logging and estimates",
    "command-line": "Command line",
    "extension": "Extension",
    "conversion": "Conversion",
    "serving": "Generation and serving",
}
"""Headings of the page by section, in its order."""


def claim(section: str, text: str) -> Callable[[Test], Test]:
    """States what a test verifies. Tests with the same claim share a row of the page.

    Args:
        section: A key of `SECTIONS`.
        text: The claim, in Markdown.

    Raises:
        KeyError: If there is no such section.
    """
    assert SECTIONS[section]
    assert text
    return lambda test: test
