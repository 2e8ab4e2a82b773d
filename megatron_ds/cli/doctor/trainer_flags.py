"""Flags of a script with Hugging Face's Trainer, as settings of a file of it. Knows no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron_ds.cli.flags import dashed

MARKS = {
    "per-device-train-batch-size",
    "per-device-eval-batch-size",
    "model-name-or-path",
    "lr-scheduler-type",
    "num-train-epochs",
    "gradient-checkpointing",
    "report-to",
    "save-strategy",
    "do-train",
}
"""Flags of TrainingArguments and of its examples that Megatron-LM and its forks have not."""
FEWEST = 2
"""Such flags of a command that is one of the Trainer."""


def is_of_trainer(flags: Sequence[str]) -> bool:
    """Whether flags are TrainingArguments, and not a mistake in a command of Megatron-LM."""
    names = {dashed(word.partition("=")[0]) for word in flags if word.startswith("--")}
    return len(MARKS & names) >= FEWEST and "num-layers" not in names


def trainer_values(flags: Sequence[str]) -> dict[str, Any]:
    """The settings by key, as HfArgumentParser reads them: a flag without a value is true."""
    values: dict[str, list[Any]] = {}
    name = ""
    for word in flags:
        if word.startswith("--"):
            name, equals, value = word.removeprefix("--").partition("=")
            name = name.replace("-", "_")
            values[name] = [_value(value)] if equals else []
        elif name:
            values[name].append(_value(word))
    return {
        name: (items if len(items) > 1 else items[0]) if items else True
        for name, items in values.items()
    }


def _value(word: str) -> Any:
    """A truth value or a number, if it is one."""
    if word in ("True", "true", "False", "false"):
        return word in ("True", "true")
    try:
        decimal = float(word)
    except ValueError:
        return word
    return int(word) if word.lstrip("-").isdecimal() else decimal
