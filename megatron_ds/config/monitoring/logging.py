"""Options of logging."""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Iterator
from dataclasses import dataclass

from megatron_ds.config.checks import file_problems, folder_problems
from megatron_ds.config.fields import ANY_VALUE, option_field, when
from megatron_ds.config.problems import Problem

_tensorboard = functools.partial(option_field, only_with=when(tensorboard_dir=ANY_VALUE))


@dataclass(frozen=True)
class LoggingConfig:
    """The log, and the files and services that records are written to."""

    log_interval: int = option_field(100, minimum=1)
    log_format: str = option_field("auto", choices=("auto", "megatron", "short"))
    print_arguments: bool = option_field(False)
    tensorboard_dir: str | None = option_field(None, metavar="FOLDER")
    tensorboard_queue_size: int = _tensorboard(1000, minimum=1)
    tensorboard_log_interval: int = _tensorboard(1, minimum=1)
    log_timers_to_tensorboard: bool = _tensorboard(False)
    log_batch_size_to_tensorboard: bool = _tensorboard(False)
    log_learning_rate_to_tensorboard: bool = _tensorboard(
        True, aliases=("no-log-learnig-rate-to-tensorboard",)
    )
    log_loss_scale_to_tensorboard: bool = _tensorboard(True)
    log_validation_ppl_to_tensorboard: bool = _tensorboard(False)
    log_world_size_to_tensorboard: bool = _tensorboard(False)
    log_memory_to_tensorboard: bool = _tensorboard(False)
    log_dir: str | None = option_field(None, metavar="FOLDER")
    log_params_norm: bool = option_field(False)
    log_num_zeros_in_grad: bool = option_field(False)
    log_max_attention_logit: bool = option_field(False)
    log_layer_norms_interval: int | None = option_field(None, minimum=1)
    record_every: int | None = option_field(
        None, minimum=1, only_with=when(save=ANY_VALUE, metrics_jsonl=ANY_VALUE)
    )
    metrics_jsonl: str | None = option_field(None, metavar="FILE")
    metrics_csv: str | None = option_field(None, metavar="FILE")
    wandb_project: str | None = option_field(None, metavar="NAME")
    wandb_exp_name: str | None = option_field(
        None, metavar="NAME", only_with=when(wandb_project=ANY_VALUE)
    )
    wandb_entity: str | None = option_field(
        None, metavar="NAME", only_with=when(wandb_project=ANY_VALUE)
    )
    wandb_save_dir: str | None = option_field(
        None, metavar="FOLDER", only_with=when(wandb_project=ANY_VALUE)
    )

    @property
    def reads_optimizer(self) -> bool:
        """Whether gradients and updates are read in the optimizer's step."""
        intervals = self.log_layer_norms_interval, self.record_every
        return self.log_num_zeros_in_grad or any(intervals)

    def problems(self) -> Iterator[Problem]:
        """Loggers that cannot be opened."""
        if self.wandb_project is not None and importlib.util.find_spec("wandb") is None:
            yield Problem("wandb-missing")
        for name in ("wandb_save_dir", "tensorboard_dir", "log_dir"):
            yield from folder_problems(name, getattr(self, name))
        for name in ("metrics_jsonl", "metrics_csv"):
            yield from _new_file_problems(name, getattr(self, name))
        if None is not self.metrics_csv == self.metrics_jsonl:
            yield Problem("metrics-in-one-file", path=self.metrics_csv)


def _new_file_problems(name: str, path: str | None) -> Iterator[Problem]:
    """Yields reasons that a file of an option cannot be written, whether it exists or not."""
    if path is None:
        return
    if os.path.isdir(path):
        yield from file_problems(name, path)
        return
    for problem in folder_problems(name, os.path.dirname(os.path.abspath(path))):
        yield problem.extended(f" (for {path})")
