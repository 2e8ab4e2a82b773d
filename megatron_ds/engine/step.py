"""Training steps: the work that all of them share, and forward and backward of a model without
pipeline stages.

Owns the learning rates of a step, the seeds of its dropout, the weights of its losses, and the
decision whether it is applied, for which it computes the gradient norm where DeepSpeed computes
none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ds.config.problems import user_error
from megatron_ds.engine.deepspeed.flat_gradients import FlatGradients
from megatron_ds.engine.deepspeed.loss_scaler import LossScale
from megatron_ds.engine.deepspeed.patches import reset_cpu_adam_beta_powers, spare_work_of_stage_0
from megatron_ds.engine.device_batches import DeviceBatch
from megatron_ds.engine.norms import ModelNorms, clip
from megatron_ds.engine.optimizers.param_groups import set_lr_and_weight_decay
from megatron_ds.engine.optimizers.qk_clip import QKClip
from megatron_ds.engine.parts import EngineParts
from megatron_ds.engine.spike_guard import SpikeGuard
from megatron_ds.launch.device import sum_dtype
from megatron_ds.model.output_layer import TokenLoss
from megatron_ds.train_state import StepPlan, StepResult

COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")
"""Counters of DeepSpeed's engine that every step increases, skipped or not."""
WeightedBatch = tuple[DeviceBatch, Tensor | None]
"""A micro-batch, and factors for `TokenLoss.weighted`; None for means over its tokens."""


class StepControl:
    """Begins and ends the steps of an engine.

    Args:
        parts: Parts of the engine.
    """

    def __init__(self, parts: EngineParts) -> None:
        self.parts = parts
        self._engine = parts.engine
        self.norms = ModelNorms(parts)
        self.gradients = FlatGradients(self._engine, self.norms.norm)
        has_scale = self._engine.fp16_enabled()
        self.loss_scale = LossScale(self._engine.optimizer) if has_scale else None
        self.guard = SpikeGuard(None, parts.device)
        """Compares the step with its limits."""
        self._norm: Tensor | None = None
        self._qk_clip = QKClip(parts)
        self._logits = dict[str, Tensor]()
        self._skipped = 0
        self._was_exhausted = False
        self._before = dict[str, int]()
        self._scale_before = dict[str, Any]()
        self._before_update: Callable[[], object] = int
        if parts.stage == 0:
            parameters = [parameter for _, parameter in self.norms.parameters]
            replicas = parts.mesh.replicas.size
            spare_work_of_stage_0(self._engine, self._clip_gradients, parameters, replicas)

    def begin(self, plan: StepPlan, before_update: Callable[[], object]) -> None:
        """Begin a step: set its batch size, its learning rates, and the scale of auxiliary
        losses."""
        parts = self.parts
        engine = self._engine
        scale = self.loss_scale
        self._before_update = before_update
        self._norm = None
        self.guard = SpikeGuard(plan.limits, parts.device)
        self.gradients.begin_step(plan.num_micro_batches)
        micro_batch_size = plan.global_batch_size // (plan.num_micro_batches * parts.mesh.dp.size)
        if micro_batch_size != engine.train_micro_batch_size_per_gpu():
            engine.set_train_micro_batch_size(micro_batch_size)
        engine.set_train_batch_size(plan.global_batch_size * parts.mesh.sequence.size)
        rates = plan.lr, plan.weight_decay, plan.decoupled_lr
        set_lr_and_weight_decay(engine.optimizer.param_groups, parts.multipliers, *rates)
        self._skipped = engine.skipped_steps
        self._before = {name: getattr(engine, name) for name in COUNTERS}
        self._scale_before = {} if scale is None else scale.state
        self._was_exhausted = scale is not None and scale.is_exhausted
        # DeepSpeed's factor for a micro-batch's loss before the backward pass.
        factor = (1.0 if scale is None else scale.value) / plan.num_micro_batches
        parts.model.router_log.gradient_scale = factor

    def undo(self) -> None:
        """Set what a skipped step has changed, counters and the loss scale, back."""
        for name, value in self._before.items():
            setattr(self._engine, name, value)
        if self.loss_scale is not None:
            self.loss_scale.state = self._scale_before

    def micro_batches(
        self, batches: Iterator[DeviceBatch], plan: StepPlan
    ) -> Iterator[WeightedBatch]:
        """The micro-batches of a step, and the factor of each one's summed loss.

        The factor is None if a micro-batch's loss is the mean over its tokens. With per-token loss
        it makes the mean over micro-batches and data-parallel ranks, which DeepSpeed takes of the
        gradients, the mean over all tokens of the step. The tokens must be counted before the first
        backward pass, so all micro-batches are read first.
        """
        truncated = _read_step(batches, plan)
        dp = self.parts.mesh.dp
        if not self._is_per_token:
            yield from ((batch, None) for batch in truncated)
            return
        step_batches = list(truncated)
        depths = self.parts.config.model.mtp_num_layers
        tokens = torch.zeros(1 + depths, dtype=torch.int64, device=self.parts.device)
        for batch in step_batches:
            tokens[0] += batch.num_counted()
            if depths:
                weights = self.parts.model.weights_ahead(
                    batch.tokens_BS, batch.loss_weights_BS, batch.documents
                )
                tokens[1:] += torch.stack([depth.sum(dtype=torch.int64) for depth in weights])
        if dp.size > 1:
            dist.all_reduce(tokens, group=dp.handle)
        factor = dp.size * plan.num_micro_batches / tokens.clamp(min=1).float()
        yield from ((batch, factor) for batch in step_batches)

    def begin_dropout(self, first: DeviceBatch) -> None:
        """Set from what the dropout masks of a step, or of a micro-batch, are seeded."""
        stride = first.tokens_BS.shape[0] * self.parts.mesh.dp.size
        self.parts.rng.begin_step(self.parts.config.runtime.seed, first.position, stride)

    def apply(self, step: Callable[[], None]) -> None:
        """Step the optimizer, unless the gradient is not finite or the step exceeds its limits."""
        self._before_update()
        self._logits = self._qk_clip.begin_step()
        if self.parts.stage == 0 and self._is_dropped():
            return
        reset_cpu_adam_beta_powers(self._engine.basic_optimizer)
        with self.guard.skip_spike(self._engine.optimizer):
            step()

    def result(self, plan: StepPlan, loss: Tensor) -> StepResult:
        """The result of a step.

        Args:
            plan: Plan of the step.
            loss: Mean loss of this data-parallel rank.
        """
        guard = self.guard
        scale = self.loss_scale
        rate = plan.decoupled_lr
        skipped = self._engine.skipped_steps > self._skipped
        norm = self._engine.get_global_grad_norm() if self._norm is None else self._norm
        return StepResult(
            loss=loss,
            # DeepSpeed reports a skipped step's norm as infinite.
            grad_norm=norm if guard.compared is None else guard.compared[1],
            skipped=skipped,
            loss_scale=None if scale is None else scale.value,
            loss_scale_exhausted=skipped and self._was_exhausted and not guard.is_spike,
            is_spike=guard.is_spike,
            compared=guard.compared,
            extras=self._logits | ({} if rate is None else {"decoupled_learning_rate": rate}),
        )

    def sum(self, losses: Iterable[TokenLoss]) -> Tensor:
        """The values of a `LossSum` of micro-batches, [3] in `sum_dtype`."""
        device = self.parts.device
        sums = torch.zeros(3, dtype=sum_dtype(device.type), device=device)
        for loss in losses:
            sums[0] += loss.loss_sum if self._is_per_token else loss.mean()
            sums[1] += loss.num_tokens if self._is_per_token else 1.0
            sums[2] += loss.loss_sum
        return sums

    @property
    def _is_per_token(self) -> bool:
        return self.parts.config.optimizer.calculate_per_token_loss

    def _is_dropped(self) -> bool:
        """Compute the norm of stage 0; whether the step is skipped, which drops its gradients.

        At this stage DeepSpeed computes no norm of the averaged gradient. Whether to step is
        decided here, as its optimizers do at the other stages: the one wait for the device.
        """
        self._norm = self.norms.norm(lambda parameter: parameter.grad)
        if bool(self._norm.isfinite()) and not self.guard.exceeds(self._norm):
            return False
        self._engine.zero_grad()
        self._engine.skipped_steps += 1
        return True

    def _clip_gradients(self) -> None:
        """Clip the gradients of stage 0."""
        assert self._norm is not None
        gradients = [p.grad for _, p in self.norms.parameters if p.grad is not None]
        clip(gradients, self._norm, self._engine.gradient_clipping())


