"""Mistakes of a step of Adam, found from weights and moments before and after it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_ds.engine.states.state_reader import TensorReader
from megatron_ds.training.replay.diagnosis import (
    KINDS,
    Diagnosis,
    Finding,
    Limits,
    Step,
    fit_micro_batches,
)
from megatron_ds.training.replay.tensor_comparison import AdamStates, Results

SHAPES = {
    "embedding.word.weight": (24, 8),
    "layers.0.norm.weight": (8,),
    "layers.0.attention.qkv.weight": (24, 8),
    "layers.0.attention.qkv.bias": (24,),
    "layers.0.mlp.fc_in.weight": (32, 8),
    "layers.0.mlp.fc_in.bias": (32,),
    "final_norm.weight": (8,),
}
FIRST = "embedding.word.weight"
MLP = "layers.0.mlp.fc_in.weight"
BETAS = (0.9, 0.95)
CLIP = 0.5
DECAY = 0.1
COUNT = 4
"""Micro-batches of the step."""
BEFORE = 10
"""Steps of the optimizer before."""
RATES = {number: 1e-3 * math.cos(0.1 * number) for number in range(8, 14)}
Tensors = dict[str, Tensor]


@dataclass
class AdamStep:
    """A step of AdamW, plainly; a mistake replaces an attribute or a method."""

    weights: Tensors
    exp_avg: Tensors
    exp_avg_sq: Tensors
    parts: Sequence[Tensors]
    """Gradient of each micro-batch."""
    shares: Sequence[float] = (0.25, 0.25, 0.25, 0.25)
    clip: float = CLIP
    rate: float = RATES[BEFORE + 1]
    count: int = BEFORE + 1
    decays: Callable[[str], float] = lambda name: 0.0 if "norm" in name or "bias" in name else DECAY
    change_gradient: Callable[[str, Tensor], Tensor] = lambda name, value: value
    change_result: Callable[[AdamStep, Mapping[str, Tensors]], object] = lambda step, result: None
    norm: float = field(default=0.0, init=False)

    def take(self) -> dict[str, Tensors]:
        """The weights and moments after it."""
        gradients = {
            name: self.change_gradient(
                name,
                sum(
                    (
                        share * part[name]
                        for share, part in zip(self.shares, self.parts, strict=True)
                    ),
                    torch.zeros_like(weight),
                ),
            )
            for name, weight in self.weights.items()
        }
        self.norm = math.hypot(*(float(value.norm()) for value in gradients.values()))
        factor = min(1.0, self.clip / self.norm) if self.clip else 1.0
        result: dict[str, Tensors] = {"weights": {}, "exp_avg": {}, "exp_avg_sq": {}}
        for name, weight in self.weights.items():
            gradient = gradients[name] * factor
            first = BETAS[0] * self.exp_avg[name] + (1 - BETAS[0]) * gradient
            second = BETAS[1] * self.exp_avg_sq[name] + (1 - BETAS[1]) * gradient.square()
            corrected = (second / (1 - BETAS[1] ** self.count)).sqrt() + 1e-8
            update = first / (1 - BETAS[0] ** self.count) / corrected
            result["exp_avg"][name] = first
            result["exp_avg_sq"][name] = second
            result["weights"][name] = weight - self.rate * (update + self.decays(name) * weight)
        self.change_result(self, result)
        return result


def draw(*, scale: float = 1.0, seed: int) -> Tensors:
    """Tensors of all shapes with normal numbers."""
    generator = torch.Generator().manual_seed(seed)
    return {name: scale * torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def correct_step() -> AdamStep:
    return AdamStep(
        weights={name: value + ("norm" in name) for name, value in draw(seed=0).items()},
        exp_avg=draw(scale=0.01, seed=1),
        exp_avg_sq={name: value.square() for name, value in draw(scale=0.02, seed=2).items()},
        parts=[draw(scale=0.1, seed=3 + number) for number in range(COUNT)],
    )


def states(tensors: Mapping[str, Tensors]) -> AdamStates:
    tables = (
        {name: TensorReader.of(value) for name, value in tensors[key].items()}
        for key in ("weights", "exp_avg", "exp_avg_sq")
    )
    return AdamStates(*tables)


def diagnose(**mistake: Any) -> Finding | None:
    """What is found in a step with a mistake."""
    correct = correct_step()
    expected = correct.take()
    run = replace(correct, **mistake).take()
    results = Results(
        before=states(vars(correct)),
        run=states(run),
        expected=states(expected),
        steps=1,
        betas=BETAS,
        lr=correct.rate,
    )
    parts = [
        {name: TensorReader.of(value) for name, value in part.items()} for part in correct.parts
    ]
    step = Step(
        norm=correct.norm,
        clip=CLIP,
        applied=BEFORE,
        rates=RATES,
        iteration=BEFORE + 1,
        parts=lambda: parts,
    )
    return Diagnosis(results, step, Limits(1e-3, 1e-3)).find()


def keep(key: str, *names: str) -> Callable[[AdamStep, Mapping[str, Tensors]], object]:
    """Leaves a moment of some tensors, or of all, as it was before the step."""

    def change(step: AdamStep, result: Mapping[str, Tensors]) -> None:
        for name in names or SHAPES:
            result[key][name] = getattr(step, key)[name]

    return change


def swap(step: AdamStep, result: Mapping[str, Tensors]) -> None:
    """Swaps two of four slices of a weight and its moments."""
    for tensors in result.values():
        slices = tensors[MLP].chunk(4)
        tensors[MLP] = torch.cat([slices[0], slices[2], slices[1], slices[3]])


def on(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[str, Tensor], Tensor]:
    """Changes the gradient of one tensor."""
    return lambda key, value: change(value) if key == name else value


def everywhere(name: str) -> float:
    return DECAY


def test_equal_steps() -> None:
    assert diagnose() is None


@pytest.mark.parametrize(
    ("mistake", "kind", "name", "words"),
    [
        ({"decays": everywhere}, "weight decay", "layers.0.norm.weight", "by 0.1 more"),
        ({"decays": lambda name: 0.0}, "weight decay", FIRST, "by 0.1 less"),
        ({"shares": (0.25, 0.25, 0, 0.25)}, "data", FIRST, "of 4 micro-batches, 3 did not"),
        (
            {"shares": (0.4, 0.2, 0.2, 0.2), "clip": 0},
            "data",
            FIRST,
            "weights of 0.4, 0.2, 0.2, 0.2 in the mean, expected are 0.25",
        ),
        ({"parts": [draw(scale=0.1, seed=50 + x) for x in range(4)]}, "data", FIRST, "nor a mean"),
        ({"clip": 0}, "clipping", FIRST, "was not clipped to a norm of 0.5"),
        ({"clip": 2 * CLIP}, "clipping", FIRST, "its norm after clipping is 1, not 0.5"),
        (
            {"change_gradient": on(MLP, lambda value: 2 * value)},
            "gradient",
            MLP,
            "is 2 times the expected",
        ),
        (
            {"change_gradient": on(MLP, lambda value: value.roll(16, 0))},
            "rank",
            MLP,
            "gradient: of 2 slices along dimension 0, 0 has that of 1, 1 has that of 0",
        ),
        ({"change_result": swap}, "rank", MLP, "of 4 slices along dimension 0, 1 has that of 2"),
        ({"change_result": keep("exp_avg", MLP)}, "moments", MLP, "did not enter it"),
        ({"change_result": keep("exp_avg_sq", MLP)}, "moments", MLP, "exp_avg_sq is that of"),
        ({"change_result": keep("exp_avg")}, "moments", FIRST, "did not enter it"),
        ({"exp_avg": draw(scale=0, seed=0)}, "moments", FIRST, "from empty moments"),
        ({"exp_avg": draw(scale=0.01, seed=9)}, "moments", FIRST, "contradicts exp_avg_sq"),
        ({"count": 1}, "moments", FIRST, "had counted other steps"),
        ({"count": BEFORE}, "moments", FIRST, "had counted other steps"),
        ({"rate": RATES[BEFORE]}, "schedule", FIRST, "that of iteration 10"),
        ({"rate": 2 * RATES[11]}, "schedule", FIRST, "the learning rate is 0.00090719"),
    ],
)
def test_a_mistake_is_named(mistake: dict[str, Any], kind: str, name: str, words: str) -> None:
    found = diagnose(**mistake)
    assert found is not None
    assert (found.kind, found.name) == (kind, name), found
    assert words in found.text
    assert kind in KINDS


def test_rounding_is_no_mistake() -> None:
    """A sum in another order, which is what another layout gives."""
    noise = draw(seed=77)
    found = diagnose(change_gradient=lambda name, value: value * (1 + 1e-6 * noise[name]))
    assert found is None


def test_weights_of_micro_batches() -> None:
    parts = [draw(seed=seed) for seed in range(3)]
    readers = [{name: TensorReader.of(value) for name, value in part.items()} for part in parts]
    wanted = (0.5, 0.0, 2.0)

    def gradient(name: str) -> Tensor:
        return sum(
            (share * part[name].double() for share, part in zip(wanted, parts, strict=True)),
            torch.zeros(SHAPES[name], dtype=torch.float64),
        )

    weights, rest = fit_micro_batches(gradient, readers, list(SHAPES))
    assert weights == pytest.approx(wanted, abs=1e-7)
    assert rest < 1e-6
