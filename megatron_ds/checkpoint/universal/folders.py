"""Names and places of DeepSpeed's universal checkpoints. Imports no torch.

SAVE/latest_universal                          name of the folder that was converted last
SAVE/global_stepN_universal/
    zero/optimizer_state.pt                    settings of the optimizer, loss scaler
    zero/NAME/{fp32,exp_avg,exp_avg_sq}.pt     full tensors of one parameter
    zero/NAME/step.pt                          steps of the optimizer
    *_model_states.pt                          DeepSpeed's counters and settings
    run.json, tokenizer/, manifest.json        of checkpoints of this program
"""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

SUFFIX = "_universal"
POINTER = "latest_universal"
ZERO = "zero"
OPTIMIZER_STATE = "optimizer_state.pt"
FP32 = "fp32"
"""Stem of a parameter's file with its master weights."""
STEP = "step"
"""Stem of its file with the number of steps."""
STATES = "*_model_states.pt"


def is_universal(path: Path) -> bool:
    """Whether a folder is a universal checkpoint."""
    return any((path / ZERO).glob(f"*/{FP32}.pt"))


def list_universal(folder: Path) -> list[Path]:
    """The universal checkpoints of a folder: itself, or the ones below it.

    The one that the pointer names is the first, before later iterations.
    """
    if is_universal(folder):
        return [folder]
    named = ""
    with suppress(OSError):
        if (folder / POINTER).is_file():
            named = (folder / POINTER).read_text("utf-8-sig", "replace").strip()
    paths = [
        path
        for path in (folder.iterdir() if folder.is_dir() else ())
        if path.name in (named, f"global_step{universal_iteration(path)}{SUFFIX}")
        and is_universal(path)
    ]
    return sorted(paths, key=lambda path: (path.name != named, -universal_iteration(path)))


def universal_iteration(path: Path) -> int:
    """The iteration in the name of a universal checkpoint; -1 if it has none."""
    match = re.fullmatch(rf"global_step(\d+)({SUFFIX})?", path.name)
    return -1 if match is None else int(match[1])
