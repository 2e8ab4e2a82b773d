"""Exports of models of muP: factors in config.json, in Megatron's arguments, or in weights."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_ds.config import MoEConfig
from megatron_ds.conversion.convert import verify
from megatron_ds.conversion.folding import explicit, folded
from megatron_ds.conversion.huggingface.read_write import open_hf, write_hf
from megatron_ds.conversion.megatron.open import open_megatron
from megatron_ds.conversion.megatron.write_legacy import write_megatron
from megatron_ds.conversion.megatron.write_torch_dist import write_torch_dist
from megatron_ds.conversion.source import SourceCheckpoint, WriteOptions
from megatron_ds.conversion.weights_folder import open_weights_folder, write_weights_folder
from tests.problems import raises_problem
from tests.unit.conversion.models import (
    LLAMA,
    logits,
    model,
    random_source,
    random_training,
)

MUP: dict[str, Any] = {
    "use_mup": True,
    "mup_base_hidden_size": 6,
    "mup_base_num_layers": 2,
    "mup_embedding_mult": 1.5,
    "mup_base_head_dim": 2.0,
}
LATENT = {
    **LLAMA, "multi_latent_attention": True, "kv_lora_rank": 8, "qk_head_dim": 8,
    "qk_pos_emb_head_dim": 4, "v_head_dim": 6, "num_query_groups": None,
    "position_embedding_type": "yarn", "rotary_scaling_factor": 4.0,
    "yarn_original_max_position_embeddings": 8,
}  # fmt: skip
EXPERTS = MoEConfig(num_experts=(4,), moe_shared_expert_intermediate_size=8)
ON_LATENTS = MoEConfig(num_experts=(4,), moe_latent_size=8)
FORMS: dict[str, tuple[dict[str, Any], MoEConfig]] = {
    "gpt2": ({}, MoEConfig()),
    "llama": (LLAMA, MoEConfig()),
    "tied": ({**LLAMA, "untie_embeddings_and_output_weights": False}, MoEConfig()),
    "norms of queries": ({**LLAMA, "qk_layernorm": True}, MoEConfig()),
    "norm of the embedding": ({"embed_layernorm": True}, MoEConfig()),
    "scores": ({**LLAMA, "softmax_scale": 0.7}, MoEConfig()),
    "latent": (LATENT, MoEConfig()),
    "latent queries": ({**LATENT, "q_lora_rank": 8, "qk_layernorm": True}, MoEConfig()),
    "experts": (LLAMA, EXPERTS),
    "experts on latents": (LLAMA, ON_LATENTS),
}
TOKENS = torch.arange(12).reshape(1, 12) * 3 % 50


def mup_source(form: str = "llama", **changes: Any) -> SourceCheckpoint:
    options, moe = FORMS[form]
    return random_source(model(**{**options, **MUP, **changes}), moe=moe)


@pytest.mark.parametrize("form", FORMS)
def test_folded_and_explicit_factors_compute_the_same(form: str) -> None:
    """Claim (checkpoints): the factors of muP are folded into the weights with equal logits, for
    tied embeddings, norms of queries, latent attention and experts, too"""
    source = mup_source(form)
    expected = logits(source, TOKENS)
    ordinary = {**source.settings.fixed, "use_mup": False}
    plain = dataclasses.replace(source.settings, fixed=ordinary)
    assert not torch.allclose(
        logits(dataclasses.replace(source, settings=plain), TOKENS), expected, rtol=1e-2
    )
    for changed in (folded(source), explicit(source)):
        assert not changed.settings.model.use_mup
        torch.testing.assert_close(logits(changed, TOKENS), expected, atol=1e-4, rtol=1e-4)
    assert folded(source).settings.model.residual_multiplier == 1.0
    assert explicit(source).settings.model.residual_multiplier == 0.5


@pytest.mark.parametrize(
    ("form", "changes", "model_type"),
    [("llama", {}, "granite"), ("llama", {}, "llama"), ("gpt2", {}, "gpt2"), ("tied", {}, "llama"),
     ("norms of queries", {}, "qwen3"), ("tied", {"mtp_num_layers": 1}, "llama")],
)  # fmt: skip
def test_hugging_face_models_compute_the_same(
    form: str, changes: dict[str, Any], model_type: str, tmp_path: Path
) -> None:
    """Claim (checkpoints): a model of muP that is exported to Hugging Face's format has the factors
    in config.json (Granite), or folded into its weights, and the logits of transformers equal"""
    source = mup_source(form, **changes)
    write_hf(source, tmp_path / "out", WriteOptions(model_type))
    assert verify(source, tmp_path / "out", "hf") < 1e-5
    read = open_hf(tmp_path / "out")
    assert read.settings.model_type == model_type
    is_described = read.settings.model.residual_multiplier == 0.5
    assert is_described == (model_type == "granite")


@pytest.mark.parametrize("write", [write_megatron, write_torch_dist])
def test_weights_for_megatron_are_folded_and_runs_keep_their_factors(
    write: Any, tmp_path: Path
) -> None:
    """Claim (checkpoints): weights alone for Megatron-LM have the factors of muP folded in; a run
    that continues there keeps them, with Megatron's arguments of muP, or is refused"""
    source = mup_source()
    write(source, tmp_path / "out")
    read = open_megatron(tmp_path / "out").weights()
    assert not read.settings.model.use_mup
    torch.testing.assert_close(logits(read, TOKENS), logits(source, TOKENS), atol=1e-4, rtol=1e-4)

    config = model(**MUP, mup_output_mult=3.0)
    states = random_training(config)
    with raises_problem("megatron-export-unsupported", contains="mup_base_num_layers 2"):
        write(dataclasses.replace(random_source(config), **states), tmp_path / "deep")
    config = dataclasses.replace(config, mup_base_num_layers=None)
    wide = dataclasses.replace(random_source(config), **states)
    write(wide, tmp_path / "wide")
    read = open_megatron(tmp_path / "wide").weights()
    names = [name for name in vars(config) if name.startswith(("use_mup", "mup_"))]
    assert {n: getattr(read.settings.model, n) for n in names} == {
        n: getattr(config, n) for n in names
    }
    torch.testing.assert_close(logits(read, TOKENS), logits(wide, TOKENS))


def test_own_formats_keep_the_factors(tmp_path: Path) -> None:
    source = mup_source()
    write_weights_folder(source, tmp_path / "out")
    read = open_weights_folder(tmp_path / "out")
    assert read.settings.model == source.settings.model
    assert torch.equal(logits(read, TOKENS), logits(source, TOKENS))


def test_what_cannot_be_folded_is_refused(tmp_path: Path) -> None:
    """Claim (checkpoints): factors that a part has no weight for, or that the type of the weights
    would round, are refused, and nothing is written"""
    folder = tmp_path / "out"
    for changes, code in (
        ({"qk_l2_norm": True}, "mup-not-foldable"),
        ({"norm_position": "both"}, "mup-not-foldable"),
        ({"apply_layernorm_1p": True, "untie_embeddings_and_output_weights": False}, None),
    ):
        with raises_problem(code or "mup-not-foldable"):
            write_megatron(mup_source(**changes), folder)
    with raises_problem("mup-rounded"):
        write_hf(mup_source().to(torch.bfloat16), folder, WriteOptions("llama"))
    assert not folder.exists()
    exact = {"mup_embedding_mult": 2.0, "mup_base_hidden_size": 4, "mup_base_head_dim": 8.0}
    source = mup_source(**exact).to(torch.bfloat16)
    write_hf(source, folder, WriteOptions("llama"))
    assert verify(source, folder, "hf") < 1e-5
