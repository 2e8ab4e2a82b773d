"""pretrain_gpt.py whose steps go wrong, one part of each: what `test_verify_run.py` must name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from megatron_ds.config import Config
from megatron_ds.data.micro_batches import Batch, MicroBatchIterator
from megatron_ds.engine.zero import ZeroEngine
from megatron_ds.extend import Callback, Extensions, TrainState, pretrain
from megatron_ds.model.block import Block
from megatron_ds.parallel.rng import RngStreams

DATA, RANDOM, FORWARD, GRADIENT, WEIGHT, OPTIMIZER = range(2, 8)
"""Steps in which something goes wrong."""


class Corruption(Callback):
    """Knows the current step, and corrupts what hooks and patches show it."""

    def on_start(self, config: Config, state: TrainState, model: nn.Module) -> None:
        self.step = 0
        self.parameters = dict(model.named_parameters())
        register_optimizer_step_pre_hook(self.before_update)

    def parameter(self, name: str, step: int) -> torch.Tensor | None:
        """A parameter of this stage, in the step in which it is corrupted."""
        return self.parameters.get(name) if self.step == step else None

    def before_update(self, optimizer: Optimizer, *arguments: Any) -> None:
        if (weight := self.parameter("layers.1.mlp.fc_in.weight", GRADIENT)) is not None:
            assert weight.grad is not None
            weight.grad[3] *= 1.5
        if (weight := self.parameter("layers.0.mlp.fc_out.weight", OPTIMIZER)) is not None:
            optimizer.state[weight]["exp_avg"][5] += 1.0

    def patch(self, owner: type, name: str, change: Callable[..., Any]) -> None:
        original = getattr(owner, name)
        mock.patch.object(owner, name, lambda *a, **k: change(original, *a, **k)).start()

    def take(self, original: Any, engine: ZeroEngine, batches: Any, plan: Any) -> Any:
        self.step = plan.iteration
        if (weight := self.parameter("layers.0.attention.proj.weight", WEIGHT)) is not None:
            weight.data[1, 2] += 0.02
        return original(engine, batches, plan)

    def read(self, original: Any, batches: MicroBatchIterator) -> Batch:
        batch: Batch = original(batches)
        if batch.position != 8 * (DATA - 1) + 4 or batch.samples is None:
            return batch
        samples = batch.samples.copy()
        samples.ids[1, 7] = (samples.ids[1, 7] + 1) % 100
        return batch._replace(samples=samples)

    def seed(self, original: Any, rng: RngStreams, micro_batch: Any, layer: int) -> None:
        original(rng, micro_batch, layer)
        if self.step == RANDOM and (layer, micro_batch.position % 8) == (1, 2):
            torch.rand(1)

    def compute(self, original: Any, block: Block, *arguments: Any) -> torch.Tensor:
        output: torch.Tensor = original(block, *arguments)
        return output * 1.001 if self.step == FORWARD and block.layer == 0 else output


if __name__ == "__main__":
    corruption = Corruption()
    corruption.patch(ZeroEngine, "train_step", corruption.take)
    corruption.patch(MicroBatchIterator, "__next__", corruption.read)
    corruption.patch(RngStreams, "begin_layer", corruption.seed)
    corruption.patch(Block, "forward", corruption.compute)
    pretrain(Extensions(callbacks=(corruption,)))
