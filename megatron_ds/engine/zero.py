"""The engine of a run, by DeepSpeed: what the training loop calls.

Owns what is read from the engine, saved and loaded; steps and passes have modules of their own.
Knows nothing of schedules, logs and checkpoint names.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from itertools import chain
from pathlib import Path

import torch
from deepspeed.runtime.zero import register_external_parameter
from torch import Tensor, nn

from megatron_ds.config import ModelConfig
from megatron_ds.config.problems import user_error
from megatron_ds.data.micro_batches import Batch
from megatron_ds.engine.deepspeed import nvme_states
from megatron_ds.engine.deepspeed.checkpoint_io import (
    DeepSpeedSnapshot,
    SafeCheckpointEngine,
    load_checkpoint,
)
from megatron_ds.engine.deepspeed.expert_files import ExpertFiles
from megatron_ds.engine.deepspeed.partitions import FlatPartition, read_partitions
from megatron_ds.engine.deepspeed.patches import experts_saved_by_caller, literal_folder
from megatron_ds.engine.deepspeed.tensor_files import LARGEST
from megatron_ds.engine.device_batches import DeviceBatch, DeviceBatches
from megatron_ds.engine.measures import StepMeasures
from megatron_ds.engine.norms import is_counted, norm_of
from megatron_ds.engine.optimizers.param_groups import keep_settings_on_load, reused_states
from megatron_ds.engine.parts import EngineParts
from megatron_ds.engine.pipeline import PipelinePasses
from megatron_ds.engine.readback import StateBytes, check, state_bytes
from megatron_ds.engine.regions import Open
from megatron_ds.engine.states.host_staging import HostStaging
from megatron_ds.engine.states.replicas import find_different_weights
from megatron_ds.engine.states.resharding import Resharding
from megatron_ds.engine.states.state_reader import StateReader
from megatron_ds.engine.step import ModelPasses, StepControl
from megatron_ds.model.experts.router import routers_with_bias, update_biases
from megatron_ds.model.fp8_layers import rounded_weights
from megatron_ds.model.gpt import GPTModel, inference_form
from megatron_ds.parallel.collectives import gather_objects
from megatron_ds.parallel.sharding import shard_spec, states_of
from megatron_ds.parallel.weights import ShardSpec
from megatron_ds.train_state import LossSum, StepPlan, StepResult


class ZeroEngine:
    """Trains, evaluates, saves and loads one model. Every method is collective unless noted.

    For ZeRO stages 0 to 3, with or without pipeline parallelism.

    Args:
        parts: Parts of the engine.

    Attributes:
        ds_config: The complete DeepSpeed configuration.
        startup_warnings: Warnings about avoidable slowness of the run.
        module: The layers of this rank.
        model: The model or, with pipeline parallelism, its part in the stages of this rank.
        settings: Settings in effect, read from the engine when it was built or last loaded.
    """

    def __init__(self, parts: EngineParts) -> None:
        engine = parts.engine
        config = parts.config
        self._mesh = parts.mesh
        self._parts = parts
        self._engine = engine
        self._stage = parts.stage
        saves_optimizer = not config.checkpoint.no_save_optim
        is_replicated = saves_optimizer and not engine.zero_optimization()
        replicated = engine.basic_optimizer if is_replicated else None
        self._experts = ExpertFiles(engine.module, parts.mesh, replicated)
        self._files = SafeCheckpointEngine(engine, self._experts, saves_optimizer=saves_optimizer)
        self._copies = HostStaging()
        self.ds_config = parts.ds_config
        self.startup_warnings = parts.startup_warnings
        self.module: nn.Module = engine.module
        self.model = parts.model
        self.settings = check(parts)
        self._steps = StepControl(parts)
        self._passes = (PipelinePasses if self._mesh.pp.size > 1 else ModelPasses)(self._steps)
        self._measures = StepMeasures(parts)
        self._biased_routers = routers_with_bias(parts.model)
        # At stage 3 they would take the memory that partitioning saves.
        self._rounded = None if self._stage == 3 else rounded_weights(parts.model)
        keep_settings_on_load(engine.basic_optimizer)

    def parameter_count(self) -> int:
        """Number of parameters of this model-parallel rank, all ZeRO partitions included. Local."""
        return sum(getattr(p, "ds_numel", p.numel()) for _, p in self._steps.norms.parameters)

    def shard_specs(self) -> dict[str, ShardSpec]:
        """Sharding of the complete model's tensor-parallel parameters, by canonical name."""
        specs = {
            name: spec
            for name, parameter in self._steps.norms.parameters
            if (spec := shard_spec(parameter)) is not None
        }
        stages = gather_objects(specs, self._mesh.pp)
        return {name: spec for stage in stages for name, spec in stage.items()}

    def sharded_experts(self) -> tuple[str, ...]:
        """Names of the complete model's parameters that only some data-parallel ranks have."""
        return tuple(chain.from_iterable(gather_objects(self._experts.names, self._mesh.pp)))

    def partitions(self) -> list[FlatPartition]:
        """Returns the locations of parameters in this rank's flat optimizer tensors. Local."""
        partitions = read_partitions(self._engine, self._stage)
        return list(chain.from_iterable(gather_objects(partitions, self._mesh.pp)))

    def state_bytes(self) -> StateBytes:
        """Bytes of this process's tensors that outlive a step. Local."""
        return state_bytes(self._engine)

    @contextmanager
    def watch_gradients(self, *, is_wrong: bool = False) -> Iterator[list[tuple[str, Tensor]]]:
        """Record the norms of the parameters' own gradients, before they are averaged.

        Local. Yields a list that backward passes inside the context fill, in their order, with
        canonical names and unsynchronized tensors.

        Args:
            is_wrong: Replace the first gradient that this rank counts by one that is not finite.
        """
        norms: list[tuple[str, Tensor]] = []

        def record(name: str, counts: bool, gradient: Tensor) -> Tensor | None:
            nonlocal is_wrong
            wrong = gradient * math.nan if is_wrong and counts else None
            is_wrong = is_wrong and not counts
            norms.append((name, norm_of(gradient if wrong is None else wrong)))
            return wrong

        with ExitStack() as hooks:
            for name, parameter in self._steps.norms.parameters:
                hook = partial(record, name, is_counted(parameter, self._mesh))
                hooks.callback(parameter.register_hook(hook).remove)
            yield norms

    @property
    def losses(self) -> list[Tensor]:
        """The losses of this rank's micro-batches in the last step, unsynchronized; with pipeline
        stages their mean, on ranks that compute it. Local."""
        return self._steps.guard.losses

    def undo_skipped_step(self) -> None:
        """Set the counters and the loss scale back to those before the last step. Local."""
        self._steps.undo()

    def find_different_weights(self) -> tuple[str, Mapping[int, str]] | None:
        """Find a parameter, or state of a layer, that differs between the ranks that have a copy of
        it, by name, with the hosts of its wrong ranks. Not at stage 3."""
        has_stages = self._mesh.pp.size > 1
        shared = self._engine.module.get_tied_weights_and_groups() if has_stages else ()
        tied = [weight for weight, _ in shared]
        weights = chain(self._steps.norms.parameters, states_of(self.module).items())
        return find_different_weights(weights, self._mesh, tied)

    def first_nonfinite_weight(self) -> str | None:
        """The first parameter of this rank that is not finite; None if all are finite. Local."""
        return self._steps.norms.first_nonfinite()

    def step_times(self) -> dict[str, float]:
        """Milliseconds of parts of the steps since the last call, by name. Local; waits for the
        device. Empty without --timing-log-level."""
        return self._measures.timers.take()

    def marked(self, open_region: Open) -> AbstractContextManager[None]:
        """Open a named region around each part of the steps inside the context. Local.

        Args:
            open_region: Called with the name of a part, such as "layer 3" or "all_reduce[tp]".
        """
        return self._measures.marked(open_region)

    def device_batches(self, batches: Iterator[Batch]) -> DeviceBatches:
        """Copy micro-batches to the device, each while the one before is computed. Local; taking
        a micro-batch is collective over the tensor-parallel group."""
        packing = self.model.attention.packing
        return DeviceBatches(batches, self._parts.device, self._mesh.same_batch, packing=packing)

    def enter_phase(self, config: ModelConfig) -> None:
        """Continue with the sequence length and the rotary positions of a stage. Local."""
        self.model.enter_phase(config)

    def train_step(
        self,
        batches: Iterator[DeviceBatch],
        plan: StepPlan,
        before_update: Callable[[], object] = int,
    ) -> StepResult:
        """Take one optimizer step over `plan.num_micro_batches` batches.

        Args:
            batches: Micro-batches of this rank.
            plan: Plan of the step.
            before_update: Called on every rank between the passes and the step of the optimizer.

        Returns:
            The result of the step. Its loss, which is this data-parallel rank's, and its norm are
            unsynchronized device tensors.
        """

        def take() -> StepResult:
            self._steps.begin(plan, before_update)
            with nullcontext() if self._rounded is None else self._rounded.kept():
                loss = self._passes.train(batches, plan)
            result = self._steps.result(plan, loss)
            update_biases(self._biased_routers, self._mesh.dp, is_applied=not result.skipped)
            return result

        return self._measures.measure(plan.iteration, take)

    def eval_loss(self, batches: Iterator[DeviceBatch], count: int) -> LossSum:
        """Compute this rank's loss of `count` micro-batches, without gradients and dropout."""
        return LossSum(*self._passes.evaluate(batches, count))

    @contextmanager
    def inference_model(self) -> Iterator[GPTModel]:
        """The model in evaluation mode, in the form in which text is scored and generated.

        Inside the context it may be called with any number of tokens. With ZeRO-3 and with experts
        on several ranks, all data-parallel ranks must call it equally often. Not with pipeline
        stages.
        """
        assert isinstance(self.module, GPTModel), "a pipeline stage"
        self._engine.eval()
        if self._stage == 3 and not self.module.config.untie_embeddings_and_output_weights:
            # Used outside of its module. DeepSpeed finds that out in its engine's forward pass
            # only, and not while the weight is being prefetched.
            register_external_parameter(self.module, self.module.embedding.word.weight)
        with torch.no_grad(), inference_form(self.module, self._mesh):
            yield self.module

    def params_norm(self) -> float:
        """Compute the L2 norm of all parameters, each counted once."""
        return self._steps.norms.of_parameters()

    def has_finite_weights(self) -> bool:
        """Whether all weights of all ranks are finite, the same on every rank."""
        return all(gather_objects(self.params_norm() < LARGEST))

    def snapshot(self, *, copy: bool) -> DeepSpeedSnapshot:
        """Collect what this rank writes of a checkpoint. Touches no files of checkpoints.

        Args:
            copy: Copy the states to host memory. They then stay as at this moment, and may be
                written while training continues, but before the next copy. Otherwise they must be
                written before the next step.
        """
        save = partial(self._engine.save_checkpoint, "snapshot", tag="snapshot", save_latest=False)
        with experts_saved_by_caller(self._engine), nvme_states.as_tensors(self._engine):
            return self._files.collect(save, self._copies if copy else None)

    def load(self, folder: Path, tag: str) -> None:
        """Restore weights and optimizer states from folder/tag; settings stay this run's.

        Raises:
            UserError: If a file is damaged, or holds anything but tensors and plain values; or if
                the engine then does not have the configured settings.
        """
        scale = self._steps.loss_scale
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
        self.settings = check(self._parts)

    def reshard(self, source: StateReader) -> None:
        """Restore weights and optimizer states that any layout saved; settings stay this run's.

        Args:
            source: States of a checkpoint.

        Raises:
            UserError: If the checkpoint has other parameters.
        """
        Resharding(self._engine, self._stage, self._mesh, source).run()
        scale = self._steps.loss_scale
        if scale is not None and source.loss_scaler is not None:
            with scale.keep_settings_on_load():
                self._engine.optimizer.loss_scaler = source.loss_scaler
        self.settings = check(self._parts)
