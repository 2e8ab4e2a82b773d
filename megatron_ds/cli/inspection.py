"""Results of a tool that shows what a file contains: lines, or one JSON object. Knows no file."""

from __future__ import annotations

import json
from typing import Any


class Inspection:
    """Results that are printed line by line or, for --json, together at the end.

    Attributes:
        found: The results by name, for JSON.
        good: Whether nothing is damaged or different.
    """

    def __init__(self, *, as_json: bool) -> None:
        self.found: dict[str, Any] = {}
        self.good = True
        self._as_json = as_json

    def show(self, *lines: str) -> None:
        """Prints lines, unless the results are printed as JSON."""
        if not self._as_json:
            print(*lines, sep="\n")

    def finish(self) -> int:
        """Prints the JSON object, and returns the exit status."""
        if self._as_json:
            print(json.dumps(self.found))
        return 0 if self.good else 1
