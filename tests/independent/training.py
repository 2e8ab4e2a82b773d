"""The steps of a run: batch sizes, learning rates, gradients, clipping and AdamW, in fp64.

Imports nothing of the package. One micro-batch after the other and one process: how a layout
distributes them must not matter.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.dense_gpt import no_dropout
from tests.independent.model import Loss, Options, Weights, complete, loss_of
from tests.independent.token_order import Tokens

Dropouts = Callable[[int, int], Callable[[Tensor, str], Tensor]]
"""dropout(step, micro-batch), both from 0: what `loss_of` calls at each place."""


@dataclass(frozen=True)
class Step:
    """What a run logs of a step, and what decides whether the comparison means something."""

    lm_loss: float
    grad_norm: float
    learning_rate: float
    global_batch_size: int
    token_drop_rate: float
    gap: float
    validation_loss: float | None
    """Of the weights after the step, where there is an evaluation."""


def batch_sizes(options: Options) -> Iterator[int]:
    """Of each step: constant, or Megatron's ramp-up over the samples."""
    final = options["global_batch_size"]
    consumed = 0
    if "train_iters" in options:
        yield from [final] * options["train_iters"]
        return
    start, increment, over = options.get("rampup_batch_size", (final, 1, 0))
    while True:
        size = final
        if consumed < over:
            levels = (final - start) // increment
            size = start + increment * int(consumed / (over / levels))
        if consumed + size > options["train_samples"]:
            return
        yield size
        consumed += size


def learning_rate(options: Options, consumed: int) -> float:
    """Megatron's rate of the step after so many samples."""
    peak = options["lr"]
    floor = options.get("min_lr", 0.0)
    end = options.get("train_samples") or options["train_iters"] * options["global_batch_size"]
    warmup = options.get("lr_warmup_samples", 0)
    if warmup and consumed <= warmup:
        return float(peak * consumed / warmup)
    style = options.get("lr_decay_style", "linear")
    if style == "inverse-square-root":
        return max(floor, peak * math.sqrt(max(warmup, 1)) / math.sqrt(max(consumed, 1)))
    progress = (consumed - warmup) / (end - warmup)
    factor = {
        "constant": 1.0,
        "linear": 1.0 - progress,
        "cosine": 0.5 * (math.cos(math.pi * progress) + 1.0),
    }[style]
    return float(floor + factor * (peak - floor)) if style != "constant" else float(peak)


class AdamW:
    """Loshchilov and Hutter 2019; weights of norms and all biases do not decay."""

    def __init__(self, options: Options, weights: Weights) -> None:
        self._weights = weights
        self._steps = 0
        self._decay = options.get("weight_decay", 0.01)
        self._betas = options.get("adam_beta1", 0.9), options.get("adam_beta2", 0.999)
        self._eps = options.get("adam_eps", 1e-8)
        self._moments = {n: [torch.zeros_like(w), torch.zeros_like(w)] for n, w in weights.items()}

    @torch.no_grad()
    def step(self, gradients: Weights, lr: float) -> None:
        self._steps += 1
        beta1, beta2 = self._betas
        for name, weight in self._weights.items():
            first, second = self._moments[name]
            first.mul_(beta1).add_(gradients[name], alpha=1 - beta1)
            second.mul_(beta2).add_(gradients[name].square(), alpha=1 - beta2)
            mean = first / (1 - beta1**self._steps)
            root = (second / (1 - beta2**self._steps)).sqrt()
            if not name.endswith((".bias", "norm.weight")):
                weight.mul_(1 - lr * self._decay)
            weight.sub_(lr * mean / (root + self._eps))


def mean_loss(options: Options, parts: Sequence[Loss], name: str = "total") -> Tensor:
    """Over the micro-batches, or over all counted tokens; of another sum by its name."""
    return mean_of(options, [(getattr(part, name), part.tokens) for part in parts])


def further_loss(options: Options, parts: Sequence[Loss]) -> Tensor:
    """Mean loss of the further tokens that are predicted, with its factor."""
    depths = [mean_of(options, pairs) for pairs in zip(*(p.further for p in parts), strict=True)]
    factor: float = complete(options).mtp_loss_scaling_factor
    return factor * torch.stack(depths).mean() if depths else torch.zeros(())


def mean_of(options: Options, pairs: Sequence[tuple[Tensor, int]]) -> Tensor:
    """The mean of sums over micro-batches, each with the number of its tokens."""
    sums, counts = zip(*pairs, strict=True)
    if complete(options).calculate_per_token_loss:
        return sum_of(sums) / sum(counts)
    return sum_of(map(operator.truediv, sums, (max(count, 1) for count in counts))) / len(pairs)


def sum_of(values: Iterable[Tensor]) -> Tensor:
    return torch.stack(list(values)).sum()


def train(
    options: Options,
    initial: Weights,
    samples: Tokens,
    validation: Tokens | None = None,
    dropouts: Dropouts = lambda step, micro_batch: no_dropout,
) -> list[Step]:
    """Trains on samples [run, S + 1] in their order.

    Args:
        options: Of the model and the run.
        initial: Weights.
        samples: Of the training.
        validation: The samples of each evaluation. None: there is none.
        dropouts: Applies dropout.
    """
    sizes = list(batch_sizes(options))
    every = options.get("eval_interval", 1000)
    is_evaluated = [step % every == 0 or step == len(sizes) for step in range(1, len(sizes) + 1)]
    weights = {name: value.double().requires_grad_() for name, value in initial.items()}
    optimizer = AdamW(options, weights)
    clip = options.get("clip_grad", 1.0)
    steps = []
    consumed = 0
    for step, size in enumerate(sizes):
        batch = torch.from_numpy(samples[consumed : consumed + size])
        parts = [
            loss_of(options, weights, part, dropouts(step, number))
            for number, part in enumerate(batch.split(options["micro_batch_size"]))
        ]
        loss = mean_loss(options, parts)
        auxiliary = sum_of(part.auxiliary for part in parts) / len(parts)
        auxiliary = auxiliary + mean_loss(options, parts, "z_total")
        auxiliary = auxiliary + further_loss(options, parts)
        found = torch.autograd.grad(loss + auxiliary, list(weights.values()), allow_unused=True)
        gradients = {
            name: torch.zeros_like(weights[name]) if gradient is None else gradient
            for name, gradient in zip(weights, found, strict=True)
        }
        norm = math.sqrt(sum(float(g.square().sum()) for g in gradients.values()))
        if clip and norm > clip:
            gradients = {name: g * (clip / norm) for name, g in gradients.items()}
        rate = learning_rate(options, consumed)
        optimizer.step(gradients, rate)
        dropped = sum(part.dropped for part in parts) / max(1, sum(p.assignments for p in parts))
        gap = min(part.gap for part in parts)
        evaluated = None
        if validation is not None and is_evaluated[step]:
            micro_batches = torch.from_numpy(validation).split(options["micro_batch_size"])
            with torch.no_grad():
                parts = [loss_of(options, weights, part) for part in micro_batches]
                evaluated = float(mean_loss(options, parts))
        steps.append(Step(float(loss.detach()), norm, rate, size, dropped, gap, evaluated))
        consumed += size
    return steps
