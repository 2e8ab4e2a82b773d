"""Console lines, which scripts grep, character by character."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from megatron_ds.training.loggers import Console, evaluation_block, interval_line
from megatron_ds.training.records import EvalRecord, IntervalRecord

Interval = Callable[..., IntervalRecord]


def full(interval: Interval) -> IntervalRecord:
    """An interval with every field."""
    record = interval(12, params_norm=77.5, skipped=1, nan=2)
    last = dataclasses.replace(record.last, loss_scale=65536.0, curriculum_seqlen=64)
    return dataclasses.replace(record, last=last)


def test_interval_line_has_the_format_of_megatron(interval: Interval) -> None:
    assert interval_line(full(interval)) == (
        " iteration       12/     100 | consumed samples:           48 |"
        " consumed tokens:          384 | elapsed time per iteration (s): 0.50 |"
        " learning rate: 1.000E-03 | global batch size:     4 | lm loss: 5.250000E+00 |"
        " loss scale: 65536.0 | grad norm: 1.500 | params norm: 77.500 | curriculum seqlen:    64 |"
        " number of skipped iterations:   1 | number of nan iterations:   2 |"
        " samples per second: 8.000 | tokens per gpu per second (tgs): 32.000 | TFLOPs: 0.25 |"
    )


def test_unknown_fields_are_left_out(interval: Interval) -> None:
    record = interval(
        1,
        lm_loss=None,
        samples_per_second=None,
        tokens_per_second_per_device=None,
        tflops=None,
    )
    line = interval_line(
        dataclasses.replace(record, last=dataclasses.replace(record.last, grad_norm=None))
    )
    known = ("lm loss", "loss scale", "grad norm", "params norm", "per second", "(tgs)", "TFLOPs")
    for field in (*known, "seqlen"):
        assert field not in line


def test_zeros_are_shown(interval: Interval) -> None:
    record = interval(1, lm_loss=0.0, params_norm=0.0)
    line = interval_line(
        dataclasses.replace(record, last=dataclasses.replace(record.last, grad_norm=0.0))
    )
    for field in ("lm loss: 0.0", "grad norm: 0.0", "params norm: 0.0"):
        assert field in line


def test_a_nonfinite_loss_is_shown(interval: Interval) -> None:
    assert "| lm loss: NAN |" in interval_line(interval(1, lm_loss=float("nan")))


def test_further_metrics_are_shown_under_their_names(interval: Interval) -> None:
    line = interval_line(interval(1, params_norm=1.0, extras={"aux loss": 0.25, "z-loss": 2.0}))
    assert " params norm: 1.000 | aux loss: 2.500000E-01 | z-loss: 2.000000E+00 | number" in line


def test_the_document_lists_the_fields_in_order(
    interval: Interval, documented: Callable[[str], list[list[str]]]
) -> None:
    fields = interval_line(full(interval)).strip(" |").split(" | ")
    names = [field.split(":")[0] if ":" in field else field.split()[0] for field in fields]
    assert names == [row[0] for row in documented("The training line")]


def test_evaluation_block_has_the_format_of_megatron(evaluation: Callable[..., EvalRecord]) -> None:
    first, text, last = evaluation_block(evaluation(7)).split("\n")
    assert text == (
        " validation loss at iteration 7 | lm loss value: 2.000000E+00 | "
        "lm loss PPL: 7.389056E+00 | "
    )
    assert first == last == "-" * (len(text) + 1)


@pytest.mark.parametrize("split", ["validation", "test"])
def test_the_name_of_a_dataset_replaces_the_split(
    split: str, evaluation: Callable[..., EvalRecord]
) -> None:
    first, text, last = evaluation_block(evaluation(7, split, "VALID 1")).split("\n")
    assert text == (
        "VALID 1 loss at iteration 7 | lm loss value: 2.000000E+00 | lm loss PPL: 7.389056E+00 | "
    )
    assert first == last == "-" * (len(text) + 1)


def test_the_console_writes_intervals_and_evaluations(
    interval: Interval, evaluation: Callable[..., EvalRecord]
) -> None:
    lines: list[str] = []
    console = Console(lines.append)
    console.log_steps([interval(1).last])
    console.log_interval(interval(1))
    console.log_eval(evaluation(1))
    assert lines == [interval_line(interval(1)), evaluation_block(evaluation(1))]
