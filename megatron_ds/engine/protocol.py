"""The interface between the training loop and an engine, with the values that it exchanges."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, SupportsFloat

from torch import Tensor, nn

from megatron_ds.config.problems import Problem
from megatron_ds.data.micro_batches import Batch
from megatron_ds.engine.deepspeed.partitions import FlatPartition
from megatron_ds.engine.device_batches import DeviceBatch, DeviceBatches
from megatron_ds.engine.regions import Open
from megatron_ds.engine.states.state_reader import StateReader
from megatron_ds.fileio.atomic import FileRecord
from megatron_ds.model.gpt import GPTModel
from megatron_ds.parallel.weights import ShardSpec
from megatron_ds.train_state import StepPlan, StepResult

ON_DEVICE, ON_HOST = "device", "host"
StateBytes = dict[str, dict[str, int]]
"""ON_DEVICE or ON_HOST -> kind of state -> bytes of this process."""


@dataclass(frozen=True)
class LossScaleSettings:
    """Loss scaling of fp16."""

    scale: float
    """Static scale, or the first one of a dynamic scale."""
    window: int | None = None
    """Steps without an overflow after which a dynamic scale is raised; None for a static scale."""
    hysteresis: int = 1
    minimum: float = 1.0

    def __str__(self) -> str:
        if self.window is None:
            return f"static {self.scale:g}"
        return (
            f"dynamic from {self.scale:g}, window {self.window}, hysteresis {self.hysteresis}, "
            f"at least {self.minimum:g}"
        )


@dataclass(frozen=True)
class EngineSettings:
    """Settings in effect. Data types are names such as "float32"; devices "none", "cpu", "nvme"."""

    zero_stage: int
    dp_size: int
    """Ranks over which gradients are averaged, the sequence-parallel ones included."""
    accumulation_steps: int
    """Micro-batches of each data-parallel rank per step, at the final batch size."""
    optimizer: str
    """Class of the optimizer, and whether it is the fused kernel."""
    betas: tuple[float, float] | None
    """Betas of AdamW (Muon's, too) or Lion; None for others."""
    epsilon: float | None
    """Epsilon of AdamW (Muon's, too); None for others."""
    momentum: float | None
    """Momentum of SGD or Muon; None for other optimizers."""
    weight_decay: tuple[float, ...]
    """Weight decay of each parameter group."""
    clip_grad: float
    param_dtype: str
    accumulation_dtype: str
    """Type in which gradients of micro-batches are summed."""
    reduction_dtype: str
    """Type in which gradients are averaged over data-parallel ranks."""
    master_dtype: str
    """Type of the master weights and of the optimizer states."""
    optimizer_offload: str
    param_offload: str
    loss_scale: LossScaleSettings | None
    """None without fp16."""
    orthogonalized: int | None = None
    """Parameters that Muon updates; None for other optimizers."""
    hpz_size: int = 1
    """Ranks that share a second copy of the parameters (hpZ); 1 without one."""
    passed_keys: tuple[str, ...] = ()
    """Keys of `engine.ds_config.passthrough.PASSED` that are in effect."""


class LossSum(NamedTuple):
    """Loss of several micro-batches on one data-parallel rank, before the division."""

    total: SupportsFloat
    """Sum of the micro-batches' mean losses in nats per token or, with per-token loss, of all
    tokens' losses. An unsynchronized device tensor, as the weight."""
    weight: SupportsFloat
    """Number of micro-batches or, with per-token loss, of counted tokens."""


class Snapshot(Protocol):
    """One rank's part of a checkpoint: the states of one moment of the run."""

    @property
    def copied_bytes(self) -> int:
        """Bytes of the copy; 0 without one."""

    def write(self, folder: Path) -> Mapping[str, FileRecord]:
        """Write the files of this rank and wait until they are on the disk. Local, in any thread.

        Args:
            folder: Folder of the checkpoint, which need not exist.

        Returns:
            What was written, by path relative to the folder.

        Raises:
            OSError: If the disk failed, or the write was cancelled.
        """

    def cancel(self) -> None:
        """Let a write in another thread end soon, with an error."""


class Engine(Protocol):
    """Trains, evaluates, saves and loads one model. Every method is collective unless noted."""

    @property
    def ds_config(self) -> dict[str, Any]:
        """The complete DeepSpeed configuration. Local."""

    @property
    def settings(self) -> EngineSettings:
        """Settings in effect, read from the engine when it was built or last loaded. Local."""

    @property
    def module(self) -> nn.Module:
        """The layers of this rank. Local."""

    @property
    def model(self) -> GPTModel:
        """The model or, with pipeline parallelism, its part in the stages of this rank. Local."""

    @property
    def startup_warnings(self) -> tuple[Problem, ...]:
        """Warnings about avoidable slowness of the run. Local."""

    def parameter_count(self) -> int:
        """Number of parameters of this model-parallel rank, all ZeRO partitions included. Local."""

    def shard_specs(self) -> dict[str, ShardSpec]:
        """Sharding of the complete model's tensor-parallel parameters, by canonical name."""

    def sharded_experts(self) -> tuple[str, ...]:
        """Names of the complete model's parameters that only some data-parallel ranks have."""

    def partitions(self) -> list[FlatPartition]:
        """Returns the locations of parameters in this rank's flat optimizer tensors. Local."""

    def state_bytes(self) -> StateBytes:
        """Bytes of this process's tensors that outlive a step. Local."""

    def watch_gradients(self) -> AbstractContextManager[dict[str, Tensor]]:
        """Record which parameters' own gradients are finite, before they are averaged.

        Local. Yields a mapping that backward passes inside the context fill, in their order:
        canonical name -> unsynchronized boolean tensor.
        """

    def step_times(self) -> dict[str, float]:
        """Milliseconds of parts of the steps since the last call, by name. Local; waits for the
        device. Empty without --timing-log-level."""

    def marked(self, open_region: Open) -> AbstractContextManager[None]:
        """Open a named region around each part of the steps inside the context. Local.

        Args:
            open_region: Called with the name of a part, such as "layer 3" or "all_reduce[tp]".
        """

    def device_batches(self, batches: Iterator[Batch]) -> DeviceBatches:
        """Copy micro-batches to the device, each while the one before is computed. Local; taking
        a micro-batch is collective over the tensor-parallel group."""

    def train_step(self, batches: Iterator[DeviceBatch], plan: StepPlan) -> StepResult:
        """Take one optimizer step over `plan.num_micro_batches` batches.

        Returns:
            The result of the step. Its loss, which is this data-parallel rank's, and its norm are
            unsynchronized device tensors.
        """

    def eval_loss(self, batches: Iterator[DeviceBatch], count: int) -> LossSum:
        """Compute this rank's loss of `count` micro-batches, without gradients and dropout."""

    def inference_model(self) -> AbstractContextManager[GPTModel]:
        """The model in evaluation mode, in the form in which text is scored and generated.

        Inside the context it may be called with any number of tokens. With ZeRO-3 and with experts
        on several ranks, all data-parallel ranks must call it equally often. Not with pipeline
        stages.
        """

    def params_norm(self) -> float:
        """Compute the L2 norm of all parameters, each counted once."""

    def has_finite_weights(self) -> bool:
        """Whether the weights are finite. Collective. Not checked where they are on a disk."""

    def snapshot(self, *, copy: bool) -> Snapshot:
        """Collect what this rank writes of a checkpoint. Touches no files of checkpoints.

        Args:
            copy: Copy the states to host memory. They then stay as at this moment, and may be
                written while training continues, but before the next copy. Otherwise they must be
                written before the next step.
        """

    def load(self, folder: Path, tag: str) -> None:
        """Restore weights and optimizer states from folder/tag; settings stay this run's.

        Raises:
            UserError: If a file is damaged, or holds anything but tensors and plain values; or if
                the engine then does not have the configured settings.
        """

    def reshard(self, source: StateReader) -> None:
        """Restore weights and optimizer states that any layout saved; settings stay this run's.

        Args:
            source: States of a checkpoint.

        Raises:
            UserError: If the checkpoint has other parameters.
        """
