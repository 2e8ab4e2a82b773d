"""The console's lines, with the fields, order and number formats of Megatron-LM and its forks, or
short.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta

from megatron_ds.config import Config, ProfilingConfig
from megatron_ds.training.profile.stragglers import straggler_lines
from megatron_ds.training.records import (
    EvalRecord,
    IntervalRecord,
    Logger,
    TaskRecord,
    metric_title,
)

NUM_ZEROS = "num_zeros_in_grad"
"""Metric of --log-num-zeros-in-grad."""


def interval_line(record: IntervalRecord) -> str:
    """The training line of a log interval, without unknown fields."""
    last = record.last
    fields = [
        f"iteration {last.iteration:8d}/{record.total_iterations:8d}",
        f"consumed samples: {last.consumed_samples:12d}",
        f"consumed tokens: {last.consumed_tokens:12d}",
        f"elapsed time per iteration (s): {record.seconds_per_iteration:.2f}",
        f"learning rate: {last.learning_rate:.3E}",
        f"global batch size: {last.global_batch_size:5d}",
        record.lm_loss is not None and f"lm loss: {record.lm_loss:.6E}",
        last.loss_scale is not None and f"loss scale: {last.loss_scale:.1f}",
        last.grad_norm is not None and f"grad norm: {last.grad_norm:.3f}",
        NUM_ZEROS in last.extras and f"num zeros: {last.extras[NUM_ZEROS]:.1f}",
        record.params_norm is not None and f"params norm: {record.params_norm:.3f}",
        last.curriculum_seqlen is not None and f"curriculum seqlen: {last.curriculum_seqlen:5d}",
        # Metrics of a series, such as one of each expert, are in the files only.
        *(
            f"{name}: {value:.6E}"
            for name, value in record.extras.items()
            if "/" not in name and name != NUM_ZEROS
        ),
        f"number of skipped iterations: {record.skipped:3d}",
        f"number of nan iterations: {record.nan:3d}",
        record.samples_per_second is not None
        and f"samples per second: {record.samples_per_second:.3f}",
        record.tokens_per_second_per_device is not None
        and f"tokens per gpu per second (tgs): {record.tokens_per_second_per_device:.3f}",
        record.tflops is not None and f"TFLOPs: {record.tflops:.2f}",
        record.seconds_left is not None and f"time left: {_duration(record.seconds_left)}",
    ]
    return "".join(f" {field} |" for field in fields if field)


def short_interval_line(record: IntervalRecord) -> str:
    """The training line in the short form. Fields of rare events are shown if there are any."""
    last = record.last
    fields = [
        f"loss {'-' if record.lm_loss is None else format(record.lm_loss, '.4f'):>7}",
        f"rate {last.learning_rate:.2e}",
        last.grad_norm is not None and f"grad norm {last.grad_norm:.3f}",
        record.params_norm is not None and f"params norm {record.params_norm:.3f}",
        record.skipped and f"{record.skipped} skipped",
        record.nan and f"{record.nan} nan",
        record.tokens_per_second is not None and f"{record.tokens_per_second:,.0f} tokens/s",
        record.seconds_left is not None and f"{_duration(record.seconds_left)} left",
    ]
    progress = f"{last.iteration:{len(str(record.total_iterations))}}/{record.total_iterations}"
    return " | ".join([f" {'iteration':10} {progress}", *(field for field in fields if field)])


def _duration(seconds: float) -> str:
    """Hours, minutes and seconds, with days before them if there are any."""
    return str(timedelta(seconds=round(seconds)))


def evaluation_block(record: EvalRecord) -> str:
    """The three lines of an evaluation.

    As in Megatron, the test split is called "validation", too, and the name of a dataset replaces
    " validation" with its leading space.
    """
    text = (
        f"{record.group or ' validation'} loss at {record.label} | "
        f"lm loss value: {record.loss:.6E} | lm loss PPL: {record.ppl:.6E} | "
    )
    for name, value in record.extras.items():
        text += f"{metric_title(name)}: {value:.6E} | "
    dashes = "-" * (len(text) + 1)
    return f"{dashes}\n{text}\n{dashes}"


def short_evaluation_line(record: EvalRecord, total_iterations: int) -> str:
    """Evaluation line of the short log; the loss is aligned with the training lines."""
    progress = f"{record.iteration:{len(str(total_iterations))}}/{total_iterations}"
    fields = [f" {record.split:10} {progress}", f"loss {record.loss:7.4f}"]
    fields.append(f"perplexity {record.ppl:,.2f}")
    fields += [f"{metric_title(name)} {value:.4f}" for name, value in record.extras.items()]
    return " | ".join([*fields, *filter(None, [record.group])])


def times_block(times: Mapping[str, Sequence[float]], option: str) -> str:
    """The lines of --timing-log-level, as Megatron prints them.

    Args:
        times: Milliseconds of the ranks, by name.
        option: Value of --timing-log-option.
    """
    if option == "all":
        lines = ["times across ranks (ms):"]
        for name, values in times.items():
            lines.append(f"  {name}:")
            padded = (f"{f'rank {n:2d} '.ljust(48, '.')}: {ms:.2f}" for n, ms in enumerate(values))
            lines += [f"     {line}" for line in padded]
        return "\n".join(lines)
    shown = {
        name: f"{max(values):.2f}" if option == "max" else f"({min(values):.2f}, {max(values):.2f})"
        for name, values in times.items()
    }
    head = "max" if option == "max" else "(min, max)"
    lines = [f"    {(name + ' ').ljust(48, '.')}: {text}" for name, text in shown.items()]
    return "\n".join([f"{head} time across ranks (ms):", *lines])


Times = Mapping[str, Sequence[float]]
Details = Callable[[Times], Iterable[str]]


def no_details(times: Times) -> Iterable[str]:
    """No lines about the times of the ranks."""
    return ()


def time_details(options: ProfilingConfig, hosts: Sequence[str], times: Times) -> Iterator[str]:
    """The lines of --timing-log-level and of --log-straggler.

    Args:
        options: Options of the log.
        hosts: Names of the hosts, by rank.
        times: Milliseconds of the ranks, by name; empty if no times were measured.
    """
    if times and options.timing_log_level > 0:
        yield times_block(times, options.timing_log_option)
    if options.log_straggler:
        yield from straggler_lines(times, hosts, options.straggler_minmax_count)


class Console(Logger):
    """Passes lines to a function that prints and flushes them.

    Args:
        write: Prints a line and flushes it.
        details: The lines about the times of the ranks.
    """

    line = staticmethod(interval_line)

    def __init__(self, write: Callable[[str], object], details: Details = no_details) -> None:
        self._write = write
        self._details = details

    def log_interval(self, record: IntervalRecord) -> None:
        self._write(self.line(record))
        for text in self._details(record.times):
            self._write(text)

    def log_eval(self, record: EvalRecord) -> None:
        self._write(evaluation_block(record))

    def log_task(self, record: TaskRecord) -> None:
        values = (f"{name}: {value:.6E}" for name, value in record.metrics.items())
        title = f"{record.task} at iteration {record.iteration}"
        self._write("".join(f" {field} |" for field in (title, *values)))


class ShortConsole(Console):
    """A `Console` with short lines.

    Args:
        write: Prints a line and flushes it.
        total_iterations: Iterations of the run.
        details: The lines about the times of the ranks.
    """

    line = staticmethod(short_interval_line)

    def __init__(
        self, write: Callable[[str], object], total_iterations: int, details: Details = no_details
    ) -> None:
        super().__init__(write, details)
        self._total = total_iterations
        self._evaluated: set[tuple[str, str, int]] = set()

    def log_eval(self, record: EvalRecord) -> None:
        key = record.split, record.group, record.iteration
        if key not in self._evaluated:  # the end of a run repeats the last validation
            self._evaluated.add(key)
            self._write(short_evaluation_line(record, self._total))

    def log_task(self, record: TaskRecord) -> None:
        progress = f"{record.iteration:{len(str(self._total))}}/{self._total}"
        values = (f"{name} {value:.4f}" for name, value in record.metrics.items())
        self._write(" | ".join([f" {record.task:10} {progress}", *values]))


def is_short(config: Config) -> bool:
    """Whether this process prints the short form of the log, see --log-format."""
    form = config.logging.log_format
    return form == "short" or (form == "auto" and sys.stdout.isatty())
