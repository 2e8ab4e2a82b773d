"""DeepSpeed's pipeline engine behind the `Engine` protocol.

Owns what differs from the engine without stages: one call runs the micro-batches of a step through
all stages, in DeepSpeed's 1F1B schedule. Corrects what the pinned DeepSpeed computes wrongly with
stages: the norm and clipping without ZeRO, and the sum of tied gradients in an accumulator.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe import schedule
from torch import Tensor

from megatron_ds.engine.deepspeed.partitions import FlatPartition
from megatron_ds.engine.deepspeed.patches import (
    reduce_norm_once,
    replace_pipeline_instructions,
    reset_cpu_adam_beta_powers,
)
from megatron_ds.engine.deepspeed.stage_messages import StageMessages
from megatron_ds.engine.device_batches import DeviceBatch
from megatron_ds.engine.pipeline_module import FoldedStages, PipelineStage, WeightedBatch
from megatron_ds.engine.protocol import LossSum
from megatron_ds.engine.spike_guard import SpikeGuard
from megatron_ds.engine.zero import ZeroEngine
from megatron_ds.parallel.collectives import gather_objects
from megatron_ds.parallel.router_log import router_metrics
from megatron_ds.train_state import StepPlan, StepResult


class PipelineEngine(ZeroEngine):
    """ZeRO stages 0 and 1 with pipeline parallelism. Arguments as for `ZeroEngine`."""

    def __init__(self, engine: Any, **options: Any) -> None:
        super().__init__(engine, **options)
        self._module: PipelineStage = engine.module
        self._is_folded = isinstance(engine.module, FoldedStages)
        self._length: int | None = None
        self._norm: Tensor | None = None
        self._guard = SpikeGuard(None, self._device)
        # All weights of a rank in one file under their canonical names, not a file per layer.
        for name in ("module_state_dict", "load_module_state_dict"):
            setattr(engine, name, partial(getattr(DeepSpeedEngine, name), engine))
        reduce_norm_once(engine.optimizer, self._mesh.model.handle, self._device)
        messages = StageMessages(self._mesh, are_batched=not self._is_folded)
        engine._exec_schedule = messages.active()(engine._exec_schedule)
        replace_pipeline_instructions(
            engine,
            {
                schedule.LoadMicroBatch: self._load_micro_batch,
                schedule.ForwardPass: engine._exec_forward_pass,
                schedule.BackwardPass: engine._exec_backward_pass,
                schedule.ReduceTiedGrads: self._reduce_tied_gradients,
                schedule.OptimizerStep: partial(self._step, engine._exec_optimizer_step),
            },
            before=messages.exchange,
        )

    def partitions(self) -> list[FlatPartition]:
        stages = gather_objects(super().partitions(), self._mesh.pp)
        return [partition for stage in stages for partition in stage]

    def _train_step(self, batches: Iterator[DeviceBatch], plan: StepPlan) -> StepResult:
        before = self._start_step(plan)
        # Read before the first pass: data that ends must end the step of every stage.
        step_batches = list(self._weighted(batches, plan))
        self._set_length(plan.seq_length)
        self._module.feed(partial(self._with_dropout, step_batches))
        router_log = self._module.gpt.router_log
        router_log.gradient_scale = self._factor_of_backward(plan)
        self._norm, self._guard = None, SpikeGuard(plan.limits, self._device)
        self._engine.train_batch()
        self._release_passes()
        norm = self._engine.get_global_grad_norm() if self._norm is None else self._norm
        extras = router_metrics(router_log.take_of_stages(self._mesh.pp, self._device))
        return self._result(plan, before, self._guard, self._engine.dp_group_loss, norm, extras)

    def eval_loss(self, batches: Iterator[DeviceBatch], count: int) -> LossSum:
        inputs = [next(batches) for _ in range(count)]
        if self._is_folded:  # a schedule needs this many; the loss of repeated ones is not added
            inputs += inputs[-1:] * (2 * self._mesh.pp.size - count)
        self._set_length(inputs[0].tokens_BS.shape[1])
        self._module.feed(lambda: ((batch, None) for batch in inputs))
        engine, of_step = self._engine, self._engine.micro_batches
        engine.total_loss = None  # of another shape after a training step
        engine.micro_batches = len(inputs)  # from which DualPipeV numbers its buffers
        engine.eval_batch(None, reduce_output=None, bcast_loss=False, num_micro_batches=len(inputs))
        engine.micro_batches = of_step
        self._release_passes()
        sums = self._sum(self._module.losses[:count])
        source = self._mesh.pp.ranks[0 if self._is_folded else -1]
        dist.broadcast(sums, src=source, group=self._mesh.pp.handle)
        return LossSum(*sums)

    def _with_dropout(self, step_batches: list[WeightedBatch]) -> Iterator[WeightedBatch]:
        """Yields the micro-batches of a step; each sets the seed of its dropout.

        The two stages of a rank compute different micro-batches alternately.
        """
        for batch, weight in step_batches:
            self._begin_dropout(batch)
            yield batch, weight

    def _release_passes(self) -> None:
        """Drop the tensors of the last passes.

        DeepSpeed keeps them until the next step. Their autograd graph refers to the engine through
        hooks, where Python's garbage collector cannot follow: they would outlive the engine.
        """
        for buffers in self._engine.pipe_buffers.values():
            buffers[:] = [None] * len(buffers)
        self._engine.loss = None

    def _set_length(self, length: int) -> None:
        """Let the stages agree again on the shape of hidden states if the length has changed."""
        if length != self._length:
            self._engine.reset_activation_shape()
            self._length = length

    def _load_micro_batch(self, buffer_id: int) -> None:
        """The stage reads its micro-batches; DeepSpeed passes this to the first stage's forward."""
        if self._engine.is_first_stage():
            self._engine.pipe_buffers["inputs"][buffer_id] = torch.empty(0, device=self._device)

    def _reduce_tied_gradients(self) -> None:
        """Sum the gradients of both copies of a tied weight, wherever they are accumulated.

        DeepSpeed looks for them in `grad` or, with its bf16 optimizer, in `_hp_grad` only. It then
        sums over the replicas, in an order that differs between the stages: rounding would let the
        copies drift apart. So the first replica gets the sum of all and the other replicas get
        zeros, which have the same sum in any order. The sum of two replicas has only one order.
        """
        replicas = self._mesh.dp_sp
        self._flat.send()  # in one order with the sums below, on every replica
        for weight, group in self._module.get_tied_weights_and_groups():
            candidates = (
                getattr(weight, name, None) for name in ("_hp_grad", "grad_accum", "grad")
            )
            gradient = next((value for value in candidates if value is not None), None)
            if gradient is None:
                continue
            if replicas.size > 2:
                dist.reduce(gradient, dst=replicas.ranks[0], group=replicas.handle)
            if replicas.size <= 2 or replicas.rank == 0:
                dist.all_reduce(gradient, group=group)
            else:
                gradient.zero_()

    def _step(self, step: Any, lr_kwargs: Any = None) -> None:
        """Step the optimizer; without ZeRO after computing the norm of the averaged gradient."""
        if self._engine.is_last_stage():
            self._guard.losses.append(self._engine.total_loss / self._engine.micro_batches)
        if self._stage == 0 and self._skip_without_zero(self._guard):
            return
        reset_cpu_adam_beta_powers(self._engine.basic_optimizer)
        with self._guard.skip_spike(self._engine.optimizer):
            step(lr_kwargs)
