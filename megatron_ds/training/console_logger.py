"""Console lines with the fields, order and number formats of Megatron-LM and its forks.

Knows records and text, and nothing about how the numbers are measured.
"""

from __future__ import annotations

from collections.abc import Callable

from megatron_ds.training.records import EvalRecord, IntervalRecord, Logger


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
        record.params_norm is not None and f"params norm: {record.params_norm:.3f}",
        last.curriculum_seqlen is not None and f"curriculum seqlen: {last.curriculum_seqlen:5d}",
        *(f"{name}: {value:.6E}" for name, value in record.extras.items()),
        f"number of skipped iterations: {record.skipped:3d}",
        f"number of nan iterations: {record.nan:3d}",
        record.samples_per_second is not None
        and f"samples per second: {record.samples_per_second:.3f}",
        record.tokens_per_second_per_device is not None
        and f"tokens per gpu per second (tgs): {record.tokens_per_second_per_device:.3f}",
        record.tflops is not None and f"TFLOPs: {record.tflops:.2f}",
    ]
    return "".join(f" {field} |" for field in fields if field)


def evaluation_block(record: EvalRecord) -> str:
    """The three lines of an evaluation.

    As in Megatron, the test split is called "validation", too, and the name of a dataset replaces
    " validation" with its leading space.
    """
    text = (
        f"{record.group or ' validation'} loss at {record.label} | "
        f"lm loss value: {record.loss:.6E} | lm loss PPL: {record.ppl:.6E} | "
    )
    dashes = "-" * (len(text) + 1)
    return f"{dashes}\n{text}\n{dashes}"


class Console(Logger):
    """Passes lines to a function that prints and flushes them."""

    def __init__(self, write: Callable[[str], object]) -> None:
        self._write = write

    def log_interval(self, record: IntervalRecord) -> None:
        self._write(interval_line(record))

    def log_eval(self, record: EvalRecord) -> None:
        self._write(evaluation_block(record))
