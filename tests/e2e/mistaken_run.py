"""pretrain_gpt.py, each of whose steps makes one mistake: what `test_check_step.py` must name."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from megatron_ds.config import Config
from megatron_ds.engine import step as engine_step
from megatron_ds.engine.zero import ZeroEngine
from megatron_ds.extend import Callback, Extensions, TrainState, pretrain
from megatron_ds.model.output_layer import TokenLoss
from megatron_ds.schedules import learning_rate
from tests.interop.trainer_mistakes import LOST
from tests.interop.trainer_mistakes import MISTAKES as OF_TRAINERS

MISTAKES = (*OF_TRAINERS, "lost moments", "count of steps")
"""Mistakes in the order of steps, from `FIRST` on."""
FIRST = 3
"""The step of the first mistake."""
GLOBAL_BATCH = 8
STALE = "layers.1.mlp.fc_in.weight"
SWAPPED = "layers.0.mlp.fc_out.weight"
DOUBLED = "layers.0.attention.proj.weight"
MICRO_BATCHES = 4


class Mistakes(Callback):
    """Knows the mistake of the current step, and makes it in hooks and patches."""

    def on_start(self, config: Config, state: TrainState, model: nn.Module) -> None:
        self.mistake = ""
        self.config = config
        self.passes = 0
        self.parameters = dict(model.named_parameters())
        self.optimizer: Optimizer | None = None
        register_optimizer_step_pre_hook(self.before_update)

    def before_update(self, optimizer: Optimizer, *arguments: Any) -> None:
        self.optimizer = optimizer
        if self.mistake == "doubled gradient":
            gradient = self.parameters[DOUBLED].grad
            assert gradient is not None
            gradient *= 2
        if self.mistake == "lost moments":
            for state in optimizer.state.values():
                state["exp_avg"].zero_()
        if self.mistake == "count of steps":
            for state in optimizer.state.values():
                state["step"] -= 1

    def take(self, original: Any, engine: ZeroEngine, batches: Any, plan: Any) -> Any:
        number = plan.iteration - FIRST
        self.mistake = MISTAKES[number] if 0 <= number < len(MISTAKES) else ""
        if self.mistake == "schedule off by one":
            applied = GLOBAL_BATCH * plan.iteration
            late = TrainState(iteration=plan.iteration, applied_samples=applied)
            plan = dataclasses.replace(plan, lr=learning_rate(self.config, late, 1))
        stale = self._state(STALE)["exp_avg"].clone() if self.mistake == "stale moment" else None
        result = original(engine, batches, plan)
        with torch.no_grad():
            if stale is not None:
                self._state(STALE)["exp_avg"].copy_(stale)
            if self.mistake == "swapped rank":
                weight = self.parameters[SWAPPED]
                weight.copy_(torch.cat(weight.chunk(2, dim=1)[::-1], dim=1))
            if self.mistake == "decay of norms":
                for name, weight in self.parameters.items():
                    if "norm.weight" in name:
                        weight -= plan.lr * self.config.optimizer.weight_decay * weight
            if self.mistake == "count of steps":
                assert self.optimizer is not None
                for state in self.optimizer.state.values():
                    state["step"] += 1
        return result

    def _state(self, name: str) -> dict[str, Tensor]:
        assert self.optimizer is not None
        state: dict[str, Tensor] = self.optimizer.state[self.parameters[name]]
        return state

    def patch(self, owner: Any, name: str, change: Callable[..., Any]) -> None:
        original = getattr(owner, name)
        mock.patch.object(owner, name, lambda *a, **k: change(original, *a, **k)).start()

    def weigh(self, original: Any, loss: Any, weight: Any) -> Any:
        value, extras = original(loss, weight)
        is_lost = self.passes % MICRO_BATCHES == LOST
        self.passes += 1
        if self.mistake == "lost micro-batch" and is_lost:
            value = value * 0
        if self.mistake == "wrong loss mean" and is_lost:
            value = value * 1.5
        return value, extras

    def clip(self, original: Any, gradients: Any, norm: Tensor, limit: float) -> None:
        if self.mistake != "clipping left out":
            original(gradients, norm, limit)


if __name__ == "__main__":
    mistakes = Mistakes()
    mistakes.patch(ZeroEngine, "train_step", mistakes.take)
    mistakes.patch(engine_step, "clip", mistakes.clip)
    mistakes.patch(TokenLoss, "weighted", mistakes.weigh)
    pretrain(Extensions(callbacks=(mistakes,)))
