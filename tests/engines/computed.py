"""What engines have computed of exports, which later runs take instead of computing it again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
HERE = Path(__file__).parent
ENVIRONMENTS = REPOSITORY / "build" / "engines"
"""Folder of the engines' environments and results."""


class Computed:
    """Results of an engine, by all that it was given.

    A result is KEY.json and, if there are log probabilities, KEY.npy.
    """

    def __init__(self, engine: str, folder: Path | None = None, runner: Path | None = None) -> None:
        """
        Args:
            engine: Its name.
            folder: Folder of its results; None: that of the repository.
            runner: The program that runs it; None: that of the repository.
        """
        name = engine.replace(".", "_").replace("-", "_")
        self.folder = folder or ENVIRONMENTS / "computed" / engine
        self.folder.mkdir(parents=True, exist_ok=True)
        self.runner = runner or HERE / "runners" / f"run_{name}.py"
        requirements = HERE / "requirements" / f"{engine}.txt"
        programs = (requirements, self.runner, HERE / "runners" / "cases.py")
        self._programs = hashlib.sha256()
        for file in programs:
            self._programs.update(file.read_bytes() if file.exists() else b"")

    def key(self, path: Path, case: Mapping[str, Any]) -> str:
        """The name of a result.

        Args:
            path: The exported file, or folder.
            case: What else the engine is given.
        """
        digest = self._programs.copy()
        digest.update(json.dumps(case, sort_keys=True).encode())
        files = sorted(path.iterdir()) if path.is_dir() else [path]
        for file in files:
            digest.update(file.name.encode())
            digest.update(file.read_bytes())
        return digest.hexdigest()[:32]

    def result(self, key: str) -> dict[str, Any] | None:
        """What the runner wrote; None if it has not."""
        file = self.folder / f"{key}.json"
        return dict(json.loads(file.read_text(encoding="utf-8"))) if file.exists() else None

    def values(self, key: str) -> Path:
        """The file of the log probabilities, which may be missing."""
        return self.folder / f"{key}.npy"

    def has_begun(self, key: str) -> bool:
        """Whether the runner began the model, and did not end it."""
        return self._begun(key).exists()

    def forget(self, key: str) -> None:
        """Removes the trace of a runner that was killed."""
        self._begun(key).unlink(missing_ok=True)

    def _begun(self, key: str) -> Path:
        return self.folder / f"{key}.partial"
