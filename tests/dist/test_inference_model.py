"""Scores and continuations by the engine of a run are those of its model without any layout."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_ds.evaluation import scoring
from megatron_ds.evaluation.scoring import ScoredText, Scorer
from megatron_ds.inference.generate import GenerationConfig, generate
from megatron_ds.inference.generation.sampling_params import SamplingParams
from megatron_ds.model.gpt import GPTModel
from megatron_ds.parallel.mesh import Group, Mesh
from megatron_ds.parallel.rng import RngStreams
from tests.dist import engine_harness
from tests.dist.parity_cases import Case, config_of
from tests.dist.reference import EOD
from tests.distributed import run_ranks

TEXTS = [
    ScoredText([EOD, *range(1, 2 + 3 * number % 14)], 1 + 3 * number % 14) for number in range(7)
]
PACKED: dict[str, Any] = {"reset_position_ids": True, "reset_attention_mask": True}
EXPERTS = {"num_experts": (4,), "moe_expert_capacity_factor": 0.3, "moe_min_capacity": 1}
CASES = [
    Case(2, 1, 2, 1, "learned", "adamw", {"parallel": {"sequence_parallel": True}, "data": PACKED}),
    Case(2, 1, 1, 1, "alibi", "adamw", {"data": PACKED}, sp=2),
    Case(2, 3, 1, 1, "tied", "adamw"),
    Case(2, 1, 1, 1, "rope", "adamw", {"moe": EXPERTS}, ep=2),
]


def answers(scorer: Scorer) -> tuple[list[float], list[list[int]]]:
    scores = [score.logprob for score in scorer.score(iter(TEXTS))]
    config = GenerationConfig(4, SamplingParams(greedy=True), EOD)
    prompts = [list(text.ids[:5]) for text in TEXTS]

    def work(batch: list[list[int]]) -> list[list[int]]:
        return generate(scorer.model, batch, config)

    return scores, scorer.share(prompts, work, len, passes_vary=True)


def compare(rank: int) -> None:
    meshes = engine_harness.prepare()
    for case in CASES:
        config = config_of(case)
        name = case.name
        mesh = meshes.of(config.parallel)
        engine = engine_harness.build(config, mesh)
        moe = dataclasses.replace(config.moe, moe_token_dropping=False)
        rng = RngStreams(0, torch.device("cpu"))
        seed = config.runtime.seed
        alone = GPTModel(config.model, mesh=Mesh.single(), rng=rng, seed=seed, moe=moe).eval()
        expected = answers(Scorer(alone, Mesh.single(), batch_size=8))
        before = attributes(engine.module)
        in_lockstep = case.stage == 3 or case.ep > 1
        # So few that the ranks' batches have different numbers of chunks.
        with mock.patch.object(scoring, "LOGITS_TOKENS", 3), engine.inference_model() as found:
            scores, texts = answers(Scorer(found, mesh, 2, in_lockstep))
        assert scores == pytest.approx(expected[0], rel=1e-5), name
        assert texts == expected[1], name
        assert attributes(engine.module) == before, name


def attributes(model: Any) -> list[Any]:
    """What the context changes, of all modules."""
    names = ("group", "sequence_group", "_sp", "moe", "attention", "positions")
    values = [getattr(each, name, None) for each in model.modules() for name in names]
    groups = [copy.copy(value) if isinstance(value, Group) else value for value in values]
    return [*groups, model.router_log.keeps_all_tokens]


def test_layouts_answer_as_one_process() -> None:
    """Claim (serving): scores and continuations under sequence parallelism, Ulysses, ZeRO-3 and
    expert parallelism equal one process"""
    run_ranks(compare, 2, timeout=60)
