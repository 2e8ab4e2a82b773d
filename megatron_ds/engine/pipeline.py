"""The passes of a step's micro-batches through pipeline stages, by DeepSpeed's pipeline engine.

Owns what differs from the passes through a complete model: one call runs the micro-batches of a
step through all stages, in DeepSpeed's 1F1B schedule. Corrects what the pinned DeepSpeed computes
wrongly with stages: the norm and clipping without ZeRO, and the sum of tied gradients in an
accumulator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe import schedule
from torch import Tensor

from megatron_ds.engine.deepspeed.patches import reduce_norm_once, replace_pipeline_instructions
from megatron_ds.engine.deepspeed.stage_messages import StageMessages
from megatron_ds.engine.device_batches import DeviceBatch
from megatron_ds.engine.module import FoldedStages, PipelineStage
from megatron_ds.engine.step import StepControl, WeightedBatch
from megatron_ds.train_state import StepPlan


class PipelinePasses:
    """Passes through pipeline stages, with the methods of `ModelPasses`; for ZeRO stages 0 and 1.

    Args:
        steps: Begins and ends the steps.
    """

    def __init__(self, steps: StepControl) -> None:
        engine = steps.parts.engine
        mesh = steps.parts.mesh
        self._steps = steps
        self._engine = engine
        self._mesh = mesh
        self._device = steps.parts.device
        self._module: PipelineStage = engine.module
        self._is_folded = isinstance(engine.module, FoldedStages)
        self._shape: torch.Size | None = None
        # All weights of a rank in one file under their canonical names, not a file per layer.
        for name in ("module_state_dict", "load_module_state_dict"):
            setattr(engine, name, partial(getattr(DeepSpeedEngine, name), engine))
        reduce_norm_once(engine.optimizer, mesh.model.handle, self._device)
        messages = StageMessages(mesh, are_batched=not self._is_folded)
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

    def train(self, batches: Iterator[DeviceBatch], plan: StepPlan) -> Tensor:
        # Read before the first pass: data that ends must end the step of every stage.
        step_batches = list(self._steps.micro_batches(batches, plan))
        self._set_shape(step_batches[0][0])
        self._module.feed(partial(self._with_dropout, step_batches))
        self._engine.train_batch()
        self._release_passes()
        loss: Tensor = self._engine.dp_group_loss
        return loss

    def evaluate(self, batches: Iterator[DeviceBatch], count: int) -> Tensor:
        inputs = [next(batches) for _ in range(count)]
        if self._is_folded:  # a schedule needs this many; the loss of repeated ones is not added
            inputs += inputs[-1:] * (2 * self._mesh.pp.size - count)
        self._set_shape(inputs[0])
        self._module.feed(lambda: ((batch, None) for batch in inputs))
        engine = self._engine
        micro_batches = self._engine.micro_batches
        engine.total_loss = None  # of another shape after a training step
        engine.micro_batches = len(inputs)  # from which DualPipeV numbers its buffers
        engine.eval_batch(None, reduce_output=None, bcast_loss=False, num_micro_batches=len(inputs))
        engine.micro_batches = micro_batches
        self._release_passes()
        sums = self._steps.sum(self._module.losses[:count])
        source = self._mesh.pp.ranks[0 if self._is_folded else -1]
        dist.broadcast(sums, src=source, group=self._mesh.pp.handle)
        return sums

    def _with_dropout(self, step_batches: list[WeightedBatch]) -> Iterator[WeightedBatch]:
        """Yields the micro-batches of a step; each sets the seed of its dropout.

        The two stages of a rank compute different micro-batches alternately.
        """
        for batch, weight in step_batches:
            self._steps.begin_dropout(batch)
            yield batch, weight

    def _release_passes(self) -> None:
        """Drop the tensors of the last passes.

        DeepSpeed keeps them until the next step. Their autograd graph refers to the engine through
        hooks, where Python's garbage collector cannot follow: they would outlive the engine.
        """
        for buffers in self._engine.pipe_buffers.values():
            buffers[:] = [None] * len(buffers)
        self._engine.loss = None

    def _set_shape(self, batch: DeviceBatch) -> None:
        """Let the stages agree again on the shape of hidden states if it has changed."""
        if batch.tokens_BS.shape != self._shape:
            self._engine.reset_activation_shape()
            self._shape = batch.tokens_BS.shape

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
        replicas = self._mesh.replicas
        self._steps.gradients.send()  # in one order with the sums below, on every replica
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

    def _step(self, step: Callable[..., None], lr_kwargs: Any = None) -> None:
        if self._engine.is_last_stage():
            loss = self._engine.total_loss / self._engine.micro_batches
            self._steps.guard.losses.append(loss)
        self._steps.apply(partial(step, lr_kwargs))
