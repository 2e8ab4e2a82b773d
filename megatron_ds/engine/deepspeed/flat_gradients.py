"""The fp32 gradients of DeepSpeed's bf16 optimizer of ZeRO stage 1, in the flat tensors it keeps.

Owns how they are accumulated, all-reduced over the replicas during the last backward pass of a
step, measured and clipped. DeepSpeed reduces them after that pass, through a copy, and launches
kernels for each parameter. Written for DeepSpeed 0.19.x, as `patches.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from deepspeed.runtime import bf16_optimizer
from deepspeed.runtime.utils import all_gather_into_tensor_dp_groups
from torch import Tensor, nn

from megatron_ds.engine.deepspeed.patches import replaced
from megatron_ds.engine.norms import clip

Measure = Callable[[Callable[[nn.Parameter], Tensor | None]], Tensor]


class _Slice(NamedTuple):
    """Successive parameters of a flat tensor, whose gradients are summed in one message."""

    place: tuple[bool, int]
    """Whether it has a tied parameter, and how far from the model's end its first parameter is."""
    values: Tensor
    group: dist.ProcessGroup
    parameters: list[nn.Parameter]


class FlatGradients:
    """Replaces methods of a DeepSpeed engine and its BF16_Optimizer; no other optimizer's.

    Every rank sends the slices in one order, from the end of the model to its beginning: a slice
    whose gradients are complete waits for those before it. None is copied. In the first step they
    are sent after the backward passes, and in all others if it finds a parameter whose gradient
    comes in several parts, as from a custom layer. Slices with a parameter that pipeline stages
    share are always sent last. A single replica sends nothing. DeepSpeed reduces as before if it
    does so in another number format, with other factors, or by DeepCompile.

    Args:
        engine: Engine of `deepspeed.initialize`.
        measure: Computes the norm over all ranks, from the gradient of each parameter. Collective.
    """

    def __init__(self, engine: Any, measure: Measure) -> None:
        self._optimizer = engine.optimizer
        optimizer = self._optimizer
        self._slices: list[_Slice] = []
        self._works: list[Any] = []
        """Messages of this step, in the order of the slices."""
        self._passes = 0
        self._added: Counter[nn.Parameter] = Counter()
        """Number of times that each gradient was added in this step."""
        self._is_early = False
        """Whether a gradient is complete once it was added in each pass, as in the last step."""
        if not isinstance(optimizer, bf16_optimizer.BF16_Optimizer):
            return
        self._measure = measure
        self._step = optimizer.step
        parameters = chain.from_iterable(optimizer.bf16_groups)
        sums = chain.from_iterable(optimizer.fp32_groups_gradients)
        self._sums: dict[nn.Parameter, Tensor] = dict(zip(parameters, sums, strict=True))
        optimizer._update_hp_grad = self._accumulate
        optimizer.step = self._step_flat
        flats = optimizer.fp32_groups_gradients_flat
        optimizer.clear_hp_grads = partial(torch._foreach_zero_, flats)
        optimizer.update_lp_params = self._update_weights
        if dist.get_world_size(optimizer.dp_process_group) == 1 or _is_mean(engine):
            self._slices = sorted(_slices(engine), key=lambda part: part.place)
            engine.buffered_allreduce_fallback = self._finish

    def begin_step(self, passes: int) -> None:
        """Begin a step with a number of backward passes."""
        self._passes = passes
        self._added = Counter()

    def send(self, passes: int = 0, *, with_tied: bool = False) -> None:
        """Send slices, up to the first one that lacks gradients or has a tied parameter.

        Args:
            passes: Number of gradients that each of its parameters needs.
            with_tied: Send those with a tied parameter, too.
        """
        for part in self._slices[len(self._works) :]:
            is_incomplete = any(self._added[parameter] < passes for parameter in part.parameters)
            if is_incomplete or part.place[0] > with_tied:
                return
            self._works.append(dist.all_reduce(part.values, group=part.group, async_op=True))

    @torch.no_grad()
    def _accumulate(self, parameter: nn.Parameter, *_: Any, **__: Any) -> None:
        """Add the gradient of a backward pass. The kernel reads bf16 and makes no copy in fp32."""
        if parameter.grad is None:
            return
        total = self._sums[parameter]
        total.add_(parameter.grad.view(total.shape))
        parameter._hp_grad = total  # type: ignore[attr-defined]
        self._added[parameter] += 1
        if self._is_early and self._added[parameter] >= self._passes:
            assert self._added[parameter] == self._passes, "a gradient may change after it was sent"
            self.send(self._passes)

    def _finish(self, *_: Any, **__: Any) -> None:
        """Send the rest: in place of DeepSpeed's reduction after the last backward pass."""
        self.send(with_tied=True)
        self._is_early = max(self._added.values(), default=0) <= self._passes

    @torch.no_grad()
    def complete(self) -> None:
        """Wait for the all-reduces of this step, and divide the sums by the number of ranks."""
        for work in self._works:
            work.wait()
        if self._works:
            ranks = dist.get_world_size(self._optimizer.dp_process_group)
            torch._foreach_mul_(self._optimizer.fp32_groups_gradients_flat, 1.0 / ranks)
        self._works.clear()

    @torch.no_grad()
    def _step_flat(self, closure: None = None) -> None:
        """DeepSpeed's step with a norm and clipping in few kernels."""
        optimizer = self._optimizer
        self.complete()
        norm = self._measure(self._sums.get)
        if optimizer.clip_grad > 0:  # what a norm that is not finite scales is dropped
            clip(optimizer.fp32_groups_gradient_flat_partition, norm, optimizer.clip_grad)
        known = norm.item()  # the one wait for the device
        with (
            replaced(bf16_optimizer, "get_global_norm_of_tensors", lambda **_: known),
            replaced(bf16_optimizer, "get_norm_with_moe_layers", lambda *_, **__: known),
            replaced(optimizer, "clip_grad", 0.0),
        ):
            self._step(closure)

    @torch.no_grad()
    def _update_weights(self) -> None:
        """Round the master weights by one kernel, and gather them."""
        optimizer = self._optimizer
        groups = optimizer.real_dp_process_group
        parts = optimizer.bf16_partitioned_groups
        slices = [part[dist.get_rank(group)] for part, group in zip(parts, groups, strict=True)]
        torch._foreach_copy_(slices, optimizer.fp32_groups_flat_partition)
        all_gather_into_tensor_dp_groups(optimizer.bf16_groups_flat, parts, groups)


