"""One stage of the GPT as DeepSpeed's PipelineModule.

Owns the stage's bounds, the tie between the copies of a tied embedding, and the stage's forward
pass. Parameters keep their canonical names, so that initial weights, shard metadata and checkpoints
do not depend on the stages. Every stage reads the micro-batches itself: only hidden states are sent
from stage to stage, and documents and lengths are known everywhere.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.pipe import topology
from deepspeed.runtime.pipe.dualpipev import DualPipeVModule
from deepspeed.runtime.pipe.module import PipelineModule
from torch import Tensor, nn

from megatron_ds.config import Config
from megatron_ds.engine.deepspeed.patches import replace_pipeline_grid
from megatron_ds.engine.device_batches import DeviceBatch
from megatron_ds.engine.step import WeightedBatch
from megatron_ds.model.gpt import GPTModel
from megatron_ds.model.output_layer import TokenLoss
from megatron_ds.model.spec.architecture import run_spec, tied_layer
from megatron_ds.model.stages import layers_per_stage, stage_slices
from megatron_ds.parallel.mesh import Mesh


class PipelineGrid(topology.PipelineParallelGrid):  # type: ignore[misc]
    """The mesh under the names that DeepSpeed's pipeline engine reads.

    DeepSpeed's own constructor creates the groups of all ranks on every rank, a second time.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._topo = topology.PipeModelDataParallelTopology(
            num_pp=mesh.pp.size, num_mp=mesh.tp.size, num_dp=mesh.dp_sp.size
        )
        self.global_rank, self.world_size = mesh.rank, mesh.world_size
        self.stage_id, self.pipe_parallel_size = mesh.pp.rank, mesh.pp.size
        self.data_parallel_id, self.data_parallel_size = mesh.dp_sp.rank, mesh.dp_sp.size
        self.slice_parallel_size = self.model_parallel_size = mesh.tp.size
        self.ds_model_rank, self.ds_model_world_size = mesh.model.rank, mesh.model.size
        self.ds_model_proc_group = mesh.model.handle
        self.dp_group, self.dp_proc_group = list(mesh.dp_sp.ranks), mesh.dp_sp.handle
        self.pp_group, self.pp_proc_group = list(mesh.pp.ranks), mesh.pp.handle
        self.slice_group, self.slice_proc_group = list(mesh.tp.ranks), mesh.tp.handle
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
        self._build_gpt, self._mesh, self._tied = build, mesh, tied
        self._stages, self._own_stages = stages, own_stages
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
        self._inputs, self.losses = [inputs() for _ in self._own_stages], []

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
        output: Tensor | TokenLoss = self.gpt(
            batch.tokens_BS,
            batch.labels_BS,
            batch.loss_mask_BS,
            max_documents=batch.max_documents,
            x_SBH=x_SBH,
            stage=self.active_phase,
        )
        return output

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
        ends, stage = self._mesh.embedding, self._mesh.pp.rank
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
        build: As for `PipelineStage`.
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
