"""Logs to Weights & Biases. Imported only if it is used.

A resumed run continues the run of its folder. Steps after its checkpoint are logged a second time;
Weights & Biases keeps the first values, which are the same.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import wandb

from megatron_ds.config import Config
from megatron_ds.train_state import TrainState
from megatron_ds.training.records import RowLogger

RUN_ID = "run_id.txt"


class Wandb(RowLogger):
    """Metrics under the names that they have in metrics.jsonl.

    Args:
        config: Configuration of the run, which becomes the settings of its run there.
        state: State from which the run starts.
        folder: Folder for wandb's files and the identity of the run.

    Raises:
        OSError: If the service cannot be used. WANDB_MODE=offline uses none.
    """

    def __init__(self, config: Config, state: TrainState, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / RUN_ID
        if state.iteration == 0 or not file.is_file():
            file.write_text(secrets.token_hex(4), encoding="utf-8")
        with _as_os_errors():
            self._run = wandb.init(
                project=config.logging.wandb_project,
                entity=config.logging.wandb_entity,
                name=config.logging.wandb_exp_name,
                # wandb writes below a folder "wandb" in it.
                dir=str(folder.parent if folder.name == "wandb" else folder),
                id=file.read_text(encoding="utf-8").strip(),
                resume="allow",
                config=config.to_dict(),
                settings=wandb.Settings(console="off"),
            )

    def close(self) -> None:
        with _as_os_errors():
            self._run.finish()

    def write_row(self, values: Mapping[str, Any]) -> None:
        known = {name: value for name, value in values.items() if value is not None}
        with _as_os_errors():
            self._run.log(known, step=values["iteration"])


@contextmanager
def _as_os_errors() -> Iterator[None]:
    """Raises errors of wandb as OSError, which disables the logger but does not end the run."""
    try:
        yield
    except wandb.Error as error:
        raise OSError(str(error)) from error
