"""Options of logging, profiling, early ends of a run, and checks of its steps."""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Iterator

from megatron_ds.config.checks import file_problems, folder_problems
from megatron_ds.config.fields import ANY_VALUE, NON_ZERO, Condition, Decides, option_field, when
from megatron_ds.config.problems import Problem
from megatron_ds.dataclass import dataclass

_tensorboard = functools.partial(option_field, only_with=when(tensorboard_dir=ANY_VALUE))


@dataclass(frozen=True)
class LoggingConfig:
    """The log, and the files and services that records are written to."""

    DECIDES = Decides.OPERATION

    log_interval: int = option_field(100, minimum=1, common=True)
    """Number of iterations between log lines."""
    log_format: str = option_field("auto", choices=("auto", "megatron", "short"))
    """Log lines: all fields of Megatron's (megatron), or those that a person follows (short); auto:
    short on a terminal."""
    print_arguments: bool = option_field(False)
    """Print all arguments at the start."""
    tensorboard_dir: str | None = option_field(
        None, metavar="FOLDER", common=True, decides=Decides.RUN
    )
    """Folder for TensorBoard logs (default: no TensorBoard logs)."""
    tensorboard_queue_size: int = _tensorboard(1000, minimum=1)
    """Maximum number of pending TensorBoard events before a flush."""
    tensorboard_log_interval: int = _tensorboard(1, minimum=1)
    """Number of iterations between TensorBoard events."""
    log_timers_to_tensorboard: bool = _tensorboard(False)
    """Log iteration times and throughput to TensorBoard."""
    log_batch_size_to_tensorboard: bool = _tensorboard(False)
    """Log the global batch size to TensorBoard."""
    log_learning_rate_to_tensorboard: bool = _tensorboard(
        True, aliases=("no-log-learnig-rate-to-tensorboard",)
    )
    """`--no-log-learning-rate-to-tensorboard`: do not log the learning rate to TensorBoard."""
    log_loss_scale_to_tensorboard: bool = _tensorboard(True)
    """`--no-log-loss-scale-to-tensorboard`: do not log the loss scale to TensorBoard."""
    log_validation_ppl_to_tensorboard: bool = _tensorboard(False)
    """Log the validation perplexity to TensorBoard."""
    log_world_size_to_tensorboard: bool = _tensorboard(False)
    """Log the number of processes to TensorBoard."""
    log_memory_to_tensorboard: bool = _tensorboard(False)
    """Log device memory to TensorBoard."""
    log_dir: str | None = option_field(None, metavar="FOLDER", decides=Decides.RUN)
    """Folder for a log file of each rank (default: none)."""
    log_params_norm: bool = option_field(False)
    """Log the norm of all parameters to the console and TensorBoard."""
    log_num_zeros_in_grad: bool = option_field(False)
    """Log the number of zeros in the gradient of all parameters."""
    log_max_attention_logit: bool = option_field(False)
    """Log the largest attention logit, which needs a further product in every layer."""
    log_layer_norms_interval: int | None = option_field(None, minimum=1)
    """Number of iterations between norms of each layer: of its gradient, of its parameters, and of
    their update relative to them (default: none)."""
    record_every: int | None = option_field(
        None, minimum=1, only_with=when(save=ANY_VALUE, metrics_jsonl=ANY_VALUE)
    )
    """Number of iterations between records of a step with which tools/verify_run.py can check the
    run: hashes of its samples and random states, its loss, and norms of activations, weights and
    gradients (default: none)."""
    metrics_jsonl: str | None = option_field(None, metavar="FILE", decides=Decides.RUN)
    """File for metrics, one JSON record per step (default: metrics.jsonl in --save, if given)."""
    metrics_csv: str | None = option_field(None, metavar="FILE", decides=Decides.RUN)
    """File for metrics as a table, one row per step (default: none)."""
    wandb_project: str | None = option_field(None, metavar="NAME")
    """Project of Weights & Biases to log to (default: none)."""
    wandb_exp_name: str | None = option_field(
        None, metavar="NAME", only_with=when(wandb_project=ANY_VALUE), decides=Decides.RUN
    )
    """Name of the run in Weights & Biases (default: a random one)."""
    wandb_entity: str | None = option_field(
        None, metavar="NAME", only_with=when(wandb_project=ANY_VALUE)
    )
    """User or team of the project in Weights & Biases (default: as of wandb)."""
    wandb_save_dir: str | None = option_field(
        None, metavar="FOLDER", only_with=when(wandb_project=ANY_VALUE), decides=Decides.RUN
    )
    """Folder for the files of Weights & Biases (default: wandb in --save, if given)."""

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


_profile = functools.partial(option_field, only_with=when(profile=True))


