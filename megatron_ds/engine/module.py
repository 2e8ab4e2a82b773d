"""Module that DeepSpeed trains: the model, or one pipeline stage of it as DeepSpeed's
PipelineModule.

Owns the stage's bounds, the tie between the copies of a tied embedding, and the stage's forward
pass. Parameters keep their canonical names, so that initial weights, shard metadata and checkpoints
do not depend on the stages. Every stage reads the micro-batches itself: only hidden states are sent
from stage to stage, and documents and lengths are known everywhere.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.pipe import topology
from deepspeed.runtime.pipe.dualpipev import DualPipeVModule
from deepspeed.runtime.pipe.module import PipelineModule
from torch import Tensor, nn

from megatron_ds.config import Config
from megatron_ds.engine.deepspeed.activation_checkpointing import configure_checkpointing
from megatron_ds.engine.deepspeed.patches import replace_pipeline_grid, set_hpz_group
from megatron_ds.engine.device_batches import DeviceBatch
from megatron_ds.engine.step import WeightedBatch
from megatron_ds.engine.trials import gathers_layers
from megatron_ds.model.attention.backends import AttentionOptions
from megatron_ds.model.block import Block
from megatron_ds.model.declaration.architecture import run_spec, tied_layer
from megatron_ds.model.fp8_layers import compute_in_fp8
from megatron_ds.model.gpt import ALL_LAYERS, GPTModel
from megatron_ds.model.layers import CustomParts
from megatron_ds.model.mlp import TiledMLP
from megatron_ds.model.output_layer import TokenLoss
from megatron_ds.model.stages import layers_per_stage, stage_slices
from megatron_ds.parallel.activation_checkpointing import ActivationCheckpointing
from megatron_ds.parallel.mesh import Mesh, Mpu
from megatron_ds.parallel.rng import RngStreams


class PipelineGrid(topology.PipelineParallelGrid):  # type: ignore[misc]
    """The mesh under the names that DeepSpeed's pipeline engine reads.

    DeepSpeed's own constructor creates the groups of all ranks on every rank, a second time.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._topo = topology.PipeModelDataParallelTopology(
            num_pp=mesh.pp.size, num_mp=mesh.tp.size, num_dp=mesh.replicas.size
        )
        self.global_rank = mesh.rank
        self.world_size = mesh.world_size
        self.stage_id = mesh.pp.rank
        self.pipe_parallel_size = mesh.pp.size
        self.data_parallel_id = mesh.replicas.rank
        self.data_parallel_size = mesh.replicas.size
        self.slice_parallel_size = mesh.tp.size
        self.model_parallel_size = self.slice_parallel_size
        self.ds_model_rank = mesh.model.rank
        self.ds_model_world_size = mesh.model.size
        self.ds_model_proc_group = mesh.model.handle
        self.dp_group = list(mesh.replicas.ranks)
        self.dp_proc_group = mesh.replicas.handle
        self.pp_group = list(mesh.pp.ranks)
        self.pp_proc_group = mesh.pp.handle
        self.slice_group = list(mesh.tp.ranks)
        self.slice_proc_group = mesh.tp.handle
        self.is_first_stage = mesh.pp.rank == 0
        self.is_last_stage = mesh.pp.rank == mesh.pp.size - 1


