#!/usr/bin/env python
"""Trains a GPT-2 of PyTorch or transformers, compiled as a whole, in a bare loop with a meter.

bare_loop.py REPORT WARM_UP TIMED SIZE MICRO_BATCH {plain,transformers}
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from benchmarks.accelerator.meter import Meter
from benchmarks.accelerator.models import SIZES, GptSize
from benchmarks.common import write_json
from benchmarks.plain_gpt2 import GPT2, training_step


def main() -> None:
    report, warm_up, timed, size_name, micro_batch, kind = sys.argv[1:]
    size = SIZES[size_name]
    device = _device()
    torch.manual_seed(1234)
    with device:
        model, loss_of = _plain(size) if kind == "plain" else _transformers(size)
    step = training_step(
        model,
        torch.compile(loss_of),
        device=device,
        dtype="bf16",
        lr=1e-4,
        betas=(0.9, 0.95),
        weight_decay=0.1,
        clip=1.0,
    )
    meter = Meter(device, int(warm_up), int(timed))
    ids = torch.randint(
        size.vocab, (meter.total, int(micro_batch), size.sequence + 1), device=device
    )
    for row in ids:
        tokens = row[:, :-1]
        labels = row[:, 1:].contiguous()
        meter.step(lambda tokens=tokens, labels=labels: step(tokens, labels))  # type: ignore[misc]
    write_json(Path(report), meter.report())


def _device() -> torch.device:
    """The accelerator; the CPU if there is none, or if DS_ACCELERATOR asks for it."""
    if os.environ.get("DS_ACCELERATOR") == "cpu" or not torch.accelerator.is_available():
        return torch.device("cpu")
    return torch.accelerator.current_accelerator() or torch.device("cpu")


def _plain(size: GptSize) -> tuple[Any, Any]:
    # 64 divides the padded vocabulary, as in the default command.
    vocab = -(-size.vocab // 64) * 64
    model = GPT2(size.layers, size.hidden, size.heads, size.sequence, vocab)
    return model, model


def _transformers(size: GptSize) -> tuple[Any, Any]:
    from benchmarks.train_step import Shape, transformers_gpt2, transformers_loss

    shape = Shape(size.layers, size.hidden, size.heads, size.sequence, -(-size.vocab // 64) * 64, 1)
    model = transformers_gpt2(shape)
    return model, lambda tokens, labels: transformers_loss(model, tokens, labels)


if __name__ == "__main__":
    main()
