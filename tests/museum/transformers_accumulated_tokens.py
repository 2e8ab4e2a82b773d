"""A step over rows of 2 and 14 counted tokens, at once and as two micro-batches."""

import torch
from frame import verdict
from helpers import trainer


def row(counted: int) -> dict[str, torch.Tensor]:
    tokens = torch.arange(1, 17)
    labels = tokens.clone()
    labels[counted + 1 :] = -100
    return {"input_ids": tokens, "labels": labels}


if __name__ == "__main__":
    rows = [row(2), row(14)]
    (loss, gradient), (other, parted) = (trainer.step(rows, count) for count in (1, 2))
    difference = ((parted - gradient).norm() / gradient.norm()).item()
    figures = f"loss {other:.4f} in two micro-batches, {loss:.4f} in one"
    verdict(difference > 1e-3, f"{figures}; gradients differ by {difference:.0%}")
