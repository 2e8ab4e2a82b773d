"""Trains GPT-2 in plain PyTorch with nanoGPT's settings, for `convergence.py`.

AdamW with decay of matrices alone, a cosine after a linear warm-up, clipping at 1, and samples from
random places of the token stream. Knows neither megatron_ds nor DeepSpeed.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.convergence import BATCH, HEADS, HIDDEN, LAYERS, SEQUENCE, VOCAB, WARM_UP
from benchmarks.plain_gpt2 import GPT2

RATE = 1.5e-3
LOWEST = 1.5e-4


def rate(step: int, iterations: int) -> float:
    """The learning rate of a step, counted from 0."""
    warm_up = round(WARM_UP * iterations)
    if step < warm_up:
        return RATE * (step + 1) / (warm_up + 1)
    share = (step - warm_up) / (iterations - warm_up)
    return LOWEST + 0.5 * (1 + math.cos(math.pi * share)) * (RATE - LOWEST)


def train(folder: Path, seed: int, iterations: int, output: Path) -> None:
    """Train, and write the loss on the held-out text and the curve to a file."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    tokens, held_out = (
        torch.from_numpy(np.fromfile(folder / f"{name}_text_document.bin", np.uint16).astype(int))
        for name in ("train", "valid")
    )
    model = GPT2(LAYERS, HIDDEN, HEADS, SEQUENCE, VOCAB)
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True)
    interval = max(1, iterations // 30)
    recent = []
    curve = []
    for step in range(iterations):
        for group in optimizer.param_groups:
            group["lr"] = rate(step, iterations)
        starts = torch.randint(len(tokens) - SEQUENCE - 1, (BATCH,))
        samples = torch.stack([tokens[start : start + SEQUENCE + 1] for start in starts])
        loss = model(samples[:, :-1], samples[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        recent.append(loss.item())
        if (step + 1) % interval == 0:
            curve.append((step + 1, sum(recent) / len(recent)))
            recent.clear()
    total = 0
    count = 0
    with torch.no_grad():
        for start in range(0, len(held_out) - 1, SEQUENCE):
            sample = held_out[None, start : start + SEQUENCE + 1]
            targets = sample.shape[1] - 1
            total += targets * model(sample[:, :-1], sample[:, 1:]).item()
            count += targets
    output.write_text(json.dumps({"loss": total / count, "curve": curve}), encoding="utf-8")


if __name__ == "__main__":
    train(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
