"""A DeepSpeed ZeRO engine behind the `Engine` protocol.

Owns the accumulation boundary, learning rate and weight decay of a step, and the gradient norm
where DeepSpeed computes none. Knows nothing of schedules, logs and checkpoint names.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, SupportsFloat

import torch
import torch.distributed as dist
from deepspeed.runtime.zero import register_external_parameter
from torch import Tensor, nn

from megatron_ds.config import Config
from megatron_ds.config.problems import Problem, user_error
from megatron_ds.data.micro_batches import Batch
from megatron_ds.engine.deepspeed import nvme_states
from megatron_ds.engine.deepspeed.checkpoint_io import (
    DeepSpeedSnapshot,
    SafeCheckpointEngine,
    load_checkpoint,
)
from megatron_ds.engine.deepspeed.expert_files import ExpertFiles
from megatron_ds.engine.deepspeed.flat_gradients import FlatGradients
from megatron_ds.engine.deepspeed.loss_scaler import LossScale
from megatron_ds.engine.deepspeed.partitions import FlatPartition, read_partitions
from megatron_ds.engine.deepspeed.patches import (
    experts_saved_by_caller,
    literal_folder,
    reset_cpu_adam_beta_powers,
    spare_work_of_stage_0,
)
from megatron_ds.engine.deepspeed.tensor_files import LARGEST
from megatron_ds.engine.device_batches import DeviceBatch, DeviceBatches
from megatron_ds.engine.norms import StepNorms, clip, is_counted, sum_of_squares
from megatron_ds.engine.optimizers.param_groups import (
    Multipliers,
    keep_settings_on_load,
    reused_states,
    set_lr_and_weight_decay,
)
from megatron_ds.engine.protocol import EngineSettings, LossSum, StateBytes
from megatron_ds.engine.readback import state_bytes
from megatron_ds.engine.regions import Open, mark_collectives, mark_layers, mark_passes
from megatron_ds.engine.spike_guard import SpikeGuard
from megatron_ds.engine.states.host_staging import HostStaging
from megatron_ds.engine.states.resharding import Resharding
from megatron_ds.engine.states.state_reader import StateReader
from megatron_ds.engine.timers import StepTimers
from megatron_ds.fileio.swap_folder import SwapFolder
from megatron_ds.model.attention.backends import AttentionOptions
from megatron_ds.model.gpt import GPTModel
from megatron_ds.model.inference_form import inference_form
from megatron_ds.model.output_layer import TokenLoss
from megatron_ds.parallel.collectives import gather_objects
from megatron_ds.parallel.mesh import Mesh
from megatron_ds.parallel.rng import RngStreams
from megatron_ds.parallel.router_log import router_metrics
from megatron_ds.parallel.sharding import expert_group, shard_spec
from megatron_ds.parallel.weights import ShardSpec
from megatron_ds.train_state import StepPlan, StepResult


class ZeroEngine:
    """ZeRO stages 0 to 3 without pipeline parallelism, and what is the same with it.

    Args:
        engine: Engine of `deepspeed.initialize`.
        config: Options of the run.
        ds_config: DeepSpeed configuration that was passed to it.
        read_settings: Reads the settings in effect back from the engine, and checks them.
        multipliers: Factors of each parameter group.
        startup_warnings: What the run does more slowly than it could.
        mesh: Mesh of this process.
        rng: Random number generators for dropout.
        device: Device to which batches are copied.
        is_compiled: Layers or the model are compiled.
        swap_folder: Where states on a disk are; kept until the engine ends.
    """

    def __init__(
        self,
        engine: Any,
        *,
        config: Config,
        ds_config: dict[str, Any],
        read_settings: Callable[[], EngineSettings],
        multipliers: tuple[Multipliers, ...],
        startup_warnings: tuple[Problem, ...],
        mesh: Mesh,
        rng: RngStreams,
        device: torch.device,
        is_compiled: bool,
        swap_folder: SwapFolder | None = None,
    ) -> None:
        self._engine = engine
        self._swap_folder = swap_folder
        saves_optimizer = not config.checkpoint.no_save_optim
        is_replicated = saves_optimizer and not engine.zero_optimization()
        replicated = engine.basic_optimizer if is_replicated else None
        self._experts = ExpertFiles(engine.module, mesh, replicated)
        self._files = SafeCheckpointEngine(engine, self._experts, saves_optimizer=saves_optimizer)
        self._copies = HostStaging()
        self.ds_config = ds_config
        self.settings = read_settings()
        self.attention: AttentionOptions = engine.module.attention
        self.startup_warnings = startup_warnings
        self.module: nn.Module = engine.module
        self.compiled: str = engine.module.compiled
        self._read_settings = read_settings
        self._multipliers = multipliers
        self._per_token_loss = config.optimizer.calculate_per_token_loss
        self._mesh = mesh
        self._rng = rng
        self._seed = config.runtime.seed
        self._device = device
        self._stage = self.settings.zero_stage
        self._norm: Tensor | None = None
        # Of this rank. A walk over the modules takes longer than a small tensor's norm.
        self._named_parameters = tuple(engine.module.named_parameters())
        self._counted = tuple(
            (parameter, expert_group(parameter) is not None)
            for _, parameter in self._named_parameters
            if is_counted(parameter, mesh)
        )
        self.norms = StepNorms(engine, self._stage, mesh, device, config.logging)
        self._is_compiled = is_compiled
        self._compiles_collectives = is_compiled and _layers_communicate(mesh, ds_config)
        interval, compiled = config.logging.log_interval, self._compiles_collectives
        self.timers = StepTimers(config.profiling, interval=interval, is_compiled=compiled)
        self._loss_scale = LossScale(engine.optimizer) if engine.fp16_enabled() else None
        self._flat = FlatGradients(engine, lambda of: self._sum_of_squares(of).sqrt())
        if self._stage == 0:
            parameters = [parameter for _, parameter in self._named_parameters]
            spare_work_of_stage_0(engine, self._clip_gradients, parameters, self.settings.dp_size)
        keep_settings_on_load(engine.basic_optimizer)

    def parameter_count(self) -> int:
        return sum(getattr(p, "ds_numel", p.numel()) for _, p in self._named_parameters)

    def shard_specs(self) -> dict[str, ShardSpec]:
        specs = {
            name: spec
            for name, parameter in self._named_parameters
            if (spec := shard_spec(parameter)) is not None
        }
        merged: dict[str, ShardSpec] = {}
        for stage in gather_objects(specs, self._mesh.pp):
            merged |= stage
        return merged

    def sharded_experts(self) -> tuple[str, ...]:
        stages = gather_objects(self._experts.names, self._mesh.pp)
        return tuple(name for stage in stages for name in stage)

    def partitions(self) -> list[FlatPartition]:
        return read_partitions(self._engine, self._stage)

    def state_bytes(self) -> StateBytes:
        return state_bytes(self._engine)

    def watch_gradients(self) -> AbstractContextManager[dict[str, Tensor]]:
        return watch_gradients(self._named_parameters)

    def step_times(self) -> dict[str, float]:
        return self.timers.take()

    @contextmanager
    def marked(self, open_region: Open) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(mark_passes(self._engine, open_region))
            if not self._compiles_collectives:
                stack.enter_context(mark_collectives(self._mesh, open_region))
            if not self._is_compiled:
                stack.enter_context(mark_layers(self._engine.module, open_region))
            yield

    def device_batches(self, batches: Iterator[Batch]) -> DeviceBatches:
        packing = self.attention.packing
        counted = packing.eod if packing is not None and packing.reset_attention else None
        return DeviceBatches(batches, self._device, self._mesh.sp_tp, document_end=counted)

    def train_step(self, batches: Iterator[DeviceBatch], plan: StepPlan) -> StepResult:
        timing = self.timers.measuring(self._engine, self._mesh, plan.iteration)
        with timing, self.norms.counting(plan.iteration) as sums:
            result = self._train_step(batches, plan)
        if sums is None or result.skipped:
            return result
        extras = {**result.extras, **self.norms.metrics(sums, result.grad_norm)}
        return dataclasses.replace(result, extras=extras)

    def _train_step(self, batches: Iterator[DeviceBatch], plan: StepPlan) -> StepResult:
        engine = self._engine
        if not engine.module.training:  # else it would visit every module in vain
            engine.train()
        before = self._start_step(plan)
        router_log = engine.module.router_log
        guard = SpikeGuard(plan.limits, self._device)
        losses = guard.losses
        norm: Tensor | float | None = None
        dropped = False
        for index, (batch, weight) in enumerate(self._weighted(batches, plan)):
            last = index == plan.num_micro_batches - 1
            # DeepSpeed finds the boundary by counting micro-steps since the start of the run, which
            # is permanently off once the number of micro-steps per step changes.
            engine.set_gradient_accumulation_boundary(last)
            if index == 0:
                self._begin_dropout(batch)
            router_log.gradient_scale = self._factor_of_backward(plan)
            token_loss = self._forward(batch)
            loss = token_loss.mean() if weight is None else token_loss.loss_sum * weight
            engine.backward(loss)
            losses.append(loss.detach())
            if last and self._stage == 0:
                # DeepSpeed computes no norm of the averaged gradient at this stage. Whether to step
                # is decided here, as DeepSpeed's optimizers do: the one wait for the device.
                dropped = self._skip_without_zero(guard)
                norm = self._norm
            if dropped:
                break
            if last:
                reset_cpu_adam_beta_powers(engine.basic_optimizer)
            with guard.skip_spike(engine.optimizer):
                engine.step()
        if self._stage != 0:
            norm = engine.get_global_grad_norm()
        return self._result(
            plan, before, guard, torch.stack(losses).mean(), norm, router_metrics(router_log.take())
        )

    def _skip_without_zero(self, guard: SpikeGuard) -> bool:
        """Compute the norm of stage 0; whether the step is skipped, which drops its gradients.

        At the other stages DeepSpeed computes the norm, and skips a step itself.
        """
        self._norm = self._sum_of_squares(lambda parameter: parameter.grad).sqrt()
        if bool(self._norm.isfinite()) and not guard.exceeds(self._norm):
            return False
        self._engine.zero_grad()
        self._engine.skipped_steps += 1
        return True

    def _begin_dropout(self, first: DeviceBatch) -> None:
        """Set from what the dropout masks of a step are seeded."""
        stride = first.tokens_BS.shape[0] * self._mesh.dp.size
        self._rng.begin_step(self._seed, first.position, stride)

    def _sum(self, losses: Iterable[TokenLoss]) -> Tensor:
        """The loss of micro-batches before the division, and its weight, float64 [2]."""
        sums = torch.zeros(2, dtype=torch.float64, device=self._device)
        for loss in losses:
            sums[0] += loss.loss_sum if self._per_token_loss else loss.mean()
            sums[1] += loss.num_tokens if self._per_token_loss else 1.0
        return sums

    def _clip_gradients(self) -> None:
        """Clip the gradients of stage 0."""
        assert self._norm is not None
        gradients = [p.grad for _, p in self._named_parameters if p.grad is not None]
        clip(gradients, self._norm, self._engine.gradient_clipping())

    def eval_loss(self, batches: Iterator[DeviceBatch], count: int) -> LossSum:
        self._engine.eval()
        with torch.no_grad():
            return LossSum(*self._sum([self._forward(next(batches)) for _ in range(count)]))

    @contextmanager
    def inference_model(self) -> Iterator[GPTModel]:
        assert isinstance(self.module, GPTModel), "a pipeline stage"
        self._engine.eval()
        if self._stage == 3 and not self.module.config.untie_embeddings_and_output_weights:
            # Used outside of its module. DeepSpeed finds that out in its engine's forward pass
            # only, and not while the weight is being prefetched.
            register_external_parameter(self.module, self.module.embedding.word.weight)
        with torch.no_grad(), inference_form(self.module, self._mesh):
            yield self.module

    def params_norm(self) -> float:
        squares = self._sum_of_squares(self._own_partition)
        if self._stage == 3:
            dist.all_reduce(squares, group=self._mesh.dp_sp.handle)
        return float(squares.sqrt())

    def has_finite_weights(self) -> bool:
        return self.params_norm() < LARGEST

    def snapshot(self, *, copy: bool) -> DeepSpeedSnapshot:
        save = partial(self._engine.save_checkpoint, "snapshot", tag="snapshot", save_latest=False)
        with experts_saved_by_caller(self._engine), nvme_states.as_tensors(self._engine):
            return self._files.collect(save, self._copies if copy else None)

    def load(self, folder: Path, tag: str) -> None:
        scale = self._loss_scale
        with (
            literal_folder(folder),
            experts_saved_by_caller(self._engine),
            nvme_states.as_tensors(self._engine),
            reused_states(self._engine.basic_optimizer),
            nullcontext() if scale is None else scale.keep_settings_on_load(),
        ):
            path, _ = load_checkpoint(self._engine, folder, tag)
        if path is None:
            raise user_error("checkpoint-not-loaded", folder=folder / tag)
        if hasattr(self._engine.optimizer, "clip_grad"):  # from the checkpoint, at some stages
            self._engine.optimizer.clip_grad = self._engine.gradient_clipping()
        self.settings = self._read_settings()

    def reshard(self, source: StateReader) -> None:
        Resharding(self._engine, self._stage, self._mesh, source).run()
        if self._loss_scale is not None and source.loss_scaler is not None:
            with self._loss_scale.keep_settings_on_load():
                self._engine.optimizer.loss_scaler = source.loss_scaler
        self.settings = self._read_settings()

    def _start_step(self, plan: StepPlan) -> tuple[int, bool]:
        """Set the batch size and the rates of a step.

        Returns:
            Steps that DeepSpeed has skipped so far, and whether the loss scale is exhausted.
        """
        engine = self._engine
        self._flat.begin_step(plan.num_micro_batches)
        engine.set_train_batch_size(plan.global_batch_size * self._mesh.sp.size)
        set_lr_and_weight_decay(
            engine.optimizer.param_groups,
            self._multipliers,
            plan.lr,
            plan.weight_decay,
            plan.decoupled_lr,
        )
        exhausted = self._loss_scale is not None and self._loss_scale.is_exhausted
        return engine.skipped_steps, exhausted

    def _result(
        self,
        plan: StepPlan,
        before: tuple[int, bool],
        guard: SpikeGuard,
        loss: Tensor,
        norm: Tensor | float | None,
        extras: Mapping[str, SupportsFloat],
    ) -> StepResult:
        """The result of a step.

        Args:
            plan: Plan of the step.
            before: What `_start_step` returned.
            guard: It has compared the step with its limits.
            loss: Mean loss of this data-parallel rank.
            norm: Gradient norm.
            extras: Further metrics.
        """
        skipped, rate = self._engine.skipped_steps > before[0], plan.decoupled_lr
        if guard.compared is not None:
            norm = guard.compared[1]  # DeepSpeed reports a skipped step's as infinite
        return StepResult(
            loss=loss,
            grad_norm=norm,
            skipped=skipped,
            loss_scale=None if self._loss_scale is None else self._loss_scale.value,
            loss_scale_exhausted=skipped and before[1] and not guard.is_spike,
            is_spike=guard.is_spike,
            compared=guard.compared,
            extras={**extras, **({} if rate is None else {"decoupled_learning_rate": rate})},
        )

    def _weighted(
        self, batches: Iterator[DeviceBatch], plan: StepPlan
    ) -> Iterator[tuple[DeviceBatch, Tensor | None]]:
        """The micro-batches of a step, and the factor of each one's summed loss.

        The factor is None if a micro-batch's loss is the mean over its tokens. With per-token loss
        it makes the mean over micro-batches and data-parallel ranks, which DeepSpeed takes of the
        gradients, the mean over all tokens of the step. The tokens must be counted before the first
        backward pass, so all micro-batches are read first.
        """
        truncated = _read_step(batches, plan)
        if not self._per_token_loss:
            yield from ((batch, None) for batch in truncated)
            return
        step_batches = list(truncated)
        tokens = torch.zeros((), dtype=torch.int64, device=self._device)
        for batch in step_batches:
            tokens += batch.num_counted()
        if self._mesh.dp.size > 1:
            dist.all_reduce(tokens, group=self._mesh.dp.handle)
        factor = self._mesh.dp.size * plan.num_micro_batches / tokens.clamp(min=1).float()
        yield from ((batch, factor) for batch in step_batches)

    def _factor_of_backward(self, plan: StepPlan) -> float:
        """Returns DeepSpeed's factor for a micro-batch's loss before the backward pass."""
        scale = 1.0 if self._loss_scale is None else self._loss_scale.value
        return scale / plan.num_micro_batches

    def _forward(self, batch: DeviceBatch) -> TokenLoss:
        loss: TokenLoss = self._engine(
            batch.tokens_BS, batch.labels_BS, batch.loss_mask_BS, max_documents=batch.max_documents
        )
        return loss

    def _own_partition(self, parameter: nn.Parameter) -> Tensor:
        """This data-parallel rank's ZeRO-3 partition, without padding; else the parameter."""
        if self._stage != 3:
            return parameter.data
        size, partition = parameter.ds_numel, nvme_states.partition_of(parameter)  # type: ignore[attr-defined]
        start = self._mesh.dp_sp.rank * partition.numel()
        own: Tensor = partition.flatten()[: max(0, size - start)]
        return own

    def _sum_of_squares(self, values_of: Callable[[nn.Parameter], Tensor | None]) -> Tensor:
        """Sum of squares over all parameters of the model, a float64 scalar."""
        tensors: dict[bool, list[Tensor]] = {False: [], True: []}
        for parameter, is_expert in self._counted:
            values = values_of(parameter)
            if values is not None:
                tensors[is_expert].append(values)
        squares = sum_of_squares(tensors[False], self._device)
        if tensors[True] or self._mesh.ep.size > 1:
            of_experts = sum_of_squares(tensors[True], self._device)
            if self._mesh.ep.size > 1:
                dist.all_reduce(of_experts, group=self._mesh.ep.handle)
            squares += of_experts
        if self._mesh.model.size > 1:
            dist.all_reduce(squares, group=self._mesh.model.handle)
        return squares


@contextmanager
def watch_gradients(parameters: Iterable[tuple[str, nn.Parameter]]) -> Iterator[dict[str, Tensor]]:
    """Record whether gradients are finite, as autograd computes them; see `Engine`."""
    finite: dict[str, Tensor] = {}

    def record(name: str, gradient: Tensor) -> None:
        is_finite = gradient.isfinite().all()
        finite[name] = finite.get(name, is_finite) & is_finite

    with ExitStack() as hooks:
        for name, parameter in parameters:
            hooks.callback(parameter.register_hook(partial(record, name)).remove)
        yield finite


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


def _layers_communicate(mesh: Mesh, ds_config: dict[str, Any]) -> bool:
    """Whether there are collectives in what is compiled."""
    gathers = ds_config["zero_optimization"]["stage"] == 3 or "compile" in ds_config
    return gathers or mesh.sp_tp.size > 1
