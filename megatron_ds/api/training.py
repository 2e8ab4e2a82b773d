"""Trains in a Python program or a notebook."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron_ds.api.progress_bar import ProgressBar
from megatron_ds.api.settings_words import words_of
from megatron_ds.cli.flags import training_flags
from megatron_ds.launch.process.lifecycle import guest_lifecycle
from megatron_ds.training.extensions import Callback, Extensions, OpenLogger
from megatron_ds.training.run import run
from megatron_ds.training.run_record import RunRecord


def pretrain(
    *,
    callbacks: Sequence[Callback] = (),
    loggers: Sequence[OpenLogger] = (),
    extensions: Extensions | None = None,
    progress: bool = True,
    **settings: Any,
) -> RunRecord:
    """Trains a model in this process, on one device.

    It is `pretrain_gpt.py` with one process: the same settings, checks, files and numbers. Ctrl-C,
    or the notebook's stop button, ends it after the step with a checkpoint in *save*. Several
    devices are used by `megatron-ds train --num-gpus N` with the same settings.

    Args:
        callbacks (sequence of [`Callback`], *optional*):
            Called at given points of the run; each may stop it, change the factor of its learning
            rate and log figures through its `control`.
        loggers (sequence of callables, *optional*):
            Each is called with the configuration and the state, and returns a [`Logger`].
        extensions ([`Extensions`], *optional*):
            Instead of both, if the dataset, the loss or the layers are replaced, too.
        progress (`bool`, *optional*, defaults to `True`):
            Shows a bar of the iterations.
        settings:
            Flags of `pretrain_gpt.py` with underscores. `True` is a flag without a value, a list
            gives several values, `None` leaves the flag out. `config="run.yaml"` reads a file.

    Returns:
        [`RunRecord`]: Losses, evaluations, status and newest checkpoint.

    Raises:
        SettingsRejected: With all problems of the settings; nothing was started or written.
        RunAborted: If too many steps were skipped, or a checkpoint could not be saved.
        UserError: If files are missing or damaged.

    Example:
        ```python
        >>> run = megatron_ds.pretrain(preset="gpt2-124m", mock_data=True, train_iters=10, lr=1e-3)
        >>> run.losses[-1], run.checkpoint
        ```
    """
    parts = extensions or Extensions(callbacks=callbacks, loggers=loggers)
    bar = ProgressBar()
    if progress:
        parts = parts.with_observer(bar, bar.open)
    words = words_of(settings, training_flags())
    with guest_lifecycle() as life:
        try:
            return run(parts, words, life, is_guest=True)
        finally:
            bar.close()