class ModelPasses:
    """Runs forward and backward passes of the complete model, one micro-batch at a time.

    Args:
        steps: Begins and ends the steps.
    """

    def __init__(self, steps: StepControl) -> None:
        self._steps = steps
        self._engine = steps.parts.engine

    def train(self, batches: Iterator[DeviceBatch], plan: StepPlan) -> Tensor:
        """Run the passes of a step that was begun, and apply it: this rank's mean loss."""
        engine = self._engine
        losses = self._steps.guard.losses
        if not engine.module.training:  # else it would visit every module in vain
            engine.train()
        for index, (batch, weight) in enumerate(self._steps.micro_batches(batches, plan)):
            last = index == plan.num_micro_batches - 1
            # DeepSpeed finds the boundary by counting micro-steps since the start of the run, which
            # is permanently off once the number of micro-steps per step changes.
            engine.set_gradient_accumulation_boundary(last)
            if index == 0:
                self._steps.begin_dropout(batch)
            token_loss = self._forward(batch)
            loss, extras = token_loss.weighted(weight)
            self._steps.parts.model.router_log.add(extras)
            engine.backward(loss)
            losses.append(loss.detach())
            if last:
                self._steps.apply(engine.step)
            else:
                engine.step()
        return torch.stack(losses).mean()

    def evaluate(self, batches: Iterator[DeviceBatch], count: int) -> Tensor:
        """Compute what `StepControl.sum` returns of `count` micro-batches."""
        self._engine.eval()
        with torch.no_grad():
            return self._steps.sum([self._forward(next(batches)) for _ in range(count)])

    def _forward(self, batch: DeviceBatch) -> TokenLoss:
        loss: TokenLoss = self._engine(
            batch.tokens_BS, batch.labels_BS, batch.loss_weights_BS, documents=batch.documents
        )
        return loss


def _read_step(batches: Iterator[DeviceBatch], plan: StepPlan) -> Iterator[DeviceBatch]:
    """The micro-batches of a step.

    Raises:
        UserError: If the data ends before the step.
    """
    for _ in range(plan.num_micro_batches):
        # Not `next(batches)`: inside a generator, StopIteration becomes a RuntimeError.
        batch = next(batches, None)
        if batch is None:
            raise user_error("training-data-exhausted", iteration=plan.iteration)
        yield batch.truncated(plan.seq_length)