@dataclass(frozen=True)
class ProfilingConfig:
    """Profiles of steps, times of their parts and comparison of the ranks."""

    DECIDES = Decides.OPERATION

    log_straggler: bool = option_field(
        False, only_with=Condition({"compile": (False,)}, without_flags=True)
    )
    """Log the times of the ranks without communication, and name the slowest ranks and hosts."""
    straggler_minmax_count: int = option_field(1, minimum=1, only_with=when(log_straggler=True))
    """Number of slowest ranks that --log-straggler names."""
    profile: bool = option_field(False)
    """Trace some steps with torch.profiler, and summarize their time and memory."""
    profile_step_start: int = _profile(10, minimum=0)
    """Iteration after which the profile begins."""
    profile_step_end: int = _profile(12, minimum=1)
    """Last iteration of the profile."""
    profile_ranks: tuple[int, ...] = _profile((0,), nargs="*", minimum=0)
    """Global ranks that are profiled."""
    profile_dir: str | None = _profile(None, metavar="FOLDER", decides=Decides.RUN)
    """Folder for profiles (default: profile in --tensorboard-dir or else in --save)."""
    timing_log_level: int = option_field(0, minimum=0, maximum=2)
    """Times in the log: of complete steps (0), also of passes, optimizer and communication (1),
    also of each kind of collective (2)."""
    timing_log_option: str = option_field(
        "minmax", choices=("max", "minmax", "all"), only_with=when(timing_log_level=NON_ZERO)
    )
    """Times of which ranks are logged: the largest, the smallest and the largest, or all."""

    @property
    def times_parts(self) -> bool:
        """Whether the step that ends a log interval is timed."""
        return self.timing_log_level > 0 or self.log_straggler

    def problems(self, world_size: int, *, has_folder: bool) -> Iterator[Problem]:
        """Settings that cannot be combined.

        Args:
            world_size: Number of processes.
            has_folder: Whether the run has a folder for checkpoints or for TensorBoard.
        """
        if not self.profile:
            return
        start = self.profile_step_start
        end = self.profile_step_end
        if start >= end:
            yield Problem("profile-without-steps", start=start, end=end)
        if not self.profile_ranks:
            yield Problem("profile-without-ranks")
        elif (unknown := max(self.profile_ranks)) >= world_size:
            yield Problem("profile-of-unknown-rank", rank=unknown, last=world_size - 1)
        if self.profile_dir is None and not has_folder:
            yield Problem("profile-without-folder")
        yield from folder_problems("profile_dir", self.profile_dir)


@dataclass(frozen=True)
class StoppingConfig:
    """Conditions that end a run early, after a save."""

    DECIDES = Decides.OPERATION

    exit_interval: int | None = option_field(None, minimum=1, zero_is_off=True)
    """Save and exit when the iteration is divisible by this value."""
    exit_duration_in_mins: float | None = option_field(None, above=0, zero_is_off=True)
    """Save and exit after this many minutes."""
    kill_switch_path: str | None = option_field(None, aliases=("kill-switch-file",), metavar="FILE")
    """Save and exit when this file exists."""


MODES = ("disabled", "validate_results", "report_stats")
DISABLED, VALIDATE_RESULTS, REPORT_STATS = MODES
ERRORS = ("transient_error", "persistent_error", "correct_result")
TRANSIENT, PERSISTENT, CORRECT = ERRORS

_validated = functools.partial(option_field, only_with=when(rerun_mode=(None, VALIDATE_RESULTS)))


@dataclass(frozen=True)
class RerunConfig:
    """What is repeated or compared to find a device, a rank or data that is at fault."""

    DECIDES = Decides.OPERATION

    rerun_mode: str | None = option_field(None, choices=MODES)
    """What to do with a step whose gradient is not finite or that is a spike: nothing else
    (disabled), or repeat it on the same and on exchanged ranks and say whether the data, the
    arithmetic or a device is the cause (validate_results). report_stats takes every step twice and
    prints how far the two differ (default: validate_results with --check-for-spiky-loss,
    --check-for-large-grads or --error-injection-rate, else disabled)."""
    check_for_spiky_loss: bool = _validated(False)
    """Also repeat a step whose loss is more than 10 times the largest one of the last 100 steps,
    once 10 are known; if the data is the cause, it is applied."""
    check_for_large_grads: bool = _validated(False)
    """The same for the gradient norm before clipping."""
    error_injection_rate: int = _validated(0, minimum=0)
    """N: make the gradient of one rank nan every N steps, to try out --rerun-mode; 0 for never."""
    error_injection_type: str = option_field(
        TRANSIENT, choices=ERRORS, only_with=when(error_injection_rate=NON_ZERO)
    )
    """In which attempts: in the first one only, in all on the same rank, or in all with the same
    samples."""
    check_weight_hash_across_dp_replicas_interval: int | None = option_field(
        None, minimum=1, zero_is_off=True, only_with=when(zero_stage=(None, 0, 1, 2))
    )
    """Number of iterations between comparisons of all ranks that have a copy of the same parameter,
    by a hash of each; a difference ends the run (status 8). At ZeRO stage 3 there are no replicas
    to compare (default: none)."""

    @property
    def mode(self) -> str:
        """The mode in effect: checks of a step imply that bad ones are repeated."""
        checks = self.check_for_spiky_loss or self.check_for_large_grads
        implied = VALIDATE_RESULTS if checks or self.error_injection_rate else DISABLED
        return implied if self.rerun_mode is None else self.rerun_mode

    @property
    def checked_values(self) -> tuple[bool, bool]:
        """Whether the loss and the gradient norm of each step are compared with earlier ones."""
        is_on = self.mode == VALIDATE_RESULTS
        return is_on and self.check_for_spiky_loss, is_on and self.check_for_large_grads