class PipelineStage(PipelineModule):  # type: ignore[misc]
    """The layers of this rank's stages.

    Args:
        build: Builds the part of the model that has some of the layers of `layer_specs`.
        stages: Layers of each stage in `layer_specs`.
        own_stages: This rank's stages, in the order of a forward pass.
        tied: Name of the first stage's layer whose weights the last one has, too.
        mesh: Mesh of this process.
    """

    gpt: GPTModel
    active_phase = 0
    """Index of this rank's stage that a forward pass computes; set by the engine."""

    def __init__(
        self,
        build: Callable[[Sequence[slice]], GPTModel],
        stages: Sequence[slice],
        own_stages: tuple[int, ...],
        *,
        tied: str | None,
        mesh: Mesh,
    ) -> None:
        self._build_gpt = build
        self._mesh = mesh
        self._tied = tied
        self._stages = stages
        self._own_stages = own_stages
        self._inputs: list[Iterator[WeightedBatch]] = []
        self.losses: list[TokenLoss] = []
        """Loss of each micro-batch of an evaluation, on the last stage."""
        grid = PipelineGrid(mesh)
        with replace_pipeline_grid(grid), contextlib.redirect_stdout(io.StringIO()):
            super().__init__(layers=range(stages[-1].stop), topology=grid.topology())

    def feed(self, inputs: Callable[[], Iterator[WeightedBatch]]) -> None:
        """Set the micro-batches of the next forward passes.

        Args:
            inputs: Called for each of this rank's stages.
        """
        self._inputs = [inputs() for _ in self._own_stages]
        self.losses = []

    def forward(self, received: Tensor) -> Tensor:
        """Compute the stage for the next micro-batch.

        Args:
            received: Output [S, B, H] of the previous stage; ignored by the first one.

        Returns:
            Hidden states [S, B, H] for the next stage; on the last one the loss, a scalar.
        """
        phase = self.active_phase
        batch, weight = next(self._inputs[phase])
        output = self.compute(batch, None if self._own_stages[phase] == 0 else received)
        if isinstance(output, Tensor):
            return output
        if not self.training:
            self.losses.append(output)
        loss, extras = output.weighted(weight)
        if self.training:
            self.gpt.router_log.add(extras)
        return loss

    def compute(self, batch: DeviceBatch, x_SBH: Tensor | None) -> Tensor | TokenLoss:
        """Compute the active stage's layers for a micro-batch."""
        return self.gpt.compute_stage(
            self.active_phase,
            x_SBH,
            batch.tokens_BS,
            batch.labels_BS,
            batch.loss_weights_BS,
            documents=batch.documents,
        )

    def train(self, mode: bool = True) -> PipelineStage:
        super().train(mode)
        self.gpt.train(mode)
        return self

    def _partition_layers(self, method: str) -> None:
        """DeepSpeed's hook: set the stages' bounds in the list of layers."""
        stages = [(part.start, part.stop) for part in self._stages]
        self.parts = [0, *(end for _, end in stages)]
        self.phase_bounds = [stages[stage] for stage in self._own_stages]
        self._set_bounds(*self.phase_bounds[0])

    def _build(self) -> None:
        """DeepSpeed's hook: build the layers of this rank."""
        gpt = self._build_gpt([slice(*bounds) for bounds in self.phase_bounds])
        # Not as a submodule, whose name would be a prefix of all parameters' names.
        self.__dict__["gpt"] = gpt
        for name, layer in gpt.named_children():
            self.add_module(name, layer)
        for parameter in self.parameters():
            parameter.ds_pipe_replicated = False

    def _index_tied_modules(self) -> dict[str, dict[str, Any]]:
        """DeepSpeed's hook: which ranks share a module. The copy of the last stage is not counted
        in norms."""
        ends = self._mesh.embedding
        stage = self._mesh.pp.rank
        if self._tied is None or stage not in (0, self._mesh.pp.size - 1):
            return {}
        weights = dict((module := self.get_submodule(self._tied)).named_parameters())
        for parameter in weights.values():
            parameter.ds_pipe_replicated = stage > 0
        comm = {"ranks": list(ends.ranks), "group": ends.handle, "module": module}
        return {self._tied: {**comm, "weight_attr": list(weights)}}

    @torch.no_grad()
    def _synchronize_tied_weights(self) -> None:
        """DeepSpeed's hook: make the copies equal. Not an operation that autograd records."""
        super()._synchronize_tied_weights()

    def get_tied_weights_and_groups(self) -> list[tuple[nn.Parameter, dist.ProcessGroup]]:
        """The shared parameters of this stage, and the group over which gradients are summed."""
        comms = self.tied_comms.values()
        return [(weight, comm["group"]) for comm in comms for weight in comm["module"].parameters()]


