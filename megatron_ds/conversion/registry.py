"""Recognizes the format of a folder, and opens it: what --load and the converter read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megatron_ds.config.problems import UserError, user_error
from megatron_ds.conversion.huggingface.read_write import open_hf
from megatron_ds.conversion.megatron.detect import (
    is_megatron,
    is_torch_dist,
    is_universal_of_megatron,
)
from megatron_ds.conversion.megatron.open import open_megatron
from megatron_ds.conversion.native import is_native, open_native
from megatron_ds.conversion.source import WeightsSource
from megatron_ds.conversion.universal import is_own_universal, open_universal
from megatron_ds.conversion.weights_folder import find_damage, open_weights_folder
from megatron_ds.conversion.weights_locations import is_hf, is_weights_folder

Warn = Callable[[str], None]


@dataclass(frozen=True)
class Format:
    """How a format is recognized and opened."""

    name: str
    recognizes: Callable[[Path], bool]
    open: Callable[[Path, Warn], WeightsSource]
    """Called with the folder, and with a function for warnings."""


def _open_verified(path: Path, warn: Warn) -> WeightsSource:
    if (damage := find_damage(path)) is not None:
        raise UserError(damage)
    return open_weights_folder(path)


FORMATS = (
    # Megatron-DeepSpeed's folders have the names of native ones.
    Format("megatron", is_megatron, open_megatron),
    Format("torch_dist", is_torch_dist, open_megatron),
    Format("universal", is_own_universal, open_universal),
    Format("universal", is_universal_of_megatron, open_megatron),
    Format("native", is_native, open_native),
    Format("native", is_weights_folder, _open_verified),
    Format("hf", is_hf, lambda path, warn: open_hf(path)),
)
"""In the order in which they are tried. A folder of weights may have become the --save folder of a
training, whose checkpoints are then the newer ones."""
AUTO = "auto"
NAMES = ("native", "universal", "hf", "megatron", "torch_dist")


def format_of(path: Path) -> str | None:
    """The format of a folder; None if it is none of the known ones."""
    return next((each.name for each in FORMATS if each.recognizes(path)), None)


def recognize(path: Path, name: str = AUTO) -> Format:
    """The format of a folder.

    Args:
        path: The folder.
        name: Name of the format; "auto" recognizes it. If the folder has another one, the error of
            `Format.open` names what is missing.

    Raises:
        UserError: If it is none of the known ones.
    """
    possible = [each for each in FORMATS if name in (AUTO, each.name)]
    found = next((each for each in possible if each.recognizes(path)), None)
    if found is None and name != AUTO:
        found = possible[0]
    if found is None:
        raise user_error("weights-format-unknown", path=path, known=", ".join(NAMES))
    return found


def open_source(path: Path, name: str = AUTO, warn: Warn = lambda text: None) -> WeightsSource:
    """Opens the weights in a folder; the checksums of native ones are verified.

    Args:
        path: The folder.
        name: Its format; "auto" recognizes it.
        warn: Called with each warning.

    Raises:
        UserError: If the folder has another format, is damaged, or has parts that the model lacks.
    """
    return recognize(path, name).open(path, warn)
