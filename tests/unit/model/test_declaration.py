"""The declaration of the model: its weights are those of the modules."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_ds.config import ModelConfig, MoEConfig
from megatron_ds.conversion.model_settings import ModelSettings
from megatron_ds.conversion.source import SourceCheckpoint
from megatron_ds.conversion.weights_folder import open_weights_folder, write_weights_folder
from megatron_ds.engine.states.state_reader import TensorReader
from megatron_ds.inference.load_checkpoint import load_model
from megatron_ds.model.declaration.architecture import Layer, is_expert, model_spec
from megatron_ds.model.gpt import GPTModel
from megatron_ds.model.stages import stage_slices
from megatron_ds.parallel.mesh import Group, Mesh
from megatron_ds.parallel.rng import RngStreams
from megatron_ds.parallel.sharding import declaration, expert_group, shard_spec
from tests.dist.parity_cases import MODELS, SHAPE
from tests.proofs.cases import rotated, with_proofs

PRESETS: dict[str, dict[str, Any]] = {
    **MODELS,
    "all norms": {"embed_layernorm": True, "normalization": "RMSNorm", "activation": "liglu"},
    "bias of queries": {"add_bias_linear": False, "add_qkv_bias": True, "kv_channels": 6},
    "positions": {"max_position_embeddings": 40, "softmax_vocab_size": 93},
}
OF_TODAY: dict[str, Any] = {
    "moe_layer_freq": "[0,1,1,0]",
    "moe_ffn_hidden_size": 16,
    "moe_latent_size": 8,
    "moe_shared_expert_intermediate_size": 24,
    "moe_shared_expert_gate": True,
    "moe_router_bias": True,
}
MOE = {
    "dense": MoEConfig(),
    "experts": MoEConfig(num_experts=(4,), expert_interval=2),
    "experts of today": MoEConfig(num_experts=(4,), **OF_TODAY),
}

SIZES = (
    (1, 1, (4,), False),
    (2, 2, (1, 3), True),
    (2, 1, (2, 1, 1), False),
    (1, 4, (1, 1, 2), False),
    (2, 2, (1, 3), False),
    (2, 1, (2, 1, 1), True),
)
"""Tensor- and expert-parallel size, layers of each stage, and sequence parallelism."""


def weights_of(
    model: ModelConfig, moe: MoEConfig, mesh: Mesh, stages: tuple[slice, ...]
) -> dict[str, torch.nn.Parameter]:
    """The parameters of one rank, without values."""
    with torch.device("meta"):
        built = GPTModel(model, mesh=mesh, rng=RngStreams(0), seed=None, moe=moe, stages=stages)
    return dict(built.named_parameters())


@pytest.mark.parametrize(("preset", "moe", "sizes"), with_proofs(*rotated(PRESETS, MOE, SIZES)))
def test_declared_weights_are_the_parameters(
    preset: str, moe: str, sizes: tuple[int, int, tuple[int, ...], bool]
) -> None:
    """Claim (logging): declared weights are the parameters of the modules: names, shapes, shards
    and marks, in every layout"""
    tp, ep, layers, sequence = sizes
    model = ModelConfig(**{**SHAPE, **PRESETS[preset], "num_layers": sum(layers)})
    group = Group(tuple(range(tp)), tp - 1, None, sequence_parallel=sequence)
    mesh = dataclasses.replace(Mesh.single(), tp=group, ep=Group(tuple(range(ep)), 0, None))
    spec = model_spec(model, MOE[moe], tp, ep)
    slices = stage_slices(spec, layers)
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


def test_states_are_buffers_in_fp32_that_no_sum_counts(tmp_path: Path) -> None:
    """Claim (checkpoints): state of a layer that is no parameter, such as a bias of a router, is in
    fp32 in a run of any precision, and is saved, resharded and converted with the weights"""
    model = ModelConfig(**{**SHAPE, **MODELS["swiglu"]})
    options: dict[str, Any] = {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
    }
    moe = MoEConfig(num_experts=(4,), **options)
    spec = model_spec(model, moe)
    names = [f"layers.{layer}.mlp.router.expert_bias" for layer in range(2)]
    built = GPTModel(model, mesh=Mesh.single(), rng=RngStreams(0), seed=1, moe=moe)
    parameters = dict(built.named_parameters())
    states = dict(built.named_buffers())
    assert list(states) == names
    assert set(spec.weights()) == {*parameters, *names}
    assert spec.elements() == sum(parameter.numel() for parameter in parameters.values())
    for number, state in enumerate(states.values()):
        assert torch.equal(state, torch.zeros(4))
        state.copy_(torch.linspace(0.1, 0.7 + number, 4))
    expected = {name: state.clone() for name, state in states.items()}
    built.bfloat16().to("cpu", torch.float16)
    saved = built.state_dict()
    assert {value.dtype for name, value in saved.items() if name not in names} == {torch.float16}
    tensors = {name: TensorReader.of(value) for name, value in saved.items()}
    settings = ModelSettings.of(model, moe, None, None)
    source = SourceCheckpoint(tmp_path, "native", settings, tensors).checked()
    write_weights_folder(source.to(torch.bfloat16), tmp_path / "weights")
    found = open_weights_folder(tmp_path / "weights")
    loaded = load_model(found, Mesh.single(), torch.device("cpu"))
    assert loaded.layers["0"].attention.qkv.weight.dtype == torch.bfloat16
    for each in (saved, dict(loaded.named_buffers())):
        for name, value in expected.items():
            assert each[name].dtype == torch.float32
            assert torch.equal(each[name], value)


def test_stages_on_one_rank_share_a_tied_weight() -> None:
    model = ModelConfig(**{**SHAPE, "num_layers": 4})
    spec = model_spec(model)
    first, *_, last = (spec.layers[part] for part in stage_slices(spec, (2, 2)))

    def count(layers: tuple[Layer, ...]) -> int:
        return spec.elements(layers)

    table = model.padded_vocab(1) * model.hidden_size
    assert count(first) + count(last) == count(spec.layers) + table
    assert count(first + last) == count(spec.layers)
