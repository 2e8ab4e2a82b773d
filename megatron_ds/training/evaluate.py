"""Validation and test loss over a fixed set of samples."""

from __future__ import annotations

from collections.abc import Callable

from megatron_ds.data.gpt_dataset import TokenDataset
from megatron_ds.data.micro_batches import MicroBatchIterator
from megatron_ds.engine.protocol import Engine
from megatron_ds.parallel.mesh import Mesh

MICRO_BATCHES_PER_CALL = 4
"""Micro-batches that the engine evaluates before a request to stop is checked."""
Stopped = Callable[[], bool]
"""Whether to break off; a collective, asked every MICRO_BATCHES_PER_CALL micro-batches."""
MeanOverDp = Callable[[list[float]], list[float]]
"""Element-wise mean of a list over the data-parallel ranks; a collective."""


def evaluate(
    engine: Engine,
    dataset: TokenDataset,
    mesh: Mesh,
    *,
    samples: int,
    micro_batch_size: int,
    eod: int | None,
    mean_over_dp: MeanOverDp,
    stopped: Stopped = lambda: False,
) -> float | None:
    """Mean loss, in nats per token, over the first `samples` samples of a dataset. Collective.

    None if it was stopped.

    Every evaluation of a run reads the same samples, whatever came before: the losses can be
    compared with each other, and a resumed run repeats them.
    """
    batches = MicroBatchIterator(
        dataset,
        consumed=0,
        micro_batch_size=micro_batch_size,
        dp_rank=mesh.dp.rank,
        dp_size=mesh.dp.size,
        eod=eod,
    )
    count = samples // (micro_batch_size * mesh.dp.size)
    total = weight = 0.0
    for done in range(0, count, MICRO_BATCHES_PER_CALL):
        if stopped():
            batches.close()
            return None
        part = engine.eval_loss(batches, min(MICRO_BATCHES_PER_CALL, count - done))
        total, weight = total + part.total, weight + part.weight
    batches.close()
    mean_total, mean_weight = mean_over_dp([total / count, weight / count])
    return mean_total / mean_weight if mean_weight else 0.0
