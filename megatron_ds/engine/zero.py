"""A DeepSpeed ZeRO engine behind the `Engine` protocol.

Owns the accumulation boundary, the rates of a step, and the gradient norm where DeepSpeed gives
none. It knows nothing of schedules, logs or checkpoints' names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from megatron_ds.data.micro_batches import Batch
from megatron_ds.engine.ds_checkpoint_io import SafeCheckpointEngine
from megatron_ds.engine.loss_scaler import LossScale
from megatron_ds.engine.param_groups import reset_cpu_adam_beta_powers, set_lr_and_weight_decay
from megatron_ds.engine.readback import States, Values, state_bytes
from megatron_ds.model.output_layer import TokenLoss
from megatron_ds.parallel.mesh import Mesh
from megatron_ds.parallel.rng import RngStreams
from megatron_ds.parallel.sharding import shard_spec
from megatron_ds.train_state import StepPlan, StepResult

SQUARED_AT_ONCE = 2**20
"""Elements of a norm that are in double precision at a time."""


class ZeroEngine:
    """ZeRO stages 0 to 3 without a pipeline.

    engine: what deepspeed.initialize gave. seed: of dropout. device: where batches are put.
    """

    def __init__(
        self,
        engine: Any,
        *,
        ds_config: dict[str, Any],
        effective: Values,
        mesh: Mesh,
        rng: RngStreams,
        seed: int,
        device: torch.device,
    ) -> None:
        self._engine = engine
        self._files = SafeCheckpointEngine(engine)
        self._ds_config = ds_config
        self._effective = effective
        self._mesh = mesh
        self._rng = rng
        self._seed = seed
        self._device = device
        self._stage: int = ds_config["zero_optimization"]["stage"]
        self._loss_scale = LossScale(engine.optimizer) if engine.fp16_enabled() else None

    @property
    def module(self) -> nn.Module:
        module: nn.Module = self._engine.module
        return module

    @property
    def ds_config(self) -> dict[str, Any]:
        return self._ds_config

    @property
    def settings(self) -> Values:
        return self._effective

    def state_bytes(self) -> States:
        return state_bytes(self._engine)

    def train_step(self, batches: Iterator[Batch], plan: StepPlan) -> StepResult:
        engine = self._engine
        engine.train()
        engine.set_train_batch_size(plan.global_batch_size)
        set_lr_and_weight_decay(engine.optimizer.param_groups, plan.lr, plan.weight_decay)
        skipped_before = engine.skipped_steps
        losses = []
        norm: torch.Tensor | float | None = None
        dropped = False
        spent = self._loss_scale is not None and self._loss_scale.is_exhausted
        for index in range(plan.num_micro_batches):
            last = index == plan.num_micro_batches - 1
            # DeepSpeed finds the boundary by counting micro-steps since the run began, which goes
            # wrong for good as soon as their number per step changes.
            engine.set_gradient_accumulation_boundary(last)
            batch = next(batches).truncated(plan.seq_length)
            if index == 0:
                stride = batch.tokens_BS.shape[0] * self._mesh.dp.size
                self._rng.begin_step(self._seed, batch.position, stride)
            loss = self._forward(batch)
            engine.backward(loss)
            losses.append(loss.detach())
            if last and self._stage == 0:
                norm = self._gradient_norm()
                dropped = not bool(norm.isfinite())
            if dropped:
                # The other stages drop a step without a finite gradient by themselves.
                engine.zero_grad()
                break
            if last:
                reset_cpu_adam_beta_powers(engine.basic_optimizer)
            engine.step()
        if self._stage != 0:
            norm = engine.get_global_grad_norm()
        skipped = dropped or engine.skipped_steps > skipped_before
        return StepResult(
            loss=torch.stack(losses).mean(),
            grad_norm=None if norm is None else float(norm),
            skipped=skipped,
            loss_scale=None if self._loss_scale is None else self._loss_scale.value,
            loss_scale_exhausted=skipped and spent,
        )

    def eval_loss(self, batch: Batch) -> torch.Tensor:
        self._engine.eval()
        with torch.no_grad():
            return self._forward(batch).detach()

    def params_norm(self) -> float:
        squares = self._sum_of_squares(self._local_shard)
        if self._stage == 3:
            dist.all_reduce(squares, group=self._mesh.dp.handle)
        return float(squares.sqrt())

    def save(self, folder: Path, tag: str) -> None:
        with self._files.errors_at_the_end():
            self._engine.save_checkpoint(str(folder), tag=tag, save_latest=False)

    def load(self, folder: Path, tag: str) -> None:
        with (
            nullcontext() if self._loss_scale is None else self._loss_scale.keep_settings_on_load()
        ):
            path, _ = self._engine.load_checkpoint(str(folder), tag=tag)
        if path is None:
            raise ValueError(f"DeepSpeed could not load the checkpoint {folder / tag}")

    def _forward(self, batch: Batch) -> torch.Tensor:
        tensors = (batch.tokens_BS, batch.labels_BS, batch.loss_mask_BS)
        moved = (tensor.to(self._device, non_blocking=True) for tensor in tensors)
        loss: TokenLoss = self._engine(*moved)
        return loss.mean()

    def _gradient_norm(self) -> torch.Tensor:
        """Norm of the averaged gradient at stage 0, for which DeepSpeed reports none."""
        return self._sum_of_squares(lambda parameter: parameter.grad).sqrt()

    def _local_shard(self, parameter: nn.Parameter) -> torch.Tensor:
        """What this data-parallel rank holds of a parameter: under ZeRO-3 a slice, else all."""
        if self._stage != 3:
            return parameter.data
        whole, piece = parameter.ds_numel, parameter.ds_tensor  # type: ignore[attr-defined]
        start = self._mesh.dp.rank * piece.numel()
        own: torch.Tensor = piece.flatten()[: max(0, whole - start)]
        return own

    def _sum_of_squares(self, part: Callable[[nn.Parameter], torch.Tensor | None]) -> torch.Tensor:
        """Sum over the tensor-parallel ranks of the squares of `part` of every parameter.

        A parameter cut over the tensor-parallel ranks counts on each of them, a replicated one on
        the first only.
        """
        first = self._mesh.tp.rank == 0
        squares = torch.zeros((), dtype=torch.float64, device=self._device)
        for parameter in self.module.parameters():
            values = part(parameter)
            if values is not None and (first or shard_spec(parameter) is not None):
                # In pieces: the copies in double precision are four times the gradient's size.
                for piece in values.to(self._device).flatten().split(SQUARED_AT_ONCE):
                    squares += piece.double().square().sum()
        if self._mesh.tp.size > 1:
            dist.all_reduce(squares, group=self._mesh.tp.handle)
        return squares
