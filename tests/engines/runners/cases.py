"""What a runner of an engine does: loads models and writes what the engine computes of them.

A runner is a program `ENGINE.py JOB.json` that runs with the packages of its engine alone. The job
has `cases`, each with a folder or file (`model`), token ids (`ids`), a text that is continued by
`new` tokens (`prompt`), a `scratch` folder and the name of its result (`key`); and the `folder` of
results, which gets KEY.partial before each case and KEY.json after it. Log probabilities are in
KEY.npy next to it: [tokens, vocabulary], or [tokens - 1] of the given ids.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np

SHOWN_CHARACTERS = 300
"""Characters of an error that are kept."""


class Model(Protocol):
    """A model in an engine."""

    def log_probabilities(self, ids: list[int]) -> Any:
        """Log probabilities in fp32, [tokens, vocabulary] or [tokens - 1] of the ids."""

    def continued(self, prompt: str, new: int) -> str:
        """The text of the `new` most probable tokens after a text."""


def log_softmax(logits: Any) -> Any:
    """Log probabilities of logits [tokens, vocabulary]."""
    values = np.asarray(logits, np.float64)
    values = values - values.max(-1, keepdims=True)
    return values - np.log(np.exp(values).sum(-1, keepdims=True))


def described(error: BaseException) -> str:
    """Type and first line of an error, with the next one if it is a title."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if lines and lines[0].endswith(":"):
        lines[0] += f" {' '.join(lines[1:2])}"
    return ": ".join([type(error).__name__, *lines[:1]])[:SHOWN_CHARACTERS]


def run(load: Callable[[str, str], Model]) -> None:
    """Runs the cases of a job.

    Args:
        load: Loads a model, given its folder or file and a scratch folder.
    """
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    folder = Path(job["folder"])
    for case in job["cases"]:
        start = time.perf_counter()
        result: dict[str, Any] = {"name": case["name"]}
        written = folder / f"{case['key']}.partial"
        written.touch()
        try:
            model = load(case["model"], case["scratch"])
            values = np.asarray(model.log_probabilities(case["ids"]), np.float32)
            np.save(folder / f"{case['key']}.npy", values)
            result["text"] = model.continued(case["prompt"], case["new"])
            del model
        except (Exception, SystemExit) as error:
            result["error"] = described(error)
        result["seconds"] = round(time.perf_counter() - start, 2)
        written.write_text(json.dumps(result), encoding="utf-8")
        written.rename(folder / f"{case['key']}.json")
