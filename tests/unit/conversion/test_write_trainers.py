"""Models written for other trainers, and read back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from megatron_ds.config import ModelConfig, MoEConfig
from megatron_ds.conversion.model_settings import resolved
from megatron_ds.conversion.registry import open_source, write
from megatron_ds.conversion.source import SourceCheckpoint
from megatron_ds.conversion.trainers.torchtitan import OPTIONS, OPTIONS_OF_EXPERTS
from tests.problems import raises_problem
from tests.unit.conversion.models import assert_same_tensors, logits_of, random_source
from tests.unit.conversion.test_trainers import PEERS, Peer, opened, reference_of

TRAINERS = ("torchtitan", "olmo_core", "litgpt")
TOKENS = torch.arange(24).view(1, 24) % 60
LLAMA: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "ffn_hidden_size": 48,
    "seq_length": 32,
    "vocab_size": 60,
    "position_embedding_type": "rope",
    "rotary_base": 500000.0,
    "normalization": "RMSNorm",
    "activation": "swiglu",
    "add_bias_linear": False,
    "untie_embeddings_and_output_weights": True,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
}
QWEN = {"kv_channels": 16, "qk_layernorm": True, "norm_epsilon": 1e-6}
OLMO = {"norm_position": "reordered", "qk_layernorm": True, "qk_layernorm_scope": "all-heads"}
WINDOWS = {"window_size": "7,0", "window_attn_skip_freq": "[1, 0]"}
PARTS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "llama": ({}, TRAINERS),
    "scaled": ({"use_rope_scaling": True, "rope_scaling_factor": 8.0}, TRAINERS),
    "linear": ({"rotary_seq_len_interpolation_factor": 4.0}, TRAINERS),
    "qwen": (QWEN, TRAINERS),
    "olmo": (OLMO, ("olmo_core", "litgpt")),
    "windows": (WINDOWS, ("olmo_core", "litgpt")),
    "biases": ({"add_bias_linear": True}, TRAINERS[1:]),
    "qkv_bias": ({"add_qkv_bias": True}, ("litgpt",)),
    "peri": ({"norm_position": "both"}, TRAINERS[1:]),
    "neighbors": ({"rotary_interleaved": True}, ("litgpt",)),
    "learned": ({"position_embedding_type": "learned_absolute"}, ()),
    "multipliers": ({"logits_multiplier": 0.5}, ()),
    "tied": ({"untie_embeddings_and_output_weights": False}, TRAINERS),
}
"""Options of a model, and the trainers that have its parts."""


def source_of(parts: str) -> SourceCheckpoint:
    return random_source(ModelConfig(**{**LLAMA, **PARTS[parts][0]}))


@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_model_comes_back_or_is_refused_by_its_parts(
    trainer: str, parts: str, tmp_path: Path
) -> None:
    """Claim (conversion): a model that is written for torchtitan, OLMo-core or litgpt is read back
    with its weights and logits, and one that they cannot express is refused before anything is
    written"""
    source = source_of(parts)
    if trainer not in PARTS[parts][1]:
        with raises_problem("foreign-target-lacks", contains=trainer):
            write(source, tmp_path / "new", trainer)
        assert not any(tmp_path.iterdir())
        return
    write(source, tmp_path / "new", trainer)
    back = open_source(tmp_path / "new")
    assert back.format == trainer
    assert torch.equal(logits_of(back, TOKENS), logits_of(source, TOKENS))
    if (trainer, parts) != ("litgpt", "tied"):  # which has no tied output layer
        assert_same_tensors(back, source)
        assert resolved(back.settings) == resolved(source.settings)


EXPERTS: dict[str, Any] = {"num_experts": (4,), "moe_router_topk": 2, "moe_ffn_hidden_size": 24}
BIASED = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
GROUPS = {"moe_router_topk": 4, "moe_router_num_groups": 2, "moe_router_group_topk": 2}
WITH_EXPERTS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "softmax": ({}, TRAINERS),
    "probabilities": ({"moe_router_pre_softmax": True}, TRAINERS[:2]),
    "one": ({"moe_router_topk": 1, "moe_router_pre_softmax": True}, TRAINERS[:2]),
    "sigmoid": ({"moe_router_score_function": "sigmoid"}, TRAINERS[:2]),
    "bias": (BIASED, TRAINERS[:2]),
    "some layers": ({"moe_layer_freq": "[0, 1]"}, TRAINERS),
    "first layers": ({"moe_layer_freq": "[1, 0]"}, TRAINERS[:2]),
    "scaled": ({"moe_router_topk_scaling_factor": 2.0}, ("torchtitan", "litgpt")),
    "shared": ({"moe_shared_expert_intermediate_size": 40}, ("torchtitan",)),
    "groups": (BIASED | GROUPS, ("torchtitan", "litgpt")),
    "groups of one": (BIASED | GROUPS | {"moe_router_topk": 2}, ("litgpt",)),
    "latent": ({"moe_latent_size": 16}, ("olmo_core",)),
    "gate": ({"moe_shared_expert_intermediate_size": 40, "moe_shared_expert_gate": True}, ()),
    "router bias": ({"moe_router_bias": True}, ()),
}
"""Options of experts, and the trainers that have them."""


@pytest.mark.parametrize("experts", WITH_EXPERTS)
@pytest.mark.parametrize("trainer", TRAINERS)
def test_experts_come_back_or_are_refused(trainer: str, experts: str, tmp_path: Path) -> None:
    """Claim (conversion): experts that are written for torchtitan, OLMo-core or litgpt are read
    back with their weights and logits, and routers that they lack are refused before anything is
    written"""
    options, trainers = WITH_EXPERTS[experts]
    moe = MoEConfig(**EXPERTS | options)
    source = random_source(ModelConfig(**LLAMA | QWEN), moe=moe)
    if trainer not in trainers:
        with raises_problem("foreign-target-lacks", contains=trainer):
            write(source, tmp_path / "new", trainer)
        assert not any(tmp_path.iterdir())
        return
    write(source, tmp_path / "new", trainer)
    flags = {
        **{name: value for name, value in (LLAMA | QWEN).items() if name in OPTIONS},
        **{name: getattr(moe, name) for name in OPTIONS_OF_EXPERTS},
    }
    if trainer != "torchtitan" or (tmp_path / "new" / "config.json").is_file():
        flags = {}
    back = open_source(tmp_path / "new", options=Peer(trainer, "", "", flags).options())
    assert back.format == trainer
    if (trainer, experts) != ("torchtitan", "sigmoid"):  # whose biases are zeros there
        assert_same_tensors(back, source)
    assert torch.equal(logits_of(back, TOKENS), logits_of(source, TOKENS))


def test_torchtitan_has_no_experts_without_norms_of_queries(tmp_path: Path) -> None:
    source = random_source(ModelConfig(**LLAMA), moe=MoEConfig(**EXPERTS))
    with raises_problem("foreign-target-lacks", contains="experts"):
        write(source, tmp_path / "new", "torchtitan")


@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer.folder)
def test_what_a_trainer_wrote_is_written_for_it_again(
    peer: Peer, shared_data: Path, tmp_path: Path
) -> None:
    folder = shared_data / "peer_checkpoints2"
    source = opened(peer, folder / peer.folder)
    write(source, tmp_path / "new", peer.name)
    back = open_source(tmp_path / "new")
    assert_same_tensors(back, source)
    tokens, expected = reference_of(folder / peer.reference)
    assert (logits_of(back, tokens) - expected).abs().max() < 1e-5


def test_files_are_those_of_the_trainers(shared_data: Path, tmp_path: Path) -> None:
    """The same names and shapes of tensors, rows in the same order, and the same settings."""
    folder = shared_data / "peer_checkpoints2" / "litgpt"
    write(open_source(folder), tmp_path / "new", "litgpt")
    mine, theirs = (
        torch.load(path / "lit_model.pth", weights_only=True)["model"]
        for path in (tmp_path / "new", folder)
    )
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
    values = yaml.safe_load((tmp_path / "new" / "model_config.yaml").read_text())
    original = yaml.safe_load((folder / "model_config.yaml").read_text())
    # Rows of the padding are ids here.
    changed = {"name", "vocab_size"}
    assert {key: original[key] for key in values.keys() - changed} == {
        key: values[key] for key in values.keys() - changed
    }
