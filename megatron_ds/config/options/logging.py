"""Options of logging, evaluation and the end of a run."""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from megatron_ds.config.checks import file_problems, folder_problems
from megatron_ds.config.fields import ANY_VALUE, NON_ZERO, Condition, option_field, when
from megatron_ds.config.problems import Problem

TENSORBOARD = when(tensorboard_dir=ANY_VALUE)
EVAL_TASKS = when(eval_tasks=ANY_VALUE)
FILE_TASKS = ("perplexity", "WIKITEXT103", "LAMBADA")
"""Tasks of --eval-tasks that read a file."""

_profile = functools.partial(option_field, only_with=when(profile=True))
_of_eval_tasks = functools.partial(option_field, only_with=EVAL_TASKS)
_tensorboard = functools.partial(option_field, only_with=TENSORBOARD)


class FileTask(NamedTuple):
    """A task on a file."""

    name: str
    """One of FILE_TASKS."""
    path: str
    field: str
    """The option that has the path."""


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
        1000, "number of iterations between validations", minimum=1, zero_is_off=True
    )
    eval_iters: int = option_field(
        100, "number of global batches per validation and test; 0 disables them", minimum=0
    )
    skip_train: bool = option_field(False, "skip training; only evaluate on validation and test")
    eval_tasks: tuple[str, ...] | None = option_field(
        None,
        "tasks that are evaluated during training: names of lm-evaluation-harness, separated by "
        "commas or spaces, and perplexity=FILE, WIKITEXT103=FILE or LAMBADA=FILE",
        nargs="*",
        metavar="TASK",
    )
    eval_tasks_interval: int | None = _of_eval_tasks(
        None,
        "number of iterations between evaluations of --eval-tasks (default: --eval-interval)",
        minimum=1,
    )
    eval_tasks_include_path: tuple[str, ...] = _of_eval_tasks(
        (), "folders with tasks of your own (YAML) for --eval-tasks", nargs="*", metavar="FOLDER"
    )
    eval_tasks_num_fewshot: int | None = _of_eval_tasks(
        None, "examples before each question of --eval-tasks (default: the task's)", minimum=0
    )
    eval_tasks_limit: int | None = _of_eval_tasks(
        None, "questions of each of --eval-tasks (default: all)", minimum=1
    )
    eval_only: tuple[str, ...] | None = option_field(
        None,
        "skip training; evaluate the loss of these files, in the formats of tools/evaluate.py, and "
        "no other data",
        nargs="*",
        metavar="FILE",
    )
    overlapping_eval: int = option_field(
        32,
        "tokens by which a window of --eval-only and of --eval-tasks with a file is moved, as in "
        "tools/evaluate.py",
        minimum=1,
        only_with=when(eval_tasks=ANY_VALUE, eval_only=ANY_VALUE),
    )
    exit_interval: int | None = option_field(
        None,
        "save and exit when the iteration is divisible by this value",
        minimum=1,
        zero_is_off=True,
    )
    exit_duration_in_mins: float | None = option_field(
        None, "save and exit after this many minutes", above=0, zero_is_off=True
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
    log_dir: str | None = option_field(
        None, "folder for a log file of each rank (default: none)", metavar="FOLDER"
    )
    log_straggler: bool = option_field(
        False,
        "log the times of the ranks without communication, and name the slowest ranks and hosts",
        only_with=Condition({"compile": (False,)}, without_flags=True),
    )
    straggler_minmax_count: int = option_field(
        1,
        "number of slowest ranks that --log-straggler names",
        minimum=1,
        only_with=when(log_straggler=True),
    )
    log_params_norm: bool = option_field(
        False, "log the norm of all parameters to the console and TensorBoard"
    )
    profile: bool = option_field(
        False, "trace some steps with torch.profiler, and summarize their time and memory"
    )
    profile_step_start: int = _profile(10, "iteration after which the profile begins", minimum=0)
    profile_step_end: int = _profile(12, "last iteration of the profile", minimum=1)
    profile_ranks: tuple[int, ...] = _profile(
        (0,), "global ranks that are profiled", nargs="*", minimum=0
    )
    profile_dir: str | None = _profile(
        None,
        "folder for profiles (default: profile in --tensorboard-dir or else in --save)",
        metavar="FOLDER",
    )
    timing_log_level: int = option_field(
        0,
        "times in the log: of complete steps (0), also of passes, optimizer and communication (1), "
        "also of each kind of collective (2)",
        minimum=0,
        maximum=2,
    )
    timing_log_option: str = option_field(
        "minmax",
        "times of which ranks are logged: the largest, the smallest and the largest, or all",
        choices=("max", "minmax", "all"),
        only_with=when(timing_log_level=NON_ZERO),
    )
    log_num_zeros_in_grad: bool = option_field(
        False, "log the number of zeros in the gradient of all parameters"
    )
    log_layer_norms_interval: int | None = option_field(
        None,
        "number of iterations between norms of each layer: of its gradient, of its parameters, and "
        "of their update relative to them (default: none)",
        minimum=1,
    )
    metrics_jsonl: str | None = option_field(
        None,
        "file for metrics, one JSON record per step (default: metrics.jsonl in --save, if given)",
        metavar="FILE",
    )
    metrics_csv: str | None = option_field(
        None, "file for metrics as a table, one row per step (default: none)", metavar="FILE"
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

    @property
    def trains(self) -> bool:
        """Whether the run takes steps, and does not only evaluate."""
        return not self.skip_train and self.eval_only is None

    @property
    def harness_tasks(self) -> tuple[str, ...]:
        """The names in --eval-tasks that are the harness's."""
        entries = (entry for entry in self.eval_tasks or () if not _is_file_task(entry))
        return tuple(name for entry in entries for name in entry.split(",") if name)

    @property
    def file_tasks(self) -> tuple[FileTask, ...]:
        """The tasks on files of --eval-tasks and --eval-only."""
        entries = (entry for entry in self.eval_tasks or () if _is_file_task(entry))
        pairs = (entry.split("=", 1) for entry in entries)
        return (
            *(FileTask(name, path, "eval_tasks") for name, path in pairs),
            *(FileTask(FILE_TASKS[0], path, "eval_only") for path in self.eval_only or ()),
        )

    @property
    def times_parts(self) -> bool:
        """Whether the step that ends a log interval is timed."""
        return self.timing_log_level > 0 or self.log_straggler

    @property
    def reads_optimizer(self) -> bool:
        """Whether gradients and updates are read in the optimizer's step."""
        return self.log_num_zeros_in_grad or self.log_layer_norms_interval is not None

    def problems(self, world_size: int, *, saves: bool) -> Iterator[Problem]:
        """Settings that cannot be combined.

        Args:
            world_size: Number of processes.
            saves: Whether the run has a folder for checkpoints.
        """
        if self.profile:
            yield from self._profile_problems(world_size, saves=saves)
        if self.harness_tasks and importlib.util.find_spec("lm_eval") is None:
            yield Problem("harness-missing", "eval_tasks")
        for folder in self.eval_tasks_include_path if self.eval_tasks is not None else ():
            if not os.path.isdir(folder):
                yield Problem("task-folder-missing", folder=folder)
        if self.wandb_project is not None and importlib.util.find_spec("wandb") is None:
            yield Problem("wandb-missing")
        yield from folder_problems("wandb_save_dir", self.wandb_save_dir)
        has_tasks = self.eval_tasks is not None or self.eval_only is not None
        if self.skip_train and self.eval_iters == 0 and not has_tasks:
            yield Problem("nothing-to-evaluate")
        yield from folder_problems("tensorboard_dir", self.tensorboard_dir)
        yield from folder_problems("log_dir", self.log_dir)
        for name in ("metrics_jsonl", "metrics_csv"):
            yield from _new_file_problems(name, getattr(self, name))
        if None is not self.metrics_csv == self.metrics_jsonl:
            yield Problem("metrics-in-one-file", path=self.metrics_csv)

    def _profile_problems(self, world_size: int, *, saves: bool) -> Iterator[Problem]:
        start, end = self.profile_step_start, self.profile_step_end
        if start >= end:
            yield Problem("profile-without-steps", start=start, end=end)
        if not self.profile_ranks:
            yield Problem("profile-without-ranks")
        elif (unknown := max(self.profile_ranks)) >= world_size:
            yield Problem("profile-of-unknown-rank", rank=unknown, last=world_size - 1)
        if self.profile_dir is None and self.tensorboard_dir is None and not saves:
            yield Problem("profile-without-folder")
        yield from folder_problems("profile_dir", self.profile_dir)


def _new_file_problems(name: str, path: str | None) -> Iterator[Problem]:
    """Why a file of an option cannot be written, whether it exists or not."""
    if path is None:
        return
    if os.path.isdir(path):
        yield from file_problems(name, path)
        return
    for problem in folder_problems(name, os.path.dirname(os.path.abspath(path))):
        yield problem.extended(f" (for {path})")


def _is_file_task(entry: str) -> bool:
    return entry.startswith(tuple(f"{name}=" for name in FILE_TASKS))
