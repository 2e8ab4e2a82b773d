"""The states with which Megatron continues a run with Adam."""

from __future__ import annotations

import dataclasses

import torch

from megatron_ds.config.problems import user_error
from megatron_ds.conversion.megatron.optimizer import MOMENTS
from megatron_ds.conversion.source import ADAM_SETTINGS, SourceCheckpoint
from megatron_ds.engine.states.state_reader import MASTER


def with_training(source: SourceCheckpoint) -> SourceCheckpoint:
    """A source with the states of the run that saved it, in fp32.

    Args:
        source: A checkpoint of this program or of Megatron, opened with its optimizer states.

    Raises:
        UserError: If it has no states, or not those of Adam.
    """
    run, reason = source.run, source.unread
    if not reason and run is not None:
        is_known = run.arguments.keys() >= {*ADAM_SETTINGS}
        if run.steps is None or run.consumed_samples is None or not is_known:
            reason = "counters or settings of the optimizer are missing"
    if reason or run is None:
        raise user_error("conversion-without-states", path=source.path, reason=reason)
    optimizer = {
        kind: {name: each.to(torch.float32) for name, each in tensors.items()}
        for kind, tensors in source.optimizer.items()
        if kind in (*MOMENTS, MASTER)
    }
    complete = dataclasses.replace(
        source,
        optimizer=optimizer,
        tensors=optimizer.get(MASTER, source.tensors),
        run=dataclasses.replace(run, softmax_rows=source.rows),
    )
    return complete.checked().to(source.dtype)
