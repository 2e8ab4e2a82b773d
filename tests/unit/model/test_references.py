"""Logits equal those of a dense forward pass; logits, loss and gradients equal those of
transformers' models with the same weights."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_ds.config import ModelConfig
from megatron_ds.config.model.feed_forward import ACTIVATIONS
from megatron_ds.conversion.huggingface.read_write import open_hf
from megatron_ds.inference.generation.kv_cache import PreallocatedCache
from megatron_ds.model.attention.packed import PackingOptions
from megatron_ds.model.gpt import GPTModel
from tests.dense_gpt import dense_logits
from tests.independent.model import loss_of
from tests.independent.training import further_loss, mean_loss
from tests.proofs.cases import rotated, with_proofs
from tests.tables import tables
from tests.unit.conversion.hf_models import random_model
from tests.unit.conversion.models import model_of
from tests.unit.model.dense import TINY, build_model, documents_of, gradients

TABLES = tables(__file__, tuple)

VOCAB = 50
LENGTH = 12
TOKENS = torch.randint(0, VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(1))
POSITIONS = ("learned_absolute", "rope", "alibi", "none")


def build(packing: PackingOptions | None = None, **options: Any) -> GPTModel:
    """A model whose parameters are all random, biases and norms included."""
    shape = {**TINY, "seq_length": LENGTH, "vocab_size": VOCAB, "norm_epsilon": 0.01}
    model = build_model(ModelConfig(**{**shape, **options}), packing=packing).eval()
    generator = torch.Generator().manual_seed(2)
    for name, param in model.named_parameters():
        values = 0.3 * torch.randn(param.shape, generator=generator)
        param.data.copy_(values + ("norm.weight" in name))
    return model


def logits(model: GPTModel) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(TOKENS)
    return found[..., :VOCAB]


def assert_equal(found: Tensor, expected: Tensor) -> None:
    """To 1e-5 of the largest logit."""
    assert expected.abs().max() > 1.0
    error = (found.double() - expected.double()).abs().max() / expected.abs().max()
    assert error < 1e-5, error


@pytest.mark.parametrize("options", TABLES["scores_and_gates_are_those_of_a_dense_forward_pass"])
@pytest.mark.parametrize("position", POSITIONS)
def test_scores_and_gates_are_those_of_a_dense_forward_pass(
    position: str, options: dict[str, Any]
) -> None:
    model = build(position_embedding_type=position, num_query_groups=2, **options)
    expected = dense_logits(model.config, dict(model.named_parameters()), TOKENS)
    assert_equal(logits(model), expected)


@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("pattern", [None, "2"])
def test_windows_are_those_of_a_dense_forward_pass(position: str, pattern: str | None) -> None:
    """Also for tokens that continue a cache, of texts with equal and with different lengths."""
    options = {"window_size": "3,0", "window_attn_skip_freq": pattern, "num_query_groups": 2}
    model = build(position_embedding_type=position, **options)
    expected = dense_logits(model.config, dict(model.named_parameters()), TOKENS)
    assert_equal(logits(model), expected)
    everything = dataclasses.replace(model.config, window_size=None)
    full = dense_logits(everything, dict(model.named_parameters()), TOKENS)
    assert torch.allclose(full[:, :4], expected[:, :4])
    assert not torch.allclose(full[:, 4:], expected[:, 4:], rtol=0.01)
    cache = PreallocatedCache(2, LENGTH, torch.empty(0))
    found = torch.zeros(2, LENGTH, VOCAB)
    with torch.no_grad():
        for start, end in ((0, 5), (5, 8), (8, 9)):
            view = cache.view(0, [end - start] * 2)
            found[:, start:end] = model(TOKENS[:, start:end], cache=view)[..., :VOCAB]
        cache.lengths[1] = 6
        for step in range(3):
            at = torch.tensor([[9 + step], [6 + step]])
            values = model(TOKENS.gather(1, at), cache=cache.view(0, [1, 1]))[:, 0, :VOCAB]
            found[torch.arange(2), at[:, 0]] = values
    assert_equal(found[0], expected[0])
    assert_equal(found[1, :9], expected[1, :9])


YARN = {"position_embedding_type": "yarn", "rotary_scaling_factor": 4.0}
YARN |= {"yarn_original_max_position_embeddings": 40, "mscale": 3.0}
ROPES: dict[str, dict[str, Any]] = TABLES["ropes"]


@pytest.mark.parametrize("name", ROPES)
def test_rope_is_that_of_a_dense_forward_pass(name: str) -> None:
    """Also after a cache, at positions beyond the sequence length, and where positions restart."""
    model = build(**{"position_embedding_type": "rope", "num_query_groups": 2, **ROPES[name]})
    weights = dict(model.named_parameters())
    tokens = torch.cat([TOKENS, TOKENS.flip(0)], dim=1)
    expected = dense_logits(model.config, weights, tokens)
    plain = dataclasses.replace(model.config, position_embedding_type="none")
    assert not torch.allclose(dense_logits(plain, weights, tokens), expected, rtol=0.01)
    cache = PreallocatedCache(2, 2 * LENGTH, torch.empty(0))
    with torch.no_grad():
        found = [
            model(tokens[:, start:end], cache=cache.view(0, [end - start] * 2))[..., :VOCAB]
            for start, end in ((0, 5), (5, 15), (15, 16), (16, 2 * LENGTH))
        ]
    assert_equal(torch.cat(found, dim=1), expected)
    packing = PackingOptions(reset_positions=True, reset_attention=True)
    packed = build_model(model.config, packing=packing).eval()
    packed.load_state_dict(model.state_dict())
    documents = torch.cat([torch.zeros(2, 5), torch.ones(2, LENGTH - 5)], dim=1)
    positions = torch.cat([torch.arange(5), torch.arange(LENGTH - 5)]).expand(2, -1)
    tokens = TOKENS.clamp(min=1)
    tokens[:, 4] = 0
    where = {"documents_BS": documents, "positions_BS": positions}
    with torch.no_grad():
        found_packed = packed(tokens, documents=documents_of(packed, tokens, 0))[..., :VOCAB]
    assert_equal(found_packed, dense_logits(model.config, weights, tokens, **where))


LATENT = TABLES["latent"]


@pytest.mark.parametrize(
    "options", [{"q_lora_rank": 14, "qk_layernorm": True}, {}, {**YARN, "mscale_all_dim": 2.0}]
)
def test_latent_attention_is_that_of_a_dense_forward_pass(options: dict[str, Any]) -> None:
    """Also of tokens that continue a cache, which has the latent vectors and the shared keys."""
    model = build(**{**LATENT, **options}, normalization="RMSNorm", num_attention_heads=2)
    expected = dense_logits(model.config, dict(model.named_parameters()), TOKENS)
    assert_equal(logits(model), expected)
    cache = PreallocatedCache(2, LENGTH, torch.empty(0))
    parts = []
    with torch.no_grad():
        for start, end in ((0, 5), (5, 8), (8, 9), (9, LENGTH)):
            view = cache.view(0, [end - start] * 2)
            parts.append(model(TOKENS[:, start:end], cache=view)[..., :VOCAB])
    assert_equal(torch.cat(parts, dim=1), expected)
    k, v = cache.buffers(0, parts[0], parts[0], LENGTH)
    assert (k.shape[1], k.shape[3], v.shape[1], v.shape[3]) == (1, 10, 1, 4)


@pytest.mark.parametrize(
    ("position", "normalization"), with_proofs(*rotated(POSITIONS, ("LayerNorm", "RMSNorm")))
)
def test_logits_equal_those_of_a_dense_forward_pass(position: str, normalization: str) -> None:
    """With every activation; the other options take turns.

    Claim (parallel): and the logits of a dense forward pass that is written out, for every
    activation, norm and position embedding
    """
    gelus = [{"activation": "gelu", "gelu_approximation": kind} for kind in ("tanh", "none")]
    others = [{"activation": name} for name in ACTIVATIONS if name != "gelu"]
    turns = itertools.cycle(itertools.product((None, 2), (False, True), (False, True)))
    for activation, (groups, flag, other) in zip([*gelus, *others], turns, strict=False):
        model = build(
            **activation,
            position_embedding_type=position,
            normalization=normalization,
            num_query_groups=groups,
            kv_channels=6 if other else None,
            rotary_percent=0.75 if flag and not other else 1.0,
            rotary_base=500.0,
            embed_layernorm=flag,
            untie_embeddings_and_output_weights=other,
        )
        expected = dense_logits(model.config, dict(model.named_parameters()), TOKENS)
        assert_equal(logits(model), expected)


FORMS: dict[str, dict[str, Any]] = TABLES["forms"]


@pytest.mark.parametrize("form", FORMS)
def test_residual_forms_are_those_of_a_dense_forward_pass(form: str) -> None:
    """Logits, the gradients of all weights, and generation with a cache.

    Claim (parallel): and those of every position of the norms, parallel attention and MLP, norms of
    queries and keys, and multipliers, with and without a cache
    """
    model = build(position_embedding_type="rope", num_query_groups=2, **FORMS[form])
    named = dict(model.named_parameters())
    expected = dense_logits(model.config, named, TOKENS)
    assert_equal(logits(model), expected)
    found = torch.autograd.grad(model(TOKENS)[..., :VOCAB].sin().sum(), [*named.values()])
    gradients = torch.autograd.grad(expected.sin().sum(), [*named.values()])
    for name, one, other in zip(named, found, gradients, strict=True):
        assert (one - other).abs().max() < 1e-4 * other.abs().max(), name
    cache = PreallocatedCache(2, LENGTH, torch.empty(0))
    parts = TOKENS.split([5, 1, 6], dim=1)
    with torch.no_grad():
        cached = [
            model(part, cache=cache.view(0, [part.shape[1]] * 2))[..., :VOCAB] for part in parts
        ]
    assert_equal(torch.cat(cached, dim=1), expected)


PREDICTIONS: dict[str, dict[str, Any]] = TABLES["predictions"]


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("form", PREDICTIONS)
def test_predictions_are_those_of_a_dense_forward_pass(form: str, documents: bool) -> None:
    """Claim (parallel): multi-token prediction has the losses and gradients of a dense forward
    pass, also where documents end"""
    eod = VOCAB - 1
    packing = PackingOptions(True, True) if documents else None
    factor = {"mtp_num_layers": 2, "mtp_loss_scaling_factor": 0.3}
    model = build(packing, **factor, **PREDICTIONS[form])
    samples = torch.cat([TOKENS, TOKENS[:, :1]], dim=1)
    samples[0, 3] = eod
    samples[1, [0, 4]] = eod
    tokens = samples[:, :-1]
    labels = samples[:, 1:]
    mask = tokens != eod
    inputs = {"documents": documents_of(model, tokens, eod)}

    names = "reset_position_ids", "reset_attention_mask"
    options = {**dataclasses.asdict(model.config), **dict.fromkeys(names, documents)}
    options |= {"disable_bias_linear": False, "eod_mask_loss": True}
    named = dict(model.named_parameters())
    dense = loss_of(options, named, samples)
    next_token = mean_loss(options, [dense])
    expected = torch.autograd.grad(
        next_token + further_loss(options, [dense]), [*named.values()], allow_unused=True
    )

    evaluated, extras = model(tokens, labels, mask, **inputs).weighted(None)
    assert not extras
    loss, extras = model.train()(tokens, labels, mask, **inputs).weighted(None)
    assert loss.item() == evaluated.item() == pytest.approx(next_token.item(), rel=1e-5)
    means = [(total / count).item() for total, count in dense.further]
    found = [extras[f"mtp_{depth}_loss"].item() for depth in (1, 2)]
    assert found == pytest.approx(means, rel=1e-5)
    gradients = torch.autograd.grad(loss, [*named.values()], allow_unused=True)
    for name, one, other in zip(named, gradients, expected, strict=True):
        assert one is not None, name
        assert (one - other).abs().max() < 1e-4 * other.abs().max(), name


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", [None, "tanh", "none"])
def test_default_gelu_depends_on_the_bias(bias: bool, kind: str | None) -> None:
    model = build(add_bias_linear=bias, gelu_approximation=kind)
    expected = dense_logits(model.config, dict(model.named_parameters()), TOKENS)
    assert_equal(logits(model), expected)


def moved_by_rounding(model: Any) -> Any:
    """A copy whose weights differ by the rounding of fp32."""
    moved = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(1)
    for parameter in moved.parameters():
        parameter.data *= 1 + 6e-8 * torch.randn(parameter.shape, generator=generator)
    return moved


def gradients_of_theirs(model: Any, folder: Path) -> dict[str, Tensor]:
    """The gradients of a model of transformers, by the names of the same weights here."""
    model(TOKENS, labels=TOKENS).loss.backward()
    for parameter in model.parameters():
        parameter.data.copy_(parameter.grad)
    model.save_pretrained(folder)
    # The reader only names and orders elements, so it reads gradients like weights.
    return {name: tensor.read() for name, tensor in open_hf(folder).tensors.items()}


@pytest.mark.parametrize(
    "family",
    ["mistral-window", "gpt2", "gpt-neox", "bloom", "pythia", "olmo2", "gemma", "smollm3"],
)
def test_logits_loss_and_gradients_equal_those_of_transformers(family: str, tmp_path: Path) -> None:
    """The gradient of every parameter, to 1e-5 of its largest element where a start that is moved
    by the rounding of fp32 is within half of it.

    Claim (parallel): the model has the logits, the loss and the gradients of transformers' Llama,
    GPT-2, GPT-NeoX, Pythia, GPT-J, BLOOM, OLMo 2, Gemma, Gemma 2, Granite, Phi and SmolLM3 with the
    same weights, parameter by parameter
    """
    theirs = random_model(family)
    theirs.save_pretrained(tmp_path / "weights")
    ours = model_of(open_hf(tmp_path / "weights"))
    reference = theirs(TOKENS, labels=TOKENS)
    assert_equal(logits(ours), reference.logits.detach())

    loss = ours(TOKENS[:, :-1], TOKENS[:, 1:]).mean()
    assert loss.item() == pytest.approx(reference.loss.item(), rel=1e-6)

    loss.backward()
    moved_gradients = gradients_of_theirs(moved_by_rounding(theirs), tmp_path / "moved")
    expected = gradients_of_theirs(theirs, tmp_path / "gradients")
    found = gradients(ours)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        largest = gradient.abs().max()
        error = (found[name][: len(gradient)] - gradient).abs().max() / largest
        rounding = (moved_gradients[name] - gradient).abs().max() / largest
        # Where the model amplifies rounding, four times the error of a start that is moved by it.
        assert error < (1e-5 if rounding < 5e-6 else 4 * rounding), (name, error, rounding)
