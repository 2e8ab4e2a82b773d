"""Plans a run in a Python program."""

from __future__ import annotations

from typing import Any

from megatron_ds.api.settings_words import words_of
from megatron_ds.cli.command import parse, table_of
from megatron_ds.cli.flags import training_flags
from megatron_ds.planning.command import Options, plan_values


def plan(**settings: Any) -> dict[str, Any]:
    """Predicts the memory, communication and time of a run, without starting anything.

    Args:
        settings:
            Flags of `megatron-ds plan` and of `pretrain_gpt.py` with underscores, such as
            `preset="llama3.2-1b"`, `world_size=8`, `hardware="h100"`, `seq_length=8192`.

    Returns:
        `dict`: What `megatron-ds plan --json` prints: `parameters`, `tokens_per_second`, `mfu`,
        `days`, `memory` (bytes), `seconds` of a step, `communication`, `suggestions` with their
        `flags`, and others.

    Raises:
        SettingsRejected: With all problems of the settings.

    Example:
        ```python
        >>> plan = megatron_ds.plan(preset="gpt2-124m", world_size=8, train_tokens="10B")
        >>> plan["days"], plan["memory"]["peak"] / 1e9, plan["suggestions"][0]["flags"]
        ```
    """
    training: list[str] = []
    words = words_of(settings, table_of(Options), training_flags())
    options = parse(Options, words, unknown=training, raises=True)
    return plan_values(options, training)
