"""When the gradients of the bf16 optimizer are sent, on torch's fake process group."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_ds.engine.deepspeed.flat_gradients import FlatGradients

RANKS = 1024
LAYERS = 6
WIDTH = 4096
MICRO_BATCHES = 2
PER_SLICE = 2 * WIDTH * WIDTH
FP32 = 4


@pytest.fixture
def group() -> Iterator[Any]:
    dist.init_process_group("fake", rank=3, world_size=RANKS, store=FakeStore())
    yield dist.group.WORLD
    dist.destroy_process_group()


class Optimizer(BF16_Optimizer):  # type: ignore[misc]
    """Holds gradients as BF16_Optimizer does, and calls its hooks."""

    clip_grad = 0.0
    grad_acc_dtype = torch.float32

    def __init__(self, layers: nn.Sequential, group: Any) -> None:
        self.bf16_groups = [list(layers.parameters())]
        sizes = [each.numel() for each in self.bf16_groups[0]]
        self.fp32_groups_gradients_flat = [torch.zeros(sum(sizes), device="meta")]
        self.fp32_groups_gradients = [list(self.fp32_groups_gradients_flat[0].split(sizes))]
        self.fp32_groups_has_gradients = [[False] * len(sizes)]
        self.real_dp_process_group = [group]
        self.dp_process_group = group
        for index, each in enumerate(self.bf16_groups[0]):
            each.register_post_accumulate_grad_hook(self._hook(index))

    def _hook(self, index: int) -> Any:
        def run(parameter: nn.Parameter) -> None:
            self._update_hp_grad(parameter, 0, index, clear_lp_grads=False)
            parameter.grad = None

        return run

    def step(self, closure: Any) -> None:
        """Nothing is updated."""


class Messages:
    """The sums of gradients, in the order in which they are sent."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sent: list[torch.Tensor] = []
        send = dist.all_reduce

        def all_reduce(values: torch.Tensor, **options: Any) -> Any:
            assert options["async_op"]
            self.sent.append(values)
            # Gradients have no values, and torch 2.10 sends no tensors without values.
            return send(torch.zeros(1), **options)

        monkeypatch.setattr(dist, "all_reduce", all_reduce)

    @property
    def in_flight(self) -> int:
        return sum(values.numel() * values.element_size() for values in self.sent)


def build(group: Any, *, tied: bool = False) -> tuple[nn.Sequential, Any, FlatGradients]:
    layers = nn.Sequential(
        *(nn.Linear(WIDTH, WIDTH, False, "meta", torch.bfloat16) for _ in range(LAYERS))
    )
    engine = SimpleNamespace(
        module=layers,
        optimizer=Optimizer(layers, group),
        communication_data_type=torch.float32,
        postscale_gradients=lambda: True,
        gradient_predivide_factor=lambda: 1.0,
        is_deepcompile_active=lambda: False,
        zero_reduce_bucket_size=lambda: PER_SLICE,
    )
    if tied:
        layers.get_tied_weights_and_groups = lambda: [(layers[-1].weight, group)]
    norm = torch.zeros(())
    return layers, engine, FlatGradients(engine, lambda _: norm)


def backward(layers: nn.Sequential, flat: FlatGradients) -> None:
    flat.begin_step(MICRO_BATCHES)
    for _ in range(MICRO_BATCHES):
        layers(torch.ones(2, WIDTH, device="meta", dtype=torch.bfloat16)).sum().backward()


def test_gradients_are_sent_in_place_while_the_last_backward_pass_goes_on(
    group: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Claim (precision): all but the last slice are sent in place before that pass ends, in one
    order, also with 1,024 ranks"""
    layers, engine, flat = build(group)
    (gradients,) = engine.optimizer.fp32_groups_gradients_flat
    for step in range(3):
        messages = Messages(monkeypatch)
        backward(layers, flat)
        early = messages.in_flight
        engine.buffered_allreduce_fallback(grads=None, elements_per_buffer=1)
        # The first step finds out whether a gradient is complete when it is accumulated.
        assert early == (LAYERS * WIDTH * WIDTH * FP32 if step else 0)
        assert messages.in_flight == gradients.numel() * FP32
        assert {values.untyped_storage()._cdata for values in messages.sent} == {
            gradients.untyped_storage()._cdata
        }
        starts = [values.storage_offset() for values in messages.sent]
        assert starts == [4 * WIDTH * WIDTH, 2 * WIDTH * WIDTH, 0]
        engine.optimizer.step()
        monkeypatch.undo()


def test_a_tied_gradient_and_those_after_it_are_sent_with_the_rest(
    group: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers, engine, flat = build(group, tied=True)
    for _ in range(2):
        messages = Messages(monkeypatch)
        backward(layers, flat)
        early = len(messages.sent)
        engine.buffered_allreduce_fallback()
        engine.optimizer.step()
        monkeypatch.undo()
    assert (early, len(messages.sent)) == (2, 3)
    assert messages.sent[-1].storage_offset() == 4 * WIDTH * WIDTH


def test_a_gradient_in_several_parts_is_sent_once_it_is_complete(
    group: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a layer that is used in two recomputed parts of the graph."""
    layers, engine, flat = build(group)
    for _ in range(2):
        messages = Messages(monkeypatch)
        flat.begin_step(1)
        for _ in range(2):
            layers(torch.ones(2, WIDTH, device="meta", dtype=torch.bfloat16)).sum().backward()
        assert not messages.sent
        engine.buffered_allreduce_fallback()
        assert len(messages.sent) == 3
        engine.optimizer.step()
        monkeypatch.undo()


@pytest.mark.parametrize(
    "change",
    [
        {"communication_data_type": torch.bfloat16},
        {"postscale_gradients": lambda: False},
        {"gradient_predivide_factor": lambda: 2.0},
        {"is_deepcompile_active": lambda: True},
    ],
)
def test_deepspeed_reduces_what_is_not_a_plain_mean(group: Any, change: dict[str, Any]) -> None:
    _, engine, _ = build(group)
    other = SimpleNamespace(**{**vars(engine), "buffered_allreduce_fallback": None, **change})
    flat = FlatGradients(other, lambda _: torch.zeros(()))
    assert other.buffered_allreduce_fallback is None
    flat.send()  # nothing


def test_a_single_replica_sends_and_scales_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    dist.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
    layers, engine, flat = build(dist.group.WORLD)
    messages = Messages(monkeypatch)
    monkeypatch.setattr(torch, "_foreach_mul_", None)
    for _ in range(2):
        backward(layers, flat)
        engine.buffered_allreduce_fallback(grads=None, elements_per_buffer=1)
        engine.optimizer.step()
    assert not messages.sent
    dist.destroy_process_group()