class FoldedStages(PipelineStage, DualPipeVModule):  # type: ignore[misc]
    """The two stages of a rank in DeepSpeed's DualPipeV schedule.

    The stages are folded: the first rank has the first stage and the last one, so that both ends of
    a tied embedding use one copy.
    """

    def activate_phase(self, phase: int) -> None:
        """DeepSpeed's hook: which of the two stages the next forward pass computes."""
        self.active_phase = phase

    def _index_tied_modules(self) -> dict[str, dict[str, Any]]:
        return {}


def build_stage(
    build: Callable[[Sequence[slice]], GPTModel], config: Config, mesh: Mesh
) -> PipelineStage:
    """Build this rank's stages. Collective.

    Args:
        build: See `PipelineStage`.
        config: Complete configuration of the run.
        mesh: Mesh of this process.
    """
    rank_stages = config.parallel.stages_of_ranks[mesh.pp.rank]
    layers = layers_per_stage(config.model, config.parallel, config.moe)
    cls = PipelineStage if len(rank_stages) == 1 else FoldedStages
    return cls(
        build,
        stage_slices(run_spec(config), layers),
        rank_stages,
        tied=tied_layer(config.model),
        mesh=mesh,
    )


@dataclass(frozen=True)
class ModuleBuilder:
    """Builds the layers of this rank."""

    config: Config
    """Configuration of the first phase."""
    mesh: Mesh
    rng: RngStreams
    """Random number generators for dropout."""
    attention: AttentionOptions
    init_weights: bool
    """Whether initial weights are drawn."""
    parts: CustomParts
    """Replacements for parts of the model."""

    def build(self, ds_config: dict[str, Any]) -> tuple[GPTModel | PipelineStage, GPTModel]:
        """Build what DeepSpeed trains, a model or a pipeline stage, and the model in it."""
        module: GPTModel | PipelineStage
        with _zero3_init_context(ds_config, self.mesh):
            if self.mesh.pp.size > 1:
                module = build_stage(self._model, self.config, self.mesh)
                model = module.gpt
            else:
                module = self._model(ALL_LAYERS)
                model = module
        whole = list[type[nn.Module]]()
        if self.config.recompute.tiled_mlp and ds_config["zero_optimization"]["stage"] == 3:
            whole = [TiledMLP]  # gathered once for all of its tiles
        elif gathers_layers(self.config, ds_config):
            whole = [Block]
        if whole:
            deepspeed.utils.set_z3_leaf_modules(model, whole, raise_if_not_found=False)
        return module, model

    def _model(self, stages: Sequence[slice]) -> GPTModel:
        config = self.config
        checkpoint = None
        if config.recompute.is_by_deepspeed:
            num_layers = config.model.num_layers
            mpu = Mpu(self.mesh)
            checkpoint = configure_checkpointing(config.recompute, num_layers, mpu, self.rng)
        model = GPTModel(
            config.model,
            mesh=self.mesh,
            rng=self.rng,
            seed=config.runtime.seed if self.init_weights else None,
            checkpointing=ActivationCheckpointing(config.recompute, self.rng, checkpoint),
            attention=self.attention,
            moe=config.moe,
            stages=stages,
            parts=self.parts,
        )
        compute_in_fp8(model, config.precision)
        return model


def _zero3_init_context(ds_config: dict[str, Any], mesh: Mesh) -> Any:
    """Context in which ZeRO-3 partitions each parameter when it is created.

    No rank then holds the complete model. The group must be passed: by default DeepSpeed partitions
    over all ranks, which mixes the shards of different tensor-parallel ranks without an error.
    """
    if ds_config["zero_optimization"]["stage"] != 3:
        return nullcontext()
    # The dtype comes from ds_config: DeepSpeed replaces one passed here by bf16 on a device
    # without fp16.
    size = ds_config["zero_optimization"]["zero_hpz_partition_size"]
    return deepspeed.zero.Init(
        config_dict_or_path=ds_config,
        mpu=Mpu(mesh),
        data_parallel_group=mesh.replicas.handle,
        zero_param_parallel_group=set_hpz_group(mesh.replicas, size),
    )
