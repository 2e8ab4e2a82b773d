"""Options of checkpoints."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

from megatron_ds.config.checks import folder_problems
from megatron_ds.config.fields import ANY_VALUE, option_field, when
from megatron_ds.config.problems import Problem

SAVE = when(save=ANY_VALUE)
LOAD = when(load=ANY_VALUE)

FORMATS = ("native", "universal", "hf", "megatron", "torch_dist")
"""Formats that --load can name before the folder, as in hf:FOLDER."""


def split_location(load: str) -> tuple[str, str]:
    """The format that a value of --load names, or "auto", and the folder."""
    name, colon, folder = load.partition(":")
    return (name, folder) if colon and name in FORMATS else ("auto", load)


@dataclass(frozen=True)
class CheckpointConfig:
    """Saving and loading of checkpoints."""

    save: str | None = option_field(None, "output folder for checkpoints", metavar="FOLDER")
    load: str | None = option_field(
        None,
        "folder of checkpoints to resume from; if it has none, training starts from scratch. Or "
        "weights to start from, in any format of tools/convert_checkpoint.py: hf:FOLDER is a model "
        "of Hugging Face. Options of the model that are not given are then its own",
        metavar="FOLDER",
    )
    save_interval: int | None = option_field(
        None,
        "number of iterations between checkpoints; the last iteration is always saved",
        minimum=1,
        only_with=SAVE,
    )
    keep_last: int | None = option_field(
        None,
        "number of checkpoints to keep in --save; older ones are removed after each complete save "
        "(default: all)",
        minimum=1,
        only_with=SAVE,
    )
    on_save_error: str = option_field(
        "continue",
        "what to do when saving fails: continue training until the next checkpoint, or exit. If "
        "the final checkpoint fails, the run always exits with an error",
        choices=("continue", "exit"),
    )
    ckpt_step: int | None = option_field(
        None,
        "iteration of the checkpoint to load (default: the one that the file `latest` names)",
        minimum=1,
        only_with=LOAD,
    )
    on_damaged_checkpoint: str = option_field(
        "fallback",
        "what to do when the checkpoint to load is damaged: load the one before it, or exit",
        choices=("fallback", "error"),
    )
    finetune: bool = option_field(
        False,
        "start a new run from the weights of --load: at iteration 0, with new states of the "
        "optimizer, and with any data",
        only_with=LOAD,
    )
    no_load_optim: bool = option_field(
        False,
        "load the weights and the progress of the run, but not the states of the optimizer, which "
        "may be another one",
        only_with=LOAD,
    )
    universal_checkpoint: bool = option_field(
        False,
        "load the universal checkpoint that the file `latest_universal` names, unless --load has a "
        "checkpoint of a later iteration. Checkpoints of other layouts need no conversion",
        only_with=LOAD,
    )
    exit_on_missing_checkpoint: bool = option_field(
        False, "exit with an error if --load has no checkpoint", only_with=LOAD
    )

    def problems(self) -> Iterator[Problem]:
        """Check that the folders can be used."""
        yield from folder_problems("save", self.save)
        if self.load is None:
            return
        folder, name = os.path.split(os.path.normpath(self.load))
        if name.startswith("global_step") and not name.endswith("_universal"):
            yield Problem("load-is-one-checkpoint", settings=self, name=name, folder=folder or ".")
        elif self.finetune and self.save is not None and _is_same(self.save, self.load):
            yield Problem("finetune-in-the-same-folder", settings=self)
        elif os.path.exists(self.load) and not os.path.isdir(self.load):
            yield Problem("load-is-a-file", settings=self)


def _is_same(one: str, other: str) -> bool:
    return os.path.realpath(one) == os.path.realpath(other)
