"""The declaration of the model: its weights are those of the modules."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import pytest
import torch

from megatron_ds.config import ModelConfig, MoEConfig
from megatron_ds.model.gpt import GPTModel
from megatron_ds.model.spec.architecture import Layer, is_expert, model_spec
from megatron_ds.model.stages import stage_slices
from megatron_ds.parallel.mesh import Group, Mesh
from megatron_ds.parallel.rng import RngStreams
from megatron_ds.parallel.sharding import declaration, expert_group, shard_spec
from tests.claims import claim
from tests.dist.parity_cases import MODELS, SHAPE

PRESETS: dict[str, dict[str, Any]] = {
    **MODELS,
    "all norms": {"embed_layernorm": True, "normalization": "RMSNorm", "activation": "liglu"},
    "bias of queries": {"add_bias_linear": False, "add_qkv_bias": True, "kv_channels": 6},
    "positions": {"max_position_embeddings": 40, "softmax_vocab_size": 93},
}
MOE = {"dense": MoEConfig(), "experts": MoEConfig(num_experts=(4,), expert_interval=2)}


def weights_of(
    model: ModelConfig, moe: MoEConfig, mesh: Mesh, stages: tuple[slice, ...]
) -> dict[str, torch.nn.Parameter]:
    """The parameters of one rank, without values."""
    with torch.device("meta"):
        built = GPTModel(model, mesh=mesh, rng=RngStreams(0), seed=None, moe=moe, stages=stages)
    return dict(built.named_parameters())


@claim(
    "logging",
    "declared weights are the parameters of the modules: names, shapes, shards and marks, in "
    "every layout",
)
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("moe", MOE)
@pytest.mark.parametrize(
    ("tp", "ep", "layers"), [(1, 1, (4,)), (2, 2, (1, 3)), (2, 1, (2, 1, 1)), (1, 4, (1, 1, 2))]
)
@pytest.mark.parametrize("sequence", [False, True])
def test_declared_weights_are_the_parameters(
    preset: str, moe: str, tp: int, ep: int, layers: tuple[int, ...], sequence: bool
) -> None:
    model = ModelConfig(**{**SHAPE, **PRESETS[preset], "num_layers": sum(layers)})
    group = Group(tuple(range(tp)), tp - 1, None, sequence_parallel=sequence)
    mesh = dataclasses.replace(Mesh.single(), tp=group, ep=Group(tuple(range(ep)), 0, None))
    spec, slices = model_spec(model, MOE[moe], tp, ep), stage_slices(layers)
    for part in slices:
        parameters = weights_of(model, MOE[moe], mesh, (part,))
        declared = spec.weights(spec.layers[part])
        assert declared.keys() == parameters.keys()
        assert len(slices) > 1 or list(declared) == list(parameters)
        for name, weight in declared.items():
            parameter = parameters[name]
            assert declaration(name, parameter) == weight
            assert shard_spec(parameter) == weight.shard, name
            assert (expert_group(parameter) is not None) == (weight.is_stacked and ep > 1), name
            full = list(parameter.shape)
            if weight.shard:
                full[weight.shard.dim] *= tp
            if weight.is_stacked:
                full[0] *= ep
            assert tuple(full) == weight.shape, name
        sizes = Counter(parameter.numel() for parameter in parameters.values())
        assert spec.sizes(spec.layers[part]) == sizes
        experts = sum(p.numel() for name, p in parameters.items() if ".experts." in name)
        assert spec.elements(spec.layers[part], is_expert) == experts


def test_stages_on_one_rank_share_a_tied_weight() -> None:
    model = ModelConfig(**{**SHAPE, "num_layers": 4})
    spec = model_spec(model)
    first, *_, last = (spec.layers[part] for part in stage_slices((2, 2)))

    def count(layers: tuple[Layer, ...]) -> int:
        return spec.elements(layers)

    table = model.padded_vocab(1) * model.hidden_size
    assert count(first) + count(last) == count(spec.layers) + table
    assert count(first + last) == count(spec.layers)
