"""AdamW on weights and moments in bf16, with stochastic rounding."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_ds.config.devices import is_host
from megatron_ds.config.problems import Problem
from megatron_ds.engine.optimizers.adamw import CHUNK
from megatron_ds.engine.optimizers.rounding import (
    LOW_HALF,
    Block,
    as_int32,
    halves,
    is_paired,
    joined,
    key_of,
    random_bits,
    round_stochastically,
    round_to_nearest,
)
from megatron_ds.model.kernels.elementwise import TOLERANCE, largest_error

HOST_CHUNK = 2**16
"""Elements that are updated at once on a host, whose caches then have all temporary tensors."""
Update = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], None]


def update(
    weights: Tensor,
    gradient: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    location: Tensor,
    settings: Tensor,
) -> None:
    """Step a block of weights, in fp32.

    The tensors are bf16 viewed as int32, two numbers in each: loops over numbers of one size are
    those that torch.compile vectorizes on a CPU, conversions and views of bits included.

    Args:
        weights: Pairs of bf16, int32 [rows, columns / 2].
        gradient: Of the same shape and type.
        exp_avg: First moment, likewise.
        exp_avg_sq: Second moment, likewise.
        location: Key of the random bits, position of the first element in the complete weight, and
            elements of it from one row to the next, int32 [3].
        settings: beta1, 1 - beta1, beta2, 1 - beta2, 1 - lr weight_decay, lr / (1 - beta1^t),
            1 / sqrt(1 - beta2^t), eps, fp32 [8].
    """
    key, position, step = location.unbind()
    rows, pairs = (
        torch.arange(size, dtype=torch.int32, device=weights.device) for size in weights.shape
    )
    positions = (rows * step).unsqueeze(1) + (pairs * 2 + position)
    halves_of_all = [halves(tensor) for tensor in (weights, gradient, exp_avg, exp_avg_sq)]
    rounded = [
        _update_half(
            [both[half] for both in halves_of_all], random_bits(key, positions + half), settings
        )
        for half in range(2)
    ]
    for tensor, first, second in zip(
        (weights, exp_avg, exp_avg_sq), rounded[0], rounded[1], strict=True
    ):
        tensor.copy_(joined(first, second))


def _update_half(
    tensors: Sequence[Tensor], bits: Tensor, settings: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Step the first or the second elements of pairs.

    The weight is rounded by the low half, the second moment by the high half of the random bits:
    both change by less than bf16 resolves. The first moment is rounded to the nearest value.

    Args:
        tensors: Weights, gradient and moments, fp32.
        bits: Random bits, int32.
        settings: Of `update`.

    Returns:
        Rounded weights and moments.
    """
    weights, gradient, exp_avg, exp_avg_sq = tensors
    beta1, rest1, beta2, rest2, decay, rate, correction, eps = settings.unbind()
    average = exp_avg * beta1 + gradient * rest1
    square = exp_avg_sq * beta2 + gradient * gradient * rest2
    values = weights * decay - average / (square.sqrt() * correction + eps) * rate
    return (
        round_stochastically(values, bits & LOW_HALF),
        round_to_nearest(average),
        round_stochastically(square, (bits >> 16) & LOW_HALF),
    )


