"""Generation at tensor-parallel size 2: against one process, and one rank against the other."""

from __future__ import annotations

import torch

from megatron_ds.inference.generate import generate
from megatron_ds.inference.sampling_params import SamplingParams
from megatron_ds.parallel.mesh import Mesh
from tests.distributed import run_ranks
from tests.unit.inference.models import EOD, KINDS, VOCAB, model_of

PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [EOD], [5, 3, 5], [8, 9, 7]]
SETTINGS = (SamplingParams(greedy=True), SamplingParams(False, 0.9, 40, 0.95, seed=6))
Texts = dict[str, list[list[int]]]


def generate_all(rank: int) -> tuple[Texts, Texts]:
    """What this rank wrote as one of two, and alone."""
    pair, alone = Mesh.build(tp_size=2), Mesh.single()
    texts: tuple[Texts, Texts] = ({}, {})
    for kind in KINDS:
        for found, mesh in zip(texts, (pair, alone), strict=True):
            model = model_of(kind, mesh)
            for settings in SETTINGS:
                for cache in (True, False):
                    found[f"{kind} {settings} {cache}"] = generate(
                        model,
                        PROMPTS,
                        max_new_tokens=16,
                        sampling=settings,
                        eod=EOD,
                        cache=cache,
                    )
        compare_logits(kind, pair, alone)
    # From nearly flat logits every draw is another one, on every rank.
    model = model_of("learned", pair)
    hot = SamplingParams(temperature=50.0, seed=1)
    texts[0]["hot"] = generate(model, [[1]] * 4, max_new_tokens=30, sampling=hot, eod=None)
    return texts


def compare_logits(kind: str, pair: Mesh, alone: Mesh) -> None:
    tokens = torch.randint(0, VOCAB, (2, 9), generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        last, expected = (
            model_of(kind, mesh, init_method_std=0.1).eval()(tokens, last_only=True)
            for mesh in (pair, alone)
        )
    torch.testing.assert_close(last, expected, rtol=1e-5, atol=1e-5)


def test_two_ranks_write_what_one_process_writes() -> None:
    (first, alone), (second, _) = run_ranks(generate_all, 2)

    assert first == second
    hot = first.pop("hot")
    assert len({token for text in hot for token in text}) > VOCAB / 2
    assert first == alone
    for kind in KINDS:
        cached, recomputed = (first[f"{kind} {SETTINGS[0]} {cache}"] for cache in (True, False))
        assert cached == recomputed
