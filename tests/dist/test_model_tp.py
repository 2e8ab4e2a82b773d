"""The model at tensor-parallel size 2 has the loss and gradients of one process.

The tested combinations: all of positions x attention (8); the other options take turns, so that
each value of each option occurs.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch

from megatron_ds.config import ModelConfig
from megatron_ds.config.model.feed_forward import ACTIVATIONS
from megatron_ds.model.gpt import GPTModel
from megatron_ds.parallel.collectives import all_gather
from megatron_ds.parallel.mesh import Mesh
from megatron_ds.parallel.rng import RngStreams
from megatron_ds.parallel.sharding import shard_spec, take_shard
from tests.dist.engine_harness import full_tensor
from tests.distributed import run_ranks

VOCAB = 90  # of 96 padded rows at sizes 1 and 2


def combinations() -> list[dict[str, Any]]:
    positions = ("learned_absolute", "rope", "alibi", "none")
    activations = itertools.cycle(ACTIVATIONS)
    chosen = []
    for index, (position, groups) in enumerate(itertools.product(positions, (None, 2))):
        chosen.append(
            {
                "position_embedding_type": position,
                "num_query_groups": groups,
                "activation": next(activations),
                "untie_embeddings_and_output_weights": index % 2 == 1,
                "add_bias_linear": index % 4 < 2,
                "add_qkv_bias": index % 8 < 4,
                "normalization": "RMSNorm" if index % 3 == 1 else "LayerNorm",
                "embed_layernorm": index % 5 == 2,
                "rotary_percent": 0.5 if index == 3 else 1.0,
                "gelu_approximation": "tanh" if index % 2 == 0 else "none",
            }
        )
    return chosen


SHAPE: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 24,
    "kv_channels": 8,
    "ffn_hidden_size": 40,
    "seq_length": 12,
    "vocab_size": 90,
    "make_vocab_size_divisible_by": 48,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
}


def build(options: dict[str, Any], mesh: Mesh) -> GPTModel:
    heads = 6 if options.get("num_query_groups") is None else 4
    config = ModelConfig(**{**SHAPE, "num_attention_heads": heads, **options})
    assert list(config.problems(mesh.tp.size)) == []
    model = GPTModel(config, mesh=mesh, rng=RngStreams(mesh.tp.rank), seed=7)
    # Biases start at zero, which would hide a mix-up of their shards.
    for name, param in model.named_parameters():
        if name.endswith("bias"):
            spec = shard_spec(param)
            size = param.numel() if spec is None else sum(spec.sections)
            values = 0.1 * torch.arange(1, size + 1).float().sin()
            tp = mesh.tp
            param.data.copy_(values if spec is None else take_shard(values, spec, tp.rank, tp.size))
    return model


def compare_with_one_process(rank: int) -> None:
    mesh = Mesh.build(tp_size=2)
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, VOCAB, (3, 13), generator=generator)
    tokens[0, 0] = VOCAB - 1
    tokens[-1, -1] = 0
    mask = (torch.rand(3, 12, generator=generator) > 0.3).float()
    inputs = tokens[:, :-1]
    labels = tokens[:, 1:]
    for options in combinations():
        one = build(options, Mesh.single())
        sharded = build(options, mesh)
        reference = dict(one.named_parameters())
        for name, param in sharded.named_parameters():
            assert torch.equal(full_tensor(param.detach(), param, mesh.tp), reference[name]), (
                options,
                name,
            )
        torch.testing.assert_close(sharded(inputs), one(inputs), rtol=1e-5, atol=1e-5)
        for weights in (None, mask):
            one.zero_grad()
            sharded.zero_grad()
            expected = one(inputs, labels, weights).mean()
            loss = sharded(inputs, labels, weights).mean()
            torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
            expected.backward()
            loss.backward()
            for name, param in sharded.named_parameters():
                want = reference[name].grad
                grad = param.grad
                assert want is not None
                assert grad is not None
                error = (full_tensor(grad, param, mesh.tp) - want).norm() / want.norm()
                # A key bias shifts all scores of a query alike: its true gradient is zero.
                assert error < 1e-5 or want.norm() < 1e-8, (options, name, error.item())


def check_dropout(rank: int) -> None:
    """Dropout of sharded heads differs between ranks, dropout of replicated activations does not.

    Both ranks have the same heads, so only the masks can differ.
    """
    mesh = Mesh.build(tp_size=2)
    tokens = torch.randint(0, VOCAB, (2, 12), generator=torch.Generator().manual_seed(3))
    for attention, hidden in ((0.0, 0.0), (0.5, 0.0), (0.0, 0.5)):
        model = build({"attention_dropout": attention, "hidden_dropout": hidden}, mesh)
        layer = model.layers["0"]
        for param in layer.attention.qkv.parameters():
            param.data.copy_(all_gather(param.detach(), mesh.tp)[0])
        seen: dict[str, torch.Tensor] = {}
        layer.attention.proj.register_forward_pre_hook(
            lambda _, inputs, seen=seen: seen.update(heads=inputs[0].detach())
        )
        layer.register_forward_hook(
            lambda _module, _inputs, output, seen=seen: seen.update(output=output.detach())
        )
        model(tokens)
        for name, is_equal in (("heads", attention == 0.0), ("output", True)):
            ours, theirs = all_gather(seen[name], mesh.tp)
            assert torch.equal(ours, theirs) == is_equal, (name, attention, hidden)


def check_all(rank: int) -> None:
    compare_with_one_process(rank)
    check_dropout(rank)


def test_tensor_parallel_model_equals_one_process() -> None:
    """Claim (parallel): tensor parallelism equals one process"""
    run_ranks(check_all, 2)
