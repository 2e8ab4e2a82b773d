"""Computes validation and test losses over a fixed set of samples."""

from __future__ import annotations

from collections.abc import Callable

from megatron_ds.data.gpt_dataset import TokenDataset
from megatron_ds.data.micro_batches import MicroBatchIterator
from megatron_ds.engine.protocol import Engine
from megatron_ds.parallel.mesh import Mesh

MICRO_BATCHES_PER_CALL = 4
"""Micro-batches that are evaluated between two checks for a request to stop."""
MeanOverDp = Callable[[list[float]], list[float]]
"""Element-wise mean of a list over the data-parallel ranks; collective."""


def evaluate(
    engine: Engine,
    dataset: TokenDataset,
    mesh: Mesh,
    *,
    samples: int,
    micro_batch_size: int,
    eod: int | None,
    mean_over_dp: MeanOverDp,
    is_stopped: Callable[[], bool] = lambda: False,
) -> float | None:
    """Computes the mean loss over the first `samples` samples of a dataset. Collective.

    Every evaluation of a run reads the same samples, so losses are comparable and a resumed run
    repeats them.

    Args:
        engine: Engine with the model.
        dataset: Samples to read.
        mesh: Process groups of the run.
        samples: Number of samples over all data-parallel ranks.
        micro_batch_size: Samples per forward pass.
        eod: Id of the end-of-document token if it is masked in the loss.
        mean_over_dp: Averages over the data-parallel ranks.
        is_stopped: Whether to interrupt the evaluation; collective, called every
            MICRO_BATCHES_PER_CALL micro-batches.

    Returns:
        Loss in nats per token; None if the evaluation was interrupted.
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
        if is_stopped():
            batches.close()
            return None
        part = engine.eval_loss(batches, min(MICRO_BATCHES_PER_CALL, count - done))
        total, weight = total + part.total, weight + part.weight
    batches.close()
    mean_total, mean_weight = mean_over_dp([total / count, weight / count])
    return mean_total / mean_weight if mean_weight else 0.0
