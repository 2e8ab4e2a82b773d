"""Generation on two tensor-parallel ranks, compared with one process and with each other."""

from __future__ import annotations

import torch

from megatron_ds.inference.generate import generate
from megatron_ds.inference.generation.sampling_params import SamplingParams
from megatron_ds.inference.generation.sequences import GenerationConfig
from megatron_ds.parallel.mesh import Mesh
from tests.distributed import run_ranks
from tests.unit.inference.models import EOD, KINDS, VOCAB, model_of

PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [EOD], [5, 3, 5], [8, 9, 7]]
SETTINGS = (SamplingParams(greedy=True), SamplingParams(0.9, 40, 0.95, seed=6))
Texts = dict[str, list[list[int]]]


def generate_all(rank: int) -> tuple[Texts, Texts]:
    """Texts of this rank as one of two, and alone."""
    pair = Mesh.build(tp_size=2)
    alone = Mesh.single()
    texts: tuple[Texts, Texts] = ({}, {})
    for kind in KINDS:
        for found, mesh in zip(texts, (pair, alone), strict=True):
            model = model_of(kind, mesh)
            for settings in SETTINGS:
                for use_cache in (True, False):
                    config = GenerationConfig(16, settings, EOD, use_cache=use_cache)
                    found[f"{kind} {settings} {use_cache}"] = generate(model, PROMPTS, config)
        compare_logits(kind, pair, alone)
    # From nearly flat logits, ranks with different random numbers would sample different tokens.
    model = model_of("learned", pair)
    hot = SamplingParams(temperature=50.0, seed=1)
    texts[0]["hot"] = generate(model, [[1]] * 4, GenerationConfig(30, hot))
    return texts


def compare_logits(kind: str, pair: Mesh, alone: Mesh) -> None:
    tokens = torch.randint(0, VOCAB, (2, 9), generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        models = (model_of(kind, mesh, init_method_std=0.1) for mesh in (pair, alone))
        last, expected = (each.logits(each.hidden(tokens)[-1:]) for each in models)
    torch.testing.assert_close(last, expected, rtol=1e-5, atol=1e-5)


def test_two_ranks_generate_the_texts_of_one_process() -> None:
    """Claim (serving): two processes generate the text of one process"""
    (first, alone), (second, _) = run_ranks(generate_all, 2)

    assert first == second
    hot = first.pop("hot")
    assert len({token for text in hot for token in text}) > VOCAB / 2
    assert first == alone
    for kind in KINDS:
        cached, recomputed = (first[f"{kind} {SETTINGS[0]} {cache}"] for cache in (True, False))
        assert cached == recomputed
