"""Records of single steps, by which a run can be checked: the same for every layout.

Owns what is read from the passes of a recorded step: hashes of its samples and of its random
states, and norms of the activations. `StepNorms` computes the norms of weights and gradients.
Functions are wrapped during the recorded step only; other steps are unchanged.
"""

from __future__ import annotations

import hashlib
import math
from collections import ChainMap
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megatron_ds.engine.deepspeed.patches import replaced
from megatron_ds.engine.device_batches import DeviceBatch, DeviceBatches
from megatron_ds.engine.norms import sum_of_squares
from megatron_ds.engine.parts import EngineParts
from megatron_ds.model.block import Block
from megatron_ds.model.gpt import EMBEDDING
from megatron_ds.parallel.collectives import gather_objects
from megatron_ds.parallel.mesh import Mesh
from megatron_ds.parallel.rng import MicroBatchSeed, RngStreams
from megatron_ds.train_state import StepResult

DIGEST_BYTES = 8
LAST_BIT = 30
"""Bit of an id, in the hash of a sample, that is set if the file ends the document there."""
END = " end"
"""Suffix of a layer's name in the entry of the random state after its forward pass."""
OTHER_LAYERS = ("embedding", "final_norm")


@contextmanager
def recording(parts: EngineParts) -> Iterator[StepRecorder]:
    """Records what the passes of a step compute.

    Args:
        parts: Parts of the engine.
    """
    ends_by_file = parts.config.data.document_boundaries == "idx"
    recorder = StepRecorder(parts.mesh, parts.rng, ends_by_file=ends_by_file)
    read = DeviceBatches.__next__
    begin = parts.rng.begin_layer
    with ExitStack() as stack:
        read_and_hash = recorder.reading(read)
        stack.enter_context(replaced(DeviceBatches, "__next__", read_and_hash))
        stack.enter_context(replaced(parts.rng, "begin_layer", partial(recorder.begin, begin)))
        for name, module in () if parts.is_compiled else parts.model.named_modules():
            if isinstance(module, Block) or name in OTHER_LAYERS:
                hook = partial(recorder.end, name)
                stack.callback(module.register_forward_hook(hook).remove)
        yield recorder


class StepRecorder:
    """Reads what one rank computes in a step.

    Args:
        mesh: Mesh of this process.
        rng: Random streams of the model.
        ends_by_file: Token ids do not say where documents end.
    """

    def __init__(self, mesh: Mesh, rng: RngStreams, *, ends_by_file: bool) -> None:
        self._ends_by_file = ends_by_file
        self._mesh = mesh
        self._rng = rng
        self._samples: dict[int, str] = {}
        self._states: dict[tuple[str, int], str] = {}
        self._squares: dict[str, Tensor] = {}
        self._position: int | None = None

    def record(self, result: StepResult) -> dict[str, Any]:
        """The record of the step, but for the norms of weights and gradients. Collective."""
        layers = {name: float(value) for name, value in self._squares.items()}
        ranks = gather_objects((float(result.loss), self._samples, self._states, layers))
        losses, samples, states, squares = zip(*ranks, strict=True)
        by_layer: dict[str, list[bytes]] = {}
        for (name, _), state in sorted(dict(ChainMap(*states)).items()):
            by_layer.setdefault(name, []).append(state.encode())
        norm = result.grad_norm
        return {
            "loss": math.fsum(losses) / len(losses),
            "grad_norm": None if norm is None else float(norm),
            "skipped": result.skipped,
            "samples": dict(sorted(ChainMap(*samples).items())),
            "random": {name: digest(hashes) for name, hashes in by_layer.items()},
            "layers": {
                name: math.sqrt(math.fsum(rank.get(name, 0.0) for rank in squares))
                for name in dict.fromkeys(name for rank in squares for name in rank)
            },
        }

    def reading(self, read: Callable[..., DeviceBatch]) -> Callable[..., DeviceBatch]:
        """Reads a micro-batch and hashes its samples, on the first rank that has them."""

        def read_and_hash(batches: DeviceBatches) -> DeviceBatch:
            batch = read(batches)
            if self._mesh.same_batch.rank == 0 and self._mesh.pp.rank == 0:
                tokens_BS = batch.tokens_BS.int()
                if batch.documents is not None and self._ends_by_file:
                    tokens_BS = tokens_BS | batch.documents.last_BS.int() << LAST_BIT
                tensors = (tokens_BS, batch.labels_BS, batch.loss_weights_BS)
                arrays = [tensor.int().cpu().numpy() for tensor in tensors if tensor is not None]
                for row in range(len(batch.tokens_BS)):
                    parts = [array[row].tobytes() for array in arrays]
                    self._samples[batch.position + row] = digest(parts)
            return batch

        return read_and_hash

    def begin(
        self, begin: Callable[..., None], micro_batch: MicroBatchSeed | None, layer: int
    ) -> None:
        """Begins a layer, and hashes the random states from which it draws."""
        begin(micro_batch, layer)
        self._position = None if micro_batch is None else micro_batch.position
        if not _is_recomputed():
            self._add_state(f"layers.{layer}" if layer > EMBEDDING else OTHER_LAYERS[0])

    def end(self, name: str, module: nn.Module, inputs: Any, output: Tensor) -> None:
        """Records the random state and the output of a layer. Called after its forward pass."""
        if _is_recomputed():
            return
        if name not in OTHER_LAYERS[1:]:
            self._add_state(name + END)
        if self._mesh.tp.rank == 0 or self._mesh.tp.sequence_parallel:
            squares = sum_of_squares([output.detach()], output.device)
            self._squares[name] = self._squares.get(name, 0.0) + squares

    def _add_state(self, name: str) -> None:
        """Adds the hash of the random states, on ranks that draw the masks of a single process."""
        if self._mesh.same_batch.rank == 0 and self._position is not None:
            self._states[name, self._position] = digest(self._rng.states())


def digest(parts: Sequence[bytes]) -> str:
    """A short hash of bytes."""
    return hashlib.blake2b(b"".join(parts), digest_size=DIGEST_BYTES).hexdigest()


def _is_recomputed() -> bool:
    """Whether a backward pass is running, in which a forward pass is a repeated one."""
    return torch._C._current_graph_task_id() != -1
