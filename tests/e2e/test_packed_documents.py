"""End-to-end runs with intra-document attention and without loss after ends of documents."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from megatron_ds.config import DataConfig, ModelConfig
from megatron_ds.data.build_datasets import build_datasets
from megatron_ds.model.gpt import GPTModel
from megatron_ds.parallel.mesh import Mesh
from megatron_ds.parallel.rng import RngStreams
from tests.dense_gpt import dense_logits
from tests.e2e.conftest import VOCAB as EOD
from tests.e2e.runs import Launcher, Settings, evaluations, losses, steps

SEED, MICRO, RANKS, ITERATIONS = 7, 2, 2, 4


def first_loss(corpus: Path, base: Settings, cache: Path, *, packed: bool) -> float:
    """The loss of the first step, from the samples and the initial weights alone.

    The mean over the micro-batches of each one's mean over the tokens that are not EOD.
    """
    data = build_datasets(
        DataConfig(data_path=(str(corpus),), split=base["split"]),
        seq_length=base["seq_length"],
        seed=SEED,
        num_samples=(ITERATIONS * MICRO * RANKS, 0, 0),
        tokenizer_fingerprint="",
        vocab_size=EOD + 1,
        fallback_cache=str(cache),
    )
    assert data.train is not None
    shape = ("num_layers", "hidden_size", "num_attention_heads", "seq_length")
    config = ModelConfig(**{name: base[name] for name in shape}, vocab_size=EOD + 1)
    model = GPTModel(config, mesh=Mesh.single(), rng=RngStreams(0), seed=SEED)
    weights = dict(model.named_parameters())

    def token_losses(tokens: Tensor) -> Tensor:
        logits = dense_logits(config, weights, tokens[:-1].unsqueeze(0))[0]
        return cross_entropy(logits, tokens[1:], reduction="none")

    means = []
    for rank in range(RANKS):
        kept = []
        for position in range(rank * MICRO, (rank + 1) * MICRO):
            sample = torch.as_tensor(data.train[position]).long()
            inputs = sample[:-1]
            ends = [int(end) + 1 for end in (inputs == EOD).nonzero()] if packed else []
            bounds = [0, *ends, len(inputs)]
            spans = itertools.pairwise(bounds)
            rows = [token_losses(sample[a : b + 1]) for a, b in spans if a < b]
            kept.append(torch.cat(rows)[inputs != EOD])
        means.append(torch.cat(kept).mean())
        assert len(torch.cat(kept)) < MICRO * base["seq_length"]
    return torch.stack(means).mean().item()


def test_intra_document_attention_is_logged_and_resumed(
    launcher: Launcher, base: Settings, corpus: Path, tmp_path: Path
) -> None:
    settings = {
        **base,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "train_iters": ITERATIONS,
        "eval_iters": 1,
        "eval_interval": 4,
        "eod_mask_loss": True,
        "seed": SEED,
    }
    packed = {**settings, "reset_position_ids": True, "reset_attention_mask": True}
    plain, full, parts, cache = (tmp_path / name for name in ("plain", "full", "parts", "cache"))
    launcher.start({**settings, "save": plain}, ranks=RANKS).succeed()

    output = launcher.start({**packed, "save": full}, ranks=RANKS).succeed()
    launcher.start({**packed, "exit_interval": 2, "save": parts}, ranks=RANKS).succeed()
    launcher.start({**packed, "save": parts, "load": parts}, ranks=RANKS).succeed()

    assert "positions restart" in output
    assert "scaled_dot_product_attention per document" in output
    found = [losses(run)[0] for run in (plain, full)]
    expected = [first_loss(corpus, base, cache, packed=each) for each in (False, True)]
    assert found == pytest.approx(expected, rel=1e-5)
    assert abs(expected[0] - expected[1]) > 1e-4
    assert steps(parts) == steps(full)
    assert evaluations(parts)[-2:] == evaluations(full)[-2:]
