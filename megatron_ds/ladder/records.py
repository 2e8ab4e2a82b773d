"""The files of a ladder: its runs, their settings, and the fit.

Owns FOLDER/ladder.json and FOLDER/fit.json.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_ds.config.problems import user_error
from megatron_ds.fileio.atomic import write_atomically
from megatron_ds.scaling.rungs import Rung

LADDER = "ladder.json"
FIT = "fit.json"
REPORT = "report.html"
RUN_NAME = "run-"
"""Beginning of the name of a run, before its number from 0."""
FORMAT = 1
"""Version of both files."""


@dataclass(frozen=True)
class RunEntry:
    """A run of a ladder, or the large run."""

    name: str
    parameters: int
    """Parameters that multiply each token."""
    tokens: int
    operations: float
    """Operations of the training, without recomputation."""
    layers: int
    hidden_size: int
    samples: int
    """Samples per step."""
    steps: int
    seed: int

    @classmethod
    def of(cls, name: str, rung: Rung) -> RunEntry:
        """Describes a run."""
        config = rung.config
        return cls(
            name,
            rung.parameters,
            rung.tokens,
            float(rung.operations),
            config.model.num_layers,
            config.model.hidden_size,
            rung.samples,
            rung.steps,
            config.runtime.seed,
        )

    @property
    def ratio(self) -> float:
        """Tokens per parameter."""
        return self.tokens / self.parameters


@dataclass(frozen=True)
class LadderRecord:
    """The runs of a ladder."""

    folder: Path
    target: RunEntry
    runs: tuple[RunEntry, ...]
    ranks: int
    """Processes of each run."""

    def settings_of(self, run: RunEntry) -> Path:
        """The file for --config."""
        return self.folder / f"{run.name}.yaml"

    def save_of(self, run: RunEntry) -> Path:
        """The --save folder."""
        return self.folder / run.name

    def write(self) -> None:
        """Writes FOLDER/ladder.json."""
        content = {
            "format": FORMAT,
            "ranks": self.ranks,
            "target": dataclasses.asdict(self.target),
            "runs": [dataclasses.asdict(run) for run in self.runs],
        }
        write_json(self.folder / LADDER, content)


def is_ladder(folder: Path) -> bool:
    """Whether a ladder has been planned in a folder."""
    return (folder / LADDER).is_file()


def read_ladder(folder: Path) -> LadderRecord:
    """The runs of a ladder.

    Raises:
        UserError: If the file is damaged.
    """
    path = folder / LADDER
    content = read_json(path)
    try:
        target = RunEntry(**content["target"])
        runs = tuple(RunEntry(**entry) for entry in content["runs"])
        return LadderRecord(folder, target, runs, int(content["ranks"]))
    except (KeyError, TypeError, ValueError) as error:
        raise user_error("ladder-file-damaged", path=path, error=error) from None


def read_json(path: Path) -> dict[str, Any]:
    """The object of a file.

    Raises:
        UserError: If it is not JSON of this version.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["format"] != FORMAT:
            raise ValueError(f"format {content['format']}")
    except (KeyError, TypeError, ValueError) as error:
        raise user_error("ladder-file-damaged", path=path, error=error) from None
    return dict(content)


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Writes a file, which appears complete or not at all."""
    write_atomically(path, (json.dumps(content, indent=1) + "\n").encode())