def _is_mean(engine: Any) -> bool:
    """Whether an engine reduces gradients in their own data type and divides by the number of
    ranks."""
    is_same = engine.communication_data_type == engine.optimizer.grad_acc_dtype
    factors = engine.postscale_gradients(), engine.gradient_predivide_factor()
    return is_same and factors == (True, 1.0) and not engine.is_deepcompile_active()


def _slices(engine: Any) -> Iterator[_Slice]:
    """The slices of each flat tensor: as large as a reduction's bucket, or a little larger."""
    optimizer = engine.optimizer
    module = engine.module
    places = {weight: index for index, weight in enumerate(module.parameters())}
    tied = {weight for weight, _ in getattr(module, "get_tied_weights_and_groups", tuple)()}
    flats = optimizer.fp32_groups_gradients_flat
    groups = optimizer.real_dp_process_group
    for flat, parameters, group in zip(flats, optimizer.bf16_groups, groups, strict=True):
        end = sum(parameter.numel() for parameter in parameters)
        start = end
        taken: list[nn.Parameter] = []
        for parameter in reversed(parameters) if dist.get_world_size(group) > 1 else ():
            start -= parameter.numel()
            taken.append(parameter)
            if end - start >= engine.zero_reduce_bucket_size() or start == 0:
                order = not tied.isdisjoint(taken), -places[parameter]
                yield _Slice(order, flat[start:end], group, taken)
                end = start
                taken = []
