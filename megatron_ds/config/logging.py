"""Options of logging, evaluation and the end of a run."""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Iterator
from dataclasses import dataclass

from megatron_ds.config.checks import file_problems, folder_problems
from megatron_ds.config.fields import ANY_VALUE, option_field, when
from megatron_ds.config.problems import Problem

TENSORBOARD = when(tensorboard_dir=ANY_VALUE)

_tensorboard = functools.partial(option_field, only_with=TENSORBOARD)


@dataclass(frozen=True)
class LoggingConfig:
    """Logging, evaluation and exit conditions."""

    log_interval: int = option_field(100, "number of iterations between log lines", minimum=1)
    log_format: str = option_field(
        "auto",
        "log lines: all fields of Megatron's (megatron), or those that a person follows (short); "
        "auto: short on a terminal",
        choices=("auto", "megatron", "short"),
    )
    print_arguments: bool = option_field(False, "print all arguments at the start")
    eval_interval: int | None = option_field(
        1000, "number of iterations between validations", minimum=1
    )
    eval_iters: int = option_field(
        100, "number of global batches per validation and test; 0 disables them", minimum=0
    )
    skip_train: bool = option_field(False, "skip training; only evaluate on validation and test")
    exit_interval: int | None = option_field(
        None, "save and exit when the iteration is divisible by this value", minimum=1
    )
    exit_duration_in_mins: float | None = option_field(
        None, "save and exit after this many minutes", above=0
    )
    kill_switch_path: str | None = option_field(
        None, "save and exit when this file exists", aliases=("kill-switch-file",), metavar="FILE"
    )
    tensorboard_dir: str | None = option_field(
        None, "folder for TensorBoard logs (default: no TensorBoard logs)", metavar="FOLDER"
    )
    tensorboard_queue_size: int = _tensorboard(
        1000, "maximum number of pending TensorBoard events before a flush", minimum=1
    )
    tensorboard_log_interval: int = _tensorboard(
        1, "number of iterations between TensorBoard events", minimum=1
    )
    log_timers_to_tensorboard: bool = _tensorboard(
        False, "log iteration times and throughput to TensorBoard"
    )
    log_batch_size_to_tensorboard: bool = _tensorboard(
        False, "log the global batch size to TensorBoard"
    )
    log_learning_rate_to_tensorboard: bool = _tensorboard(
        True,
        "do not log the learning rate to TensorBoard",
        aliases=("no-log-learnig-rate-to-tensorboard",),
    )
    log_loss_scale_to_tensorboard: bool = _tensorboard(
        True, "do not log the loss scale to TensorBoard"
    )
    log_validation_ppl_to_tensorboard: bool = _tensorboard(
        False, "log the validation perplexity to TensorBoard"
    )
    log_world_size_to_tensorboard: bool = _tensorboard(
        False, "log the number of processes to TensorBoard"
    )
    log_memory_to_tensorboard: bool = _tensorboard(False, "log device memory to TensorBoard")
    log_params_norm: bool = option_field(
        False, "log the norm of all parameters to the console and TensorBoard"
    )
    metrics_jsonl: str | None = option_field(
        None,
        "file for metrics, one JSON record per step (default: metrics.jsonl in --save, if given)",
        metavar="FILE",
    )

    wandb_project: str | None = option_field(
        None, "project of Weights & Biases to log to (default: none)", metavar="NAME"
    )
    wandb_exp_name: str | None = option_field(
        None,
        "name of the run in Weights & Biases (default: a random one)",
        metavar="NAME",
        only_with=when(wandb_project=ANY_VALUE),
    )
    wandb_save_dir: str | None = option_field(
        None,
        "folder for the files of Weights & Biases (default: wandb in --save, if given)",
        metavar="FOLDER",
        only_with=when(wandb_project=ANY_VALUE),
    )

    def problems(self) -> Iterator[Problem]:
        if self.wandb_project is not None and importlib.util.find_spec("wandb") is None:
            yield Problem("wandb-missing")
        yield from folder_problems("wandb_save_dir", self.wandb_save_dir)
        if self.skip_train and self.eval_iters == 0:
            yield Problem("nothing-to-evaluate")
        yield from folder_problems("tensorboard_dir", self.tensorboard_dir)
        if self.metrics_jsonl is not None and os.path.isdir(self.metrics_jsonl):
            yield from file_problems("metrics_jsonl", self.metrics_jsonl)
        elif self.metrics_jsonl is not None:
            folder = os.path.dirname(os.path.abspath(self.metrics_jsonl))
            for problem in folder_problems("metrics_jsonl", folder):
                yield problem.extended(f" (for {self.metrics_jsonl})")