class StochasticAdamW(torch.optim.AdamW):
    """AdamW whose weights and moments are in bf16, rounded stochastically after each step.

    A step is computed in fp32. Its result depends on the seed, the number of the step, the name of
    a weight and the position in the complete weight, and not on the tensor that holds the element.

    `attach` must be called before the first step.

    Args:
        params: Parameter groups, of flat tensors.
        settings: Arguments of torch's AdamW.
    """

    def __init__(self, params: Iterable[dict[str, Any]], **settings: Any) -> None:
        super().__init__(params, **settings)
        self._seed = 0
        self._blocks: Mapping[Tensor, Sequence[Block]] = {}
        self._update: Update = update

    def attach(
        self, seed: int, blocks: Mapping[Tensor, Sequence[Block]], compiled: Update | None = None
    ) -> None:
        """Give the optimizer what its random bits depend on.

        Args:
            seed: Seed of the run.
            blocks: The elements of the model in each flat tensor.
            compiled: `update`, compiled, which needs no temporary memory. None: it is not.
        """
        on_host = all(is_host(tensor.device.type) for tensor in blocks)
        size = HOST_CHUNK if on_host else CHUNK
        self._seed = seed
        self._update = compiled or update

        def parts(block: Block, tensor: Tensor) -> Iterable[Block]:
            # Without pairs, the elements are copied.
            return (block,) if compiled and is_paired(block.view(tensor)) else block.split(size)

        self._blocks = {
            tensor: [part for block in whole for part in parts(block, tensor)]
            for tensor, whole in blocks.items()
        }

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            for master in group["params"]:
                if master.grad is not None:
                    self._step_flat(master, group)

    def _step_flat(self, master: Tensor, group: dict[str, Any]) -> None:
        state = self.state[master]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = torch.zeros_like(master)
        state["step"] += 1  # on the host
        step = int(state["step"])
        blocks = self._blocks[master]
        keys = {name: key_of(self._seed, step, name) for name in {block.name for block in blocks}}
        locations = torch.tensor(
            [
                (keys[block.name], as_int32(block.full_position), as_int32(block.full_step))
                for block in blocks
            ],
            dtype=torch.int32,
        ).to(master.device)
        settings = _settings(group, step).to(master.device)
        assert master.grad is not None
        tensors = (master, master.grad, state["exp_avg"], state["exp_avg_sq"])
        flat = [tensor.detach() for tensor in tensors]
        for block, location in zip(blocks, locations.unbind(), strict=True):
            self._step_block([block.view(tensor) for tensor in flat], location, settings)

    def _step_block(self, tensors: Sequence[Tensor], location: Tensor, settings: Tensor) -> None:
        """Step a block, a copy of it where its elements are no pairs."""
        in_place = all(map(is_paired, tensors))
        columns = tensors[0].shape[1]
        padded = tensors if in_place else [F.pad(one, (0, columns % 2)) for one in tensors]
        weights, gradient, average, square = (one.view(torch.int32) for one in padded)
        self._update(weights, gradient, average, square, location, settings)
        if not in_place:
            for tensor, copied in zip(tensors, padded, strict=True):
                tensor.copy_(copied[:, :columns])


def _settings(group: Mapping[str, Any], step: int) -> Tensor:
    """The settings of `update`, fp32 on the host."""
    beta1, beta2 = group["betas"]
    values = (
        beta1,
        1 - beta1,
        beta2,
        1 - beta2,
        1 - group["lr"] * group["weight_decay"],
        group["lr"] / (1 - beta1**step),
        1 / math.sqrt(1 - beta2**step),
        group["eps"],
    )
    return torch.tensor(values, dtype=torch.float32)


def compile_update(device: torch.device) -> tuple[Update | None, Problem | None]:
    """Compile `update` if it then computes what it should on this device.

    Returns:
        The function, or None and the reason why.
    """
    compiled = torch.compile(update, dynamic=True)

    def pairs() -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator(device).manual_seed(0)
        group = {"betas": (0.9, 0.999), "lr": 1e-3, "weight_decay": 0.1, "eps": 1e-8}
        settings = _settings(group, 5).to(device)
        location = torch.tensor((1, 2, 3), dtype=torch.int32, device=device)
        for size in ((1, 4098), (33, 70)):
            tensors = [torch.randn(size, generator=generator, device=device) for _ in range(4)]
            tensors[3].square_()
            results = [[tensor.bfloat16() for tensor in tensors] for _ in range(2)]
            for function, values in zip((compiled, update), results, strict=True):
                weights, gradient, average, square = (one.view(torch.int32) for one in values)
                function(weights, gradient, average, square, location, settings)
            yield from ((one.float(), other.float()) for one, other in zip(*results, strict=True))

    with torch.no_grad():
        error = largest_error(pairs)
    if isinstance(error, str):
        return None, Problem("stochastic-rounding-eager", reason=error)
    if not error <= TOLERANCE:  # also if the error is nan
        reason = f"what torch.compile makes of it has a relative error of {error:.2g}"
        return None, Problem("stochastic-rounding-eager", reason=reason)
    return compiled, None
