"""States of megatron-core's distributed optimizer in the form that it writes by default.

tests/interop/write_distributed_optimizer.py wrote the files with megatron-core 0.16.1.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron_ds.conversion.megatron import distributed_optimizer, torch_dist
from megatron_ds.conversion.megatron.open import open_megatron
from tests.conftest import extracted

LAYOUTS = ("tp2", "tp2_pp2_gated_bf16", "dp2_buckets_bf16")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("distributed_optimizer")
    return extracted("distributed_optimizer.tar.xz", folder)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_buckets_have_the_states_of_the_other_form(layout: str, checkpoints: Path) -> None:
    """In which every state has the name and the shape of its weight."""
    buckets = open_megatron(checkpoints / layout / "dp_reshardable")
    named = open_megatron(checkpoints / layout / "fully_reshardable")
    for each in (buckets, named):
        assert (each.run.steps, each.unread, each.run.consumed_samples) == (3, "", 12)
        assert each.optimizer.keys() == {"exp_avg", "exp_avg_sq", "master"}
    for kind, tensors in named.optimizer.items():
        assert tensors.keys() == named.tensors.keys()
        for name, tensor in tensors.items():
            found = buckets.optimizer[kind][name]
            if "pp2" in layout and name == "embedding.word.weight":
                continue  # megatron-core writes zeros for part of it, and warns, in the other form
            assert torch.equal(found.read(), tensor.read()), (kind, name)
            assert (found.shape, found.dtype) == (tensor.shape, torch.float32)
    for name, weight in named.tensors.items():
        master = buckets.optimizer["master"][name].read()
        assert torch.equal(master.to(weight.dtype), weight.read()), name


def test_buckets_whose_weights_are_elsewhere_are_not_read(
    checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distributed_optimizer, "ALIGNMENT", 48)
    found = open_megatron(checkpoints / "tp2" / "dp_reshardable")
    assert found.unread.startswith(distributed_optimizer.MISPLACED)
    assert found.optimizer == {}
    assert found.tensors


@pytest.mark.parametrize(
    ("argument", "value", "reason"),
    [
        ("tensor_model_parallel_size", None, torch_dist.PARTITIONED),
        ("pipeline_model_parallel_size", 2, distributed_optimizer.UNKNOWN_FORM),
        ("tensor_model_parallel_size", 3, distributed_optimizer.UNKNOWN_FORM),
        ("num_layers", 1, distributed_optimizer.UNKNOWN_FORM),
    ],
)
def test_buckets_of_a_layout_that_does_not_fit_are_not_read(
    argument: str,
    value: int | None,
    reason: str,
    checkpoints: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = checkpoints / "dp2_buckets_bf16" / "dp_reshardable" / "iter_0000003"
    original = torch_dist.arguments_of
    monkeypatch.setattr(
        torch_dist, "arguments_of", lambda args: {**original(args), argument: value}
    )
    found = torch_dist.read_torch_dist(folder)
    assert reason in found.unread
    assert found.optimizer == {}
    assert found.shards
