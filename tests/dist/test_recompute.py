"""Recomputation with dropout gives the same bits as without it, also with sharded heads."""

from __future__ import annotations

import dataclasses

import deepspeed
import torch

from megatron_ds.config import ModelConfig, RecomputeConfig
from megatron_ds.engine.build import configure_checkpointing
from megatron_ds.model.gpt import GPTModel
from megatron_ds.model.packed_attention import PackingOptions
from megatron_ds.parallel.activation_checkpointing import ActivationCheckpointing
from megatron_ds.parallel.mesh import Mesh, Mpu
from megatron_ds.parallel.rng import RngStreams
from tests.distributed import run_ranks

MODEL = ModelConfig(
    num_layers=4,
    hidden_size=16,
    num_attention_heads=4,
    seq_length=8,
    vocab_size=32,
    attention_dropout=0.1,
    hidden_dropout=0.1,
    activation="swiglu",
)
END = 7
"""The token that ends a document."""
FULL = RecomputeConfig(recompute_granularity="full")
PARTITIONED = dataclasses.replace(FULL, partition_activations=True)
VARIANTS = [
    FULL,
    dataclasses.replace(FULL, checkpoint_num_layers=3),
    RecomputeConfig(recompute_granularity="selective"),
    dataclasses.replace(FULL, deepspeed_activation_checkpointing=True),
    dataclasses.replace(FULL, deepspeed_activation_checkpointing=True, checkpoint_num_layers=2),
    PARTITIONED,
    dataclasses.replace(PARTITIONED, checkpoint_in_cpu=True, synchronize_each_layer=True),
    dataclasses.replace(PARTITIONED, contiguous_checkpointing=True),
]


def losses_and_gradients(
    mesh: Mesh, options: RecomputeConfig | None, position: str, documents: PackingOptions | None
) -> list[torch.Tensor]:
    """Losses of two micro-batches and an evaluation, then the micro-batches' summed gradients."""
    config = dataclasses.replace(MODEL, position_embedding_type=position)
    rng = RngStreams(mesh.tp.rank)
    recompute = None
    if options is not None:
        checkpoint = None
        if options.is_by_deepspeed:
            checkpoint = configure_checkpointing(options, config.num_layers, Mpu(mesh), rng)
        recompute = ActivationCheckpointing(options, rng, checkpoint)
    model = GPTModel(config, mesh=mesh, rng=rng, seed=5, checkpointing=recompute, packing=documents)
    tokens = torch.randint(0, 32, (2, 9), generator=torch.Generator().manual_seed(2))
    tokens[0, 2] = tokens[0, 3] = tokens[1, 5] = END
    losses = []
    rng.begin_step(11, position=0, stride=2)
    for _ in range(2):
        loss = model(tokens[:, :-1], tokens[:, 1:]).mean()
        loss.backward()
        losses.append(loss.detach())
    assert losses[0] != losses[1], "dropout did not change with the position"
    model.eval()
    with torch.no_grad():
        losses.append(model(tokens[:, :-1], tokens[:, 1:]).mean())
    return losses + [param.grad for param in model.parameters() if param.grad is not None]


def compare_variants(rank: int, tp_size: int) -> None:
    deepspeed.init_distributed(dist_backend="gloo", dist_init_required=False, verbose=False)
    mesh = Mesh.build(tp_size)
    for position, documents in (
        ("learned_absolute", None),
        ("rope", None),
        ("alibi", None),
        ("learned_absolute", PackingOptions(END, reset_positions=True, reset_attention=True)),
    ):
        expected = losses_and_gradients(mesh, None, position, documents)
        for options in VARIANTS:
            found = losses_and_gradients(mesh, options, position, documents)
            assert len(found) == len(expected)
            for one, other in zip(expected, found, strict=True):
                assert torch.equal(one, other), (options, position, documents)


def test_recomputation_gives_the_same_bits_on_one_rank() -> None:
    run_ranks(compare_variants, 1, 1)


def test_recomputation_gives_the_same_bits_with_sharded_heads() -> None:
    run_ranks(compare_variants, 2, 2)
