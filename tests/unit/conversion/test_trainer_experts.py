"""Experts in the files of torchtitan and OLMo-core, built by the layouts that their sources state;
`make test-interop` reads those that the packages wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_ds.config import ModelConfig, MoEConfig
from megatron_ds.config.problems import ignore
from megatron_ds.conversion.dcp.read import DcpFolder
from megatron_ds.conversion.dcp.write import write_dcp
from megatron_ds.conversion.registry import open_source, write
from megatron_ds.conversion.source import SourceCheckpoint
from megatron_ds.conversion.trainers.write_distributed import model_of
from megatron_ds.engine.states.state_reader import TensorReader
from tests.problems import raises_problem
from tests.unit.conversion.models import assert_same_tensors, random_source
from tests.unit.conversion.test_trainers import Peer, opened
from tests.unit.conversion.test_write_trainers import LLAMA, QWEN

MODEL = ModelConfig(**LLAMA | QWEN | {"kv_channels": 8, "ffn_hidden_size": 24})
SIGMOID = MoEConfig(
    num_experts=(4,),
    moe_router_topk=2,
    moe_ffn_hidden_size=24,
    moe_router_score_function="sigmoid",
    moe_router_enable_expert_bias=True,
)
FLAGS: dict[str, Any] = {
    "num_attention_heads": 4,
    "rotary_base": 500000.0,
    "norm_epsilon": 1e-6,
    "seq_length": 32,
    "moe_router_topk": 2,
    "moe_router_score_function": "sigmoid",
    "moe_router_pre_softmax": False,
}
TORCHTITAN = Peer("torchtitan", "torchtitan", "torchtitan", FLAGS)
OLMO_CORE = Peer("olmo_core", "olmo_core", "olmo_core")
TITAN = {"attention.proj.weight": "attention.wo.weight", "mlp_norm.weight": "ffn_norm.weight"}
OLMO = {
    "attention.proj.weight": "attention.w_out.weight",
    "mlp_norm.weight": "feed_forward_norm.weight",
}
OUTER = {
    "torchtitan": {
        "embedding.word.weight": "tok_embeddings.weight",
        "final_norm.weight": "norm.weight",
        "head.weight": "lm_head.weight",
    },
    "olmo_core": {
        "embedding.word.weight": "model.embeddings.weight",
        "final_norm.weight": "model.lm_head.norm.weight",
        "head.weight": "model.lm_head.w_out.weight",
    },
}


def torchtitan_layer(name: str, value: Tensor) -> dict[str, Tensor]:
    """The tensors of torchtitan for one of ours in a layer."""
    experts = "moe.routed_experts.inner_experts"
    if name == "attention.qkv.weight":
        names = [f"attention.qkv_linear.w{part}.weight" for part in "qkv"]
        return dict(zip(names, value.split((32, 16, 16)), strict=True))
    if name == "mlp.experts.fc_in.weight":
        gate, up = value.chunk(2, 1)
        return {f"{experts}.w1_EFD": gate, f"{experts}.w3_EFD": up}
    others = {
        "mlp.experts.fc_out.weight": f"{experts}.w2_EDF",
        "mlp.router.weight": "moe.router.gate.weight",
        "mlp.router.expert_bias": "moe.expert_bias_E",
    }
    return {(TITAN | others).get(name, name): value}


def olmo_core_layer(name: str, value: Tensor) -> dict[str, Tensor]:
    """The tensors of OLMo-core for one of ours in a layer."""
    experts = "feed_forward_moe.experts.mlp"
    if name == "attention.qkv.weight":
        names = [f"attention.w_{part}.weight" for part in "qkv"]
        return dict(zip(names, value.split((32, 16, 16)), strict=True))
    if name == "mlp.experts.fc_in.weight":
        gate, up = value.chunk(2, 1)
        return {f"{experts}.w1": gate.flatten(0, 1), f"{experts}.w3": up.flatten(0, 1)}
    if name == "mlp.experts.fc_out.weight":
        return {f"{experts}.w2": value.transpose(1, 2).flatten(0, 1)}
    if name == "mlp.router.weight":
        return {"feed_forward_moe.router.weight": value.flatten()}
    others = {"mlp.router.expert_bias": "feed_forward_moe.router.score_bias"}
    return {(OLMO | others).get(name, name): value}


def olmo_core_settings() -> dict[str, Any]:
    values = model_of(MODEL)
    router = {
        "top_k": 2,
        "gating_function": "sigmoid",
        "normalize_expert_weights": 1.0,
        "bias_gamma": 1e-3,
    }
    experts = {"name": "dropless", "num_experts": 4, "hidden_size": 24, "router": router}
    values["block"] |= {"name": "moe", "feed_forward": None, "feed_forward_moe": experts}
    return values


def write_experts(folder: Path, trainer: str) -> SourceCheckpoint:
    """Writes a model with experts in the files of a trainer; returns the model."""
    source = random_source(MODEL, moe=SIGMOID)
    is_titan = trainer == "torchtitan"
    start = "layers" if is_titan else "model.blocks"
    layer_of = torchtitan_layer if is_titan else olmo_core_layer
    tensors = {}
    for name, tensor in source.tensors.items():
        value = tensor.read()
        if name.startswith("layers."):
            _, layer, inner = name.split(".", 2)
            theirs = layer_of(inner, value)
            tensors |= {f"{start}.{layer}.{key}": part for key, part in theirs.items()}
        else:
            tensors[OUTER[trainer][name]] = value
    readers = {name: TensorReader.of(value.contiguous()) for name, value in tensors.items()}
    states = folder if is_titan else folder / "model_and_optim"
    states.mkdir(parents=True, exist_ok=True)
    write_dcp(states, readers, ignore)
    if not is_titan:
        run = {"model": olmo_core_settings(), "dataset": {"sequence_length": 32}}
        (folder / "config.json").write_text(json.dumps(run))
    return source


@pytest.mark.parametrize("peer", [TORCHTITAN, OLMO_CORE], ids=lambda peer: peer.name)
def test_experts_are_put_together_from_their_tensors(peer: Peer, tmp_path: Path) -> None:
    expected = write_experts(tmp_path, peer.name)
    source = opened(peer, tmp_path)
    assert_same_tensors(source, expected)
    assert source.settings.moe.moe_router_enable_expert_bias
    for name, tensor in source.tensors.items():
        if ".experts." in name:
            value = expected.tensors[name].read()
            part = tensor.read(range(1, 3), (1, [range(2, 5)]))
            assert torch.equal(part, value[1:3, 2:5]), name


@pytest.mark.parametrize("peer", [TORCHTITAN, OLMO_CORE], ids=lambda peer: peer.name)
def test_experts_are_written_as_the_tensors_of_the_trainer(peer: Peer, tmp_path: Path) -> None:
    source = write_experts(tmp_path / "theirs", peer.name)
    write(source, tmp_path / "ours", peer.name)
    states = "" if peer.name == "torchtitan" else "model_and_optim"
    ours, theirs = (DcpFolder.open(tmp_path / name / states).tensors for name in ("ours", "theirs"))
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(ours[name].read(), tensor.read()), name


@pytest.mark.parametrize("peer", [TORCHTITAN, OLMO_CORE], ids=lambda peer: peer.name)
def test_an_index_outside_of_the_folder_is_refused(peer: Peer, tmp_path: Path) -> None:
    write_experts(tmp_path / "in", peer.name)
    (index,) = (tmp_path / "in").rglob(".metadata")
    index.rename(tmp_path / "elsewhere")
    index.symlink_to(tmp_path / "elsewhere")
    with raises_problem("foreign-link-outside", contains=".metadata"):
        opened(peer, tmp_path / "in")


def test_a_bias_of_softmax_scores_is_refused_unless_it_is_zero(tmp_path: Path) -> None:
    write_experts(tmp_path, "torchtitan")
    flags = FLAGS | {"moe_router_score_function": "softmax"}
    with raises_problem("foreign-parts-lacking", contains="moe.expert_bias_E"):
        open_source(tmp_path, options=Peer("", "", "", flags).options())


def test_the_experts_of_a_token_are_asked_for(tmp_path: Path) -> None:
    write_experts(tmp_path, "torchtitan")
    flags = {name: value for name, value in FLAGS.items() if name != "moe_router_topk"}
    with raises_problem("foreign-options-missing", contains="--moe-router-topk"):
        open_source(tmp_path, options=Peer("", "", "", flags).options())
