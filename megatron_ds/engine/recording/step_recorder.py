"""Records of single steps, by which a run can be checked: the same for every layout.

Owns what is read from the passes of a recorded step: hashes of its samples and of its random
states, and norms of the activations. The norms of weights and gradients are those of `StepNorms`.
What a record holds is put around functions for the time of the step; other steps have no trace of
it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_ds.engine.deepspeed.patches import replaced
from megatron_ds.engine.device_batches import DeviceBatch, DeviceBatches
from megatron_ds.engine.norms import sum_of_squares
from megatron_ds.engine.parts import EngineParts
from megatron_ds.model.block import Block
from megatron_ds.model.gpt import EMBEDDING
from megatron_ds.parallel.mesh import Mesh
from megatron_ds.parallel.rng import MicroBatchSeed, RngStreams
from megatron_ds.train_state import StepResult

DIGEST_BYTES = 8
END = " end"
"""After the name of a layer: its random state after its forward pass."""
OTHER_LAYERS = ("embedding", "final_norm")


class StepRecorder:
    """Records the steps that --record-every names.

    Args:
        parts: Parts of the engine.
    """

    def __init__(self, parts: EngineParts) -> None:
        self._parts, self._interval = parts, parts.config.logging.record_every

    def is_due(self, iteration: int) -> bool:
        return self._interval is not None and iteration % self._interval == 0

    @contextmanager
    def recording(self) -> Iterator[_Passes]:
        """Reads what the passes of a step compute."""
        parts, passes = self._parts, _Passes(self._parts.mesh, self._parts.rng)
        read, begin = DeviceBatches.__next__, parts.rng.begin_layer
        with ExitStack() as stack:
            next_batch = partial(_then, read, passes.add_samples)
            stack.enter_context(replaced(DeviceBatches, "__next__", lambda self: next_batch(self)))
            stack.enter_context(replaced(parts.rng, "begin_layer", partial(passes.begin, begin)))
            for name, module in () if parts.is_compiled else parts.model.named_modules():
                if isinstance(module, Block) or name in OTHER_LAYERS:
                    hook = partial(passes.end, name)
                    stack.callback(module.register_forward_hook(hook).remove)
            yield passes

    def record(self, passes: _Passes, result: StepResult) -> dict[str, Any]:
        """The record of a step, but for the norms of weights and gradients. Collective."""
        values = float(result.loss), *passes.values()
        ranks = [values] * dist.get_world_size()
        dist.all_gather_object(ranks, values)
        losses, samples, states, squares = zip(*ranks, strict=True)
        of_layers = dict.fromkeys(name for rank in squares for name in rank)
        norm = None if result.grad_norm is None else float(result.grad_norm)
        return {
            "loss": math.fsum(losses) / len(losses),
            "grad_norm": norm,
            "skipped": result.skipped,
            "samples": dict(
                sorted({key: h for rank in samples for key, h in rank.items()}.items())
            ),
            "random": _hashes_of_layers({k: h for rank in states for k, h in rank.items()}),
            "layers": {
                name: math.sqrt(math.fsum(rank.get(name, 0.0) for rank in squares))
                for name in of_layers
            },
        }


class _Passes:
    """What one rank has read of the passes of a step."""

    def __init__(self, mesh: Mesh, rng: RngStreams) -> None:
        self._rng = rng
        self._counts_rows = mesh.sp_tp.rank == 0 and mesh.pp.rank == 0
        self._draws = mesh.sp_tp.rank == 0
        """Sequence-parallel ranks draw other masks, tensor-parallel ranks the same or others."""
        self._counts_layers = mesh.tp.rank == 0 or mesh.tp.sequence_parallel
        self._samples: dict[int, str] = {}
        self._states: dict[tuple[str, int], str] = {}
        self._squares: dict[str, Tensor] = {}
        self._position: int | None = None

    def values(self) -> tuple[dict[int, str], dict[tuple[str, int], str], dict[str, float]]:
        squares = {name: float(value) for name, value in self._squares.items()}
        return self._samples, self._states, squares

    def add_samples(self, batch: DeviceBatch) -> None:
        if not self._counts_rows:
            return
        tensors = (batch.tokens_BS, batch.labels_BS, batch.loss_mask_BS)
        arrays = [tensor.int().cpu().numpy() for tensor in tensors if tensor is not None]
        for row in range(batch.tokens_BS.shape[0]):
            self._samples[batch.position + row] = digest([a[row].tobytes() for a in arrays])

    def begin(
        self, begin: Callable[..., None], micro_batch: MicroBatchSeed | None, layer: int
    ) -> None:
        """Begins a layer, and hashes the random states from which it draws."""
        begin(micro_batch, layer)
        self._position = None if micro_batch is None else micro_batch.position
        if not _is_recomputed():
            self._add_state(f"layers.{layer}" if layer > EMBEDDING else OTHER_LAYERS[0])

    def end(self, name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        """After the forward pass of a layer."""
        if _is_recomputed() or not module.training:
            return
        if name not in OTHER_LAYERS[1:]:
            self._add_state(name + END)
        if self._counts_layers:
            squares = sum_of_squares([output.detach()], output.device)
            self._squares[name] = self._squares.get(name, 0.0) + squares

    def _add_state(self, name: str) -> None:
        if self._draws and self._position is not None:
            self._states[name, self._position] = digest(self._rng.states())


def digest(parts: Sequence[bytes]) -> str:
    """A short hash of bytes."""
    return hashlib.blake2b(b"".join(parts), digest_size=DIGEST_BYTES).hexdigest()


def _then(function: Callable[..., Any], see: Callable[[Any], None], *args: Any) -> Any:
    """Calls a function, and shows what it returns."""
    result = function(*args)
    see(result)
    return result


def _is_recomputed() -> bool:
    """Whether a backward pass is running, in which a forward pass is a repeated one."""
    return torch._C._current_graph_task_id() != -1


def _hashes_of_layers(states: dict[tuple[str, int], str]) -> dict[str, str]:
    """One hash for each layer, of its states in the order of the micro-batches."""
    by_layer: dict[str, list[bytes]] = {}
    for (name, _), state in sorted(states.items()):
        by_layer.setdefault(name, []).append(state.encode())
    return {name: digest(values) for name, values in by_layer.items()}
