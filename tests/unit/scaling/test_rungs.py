"""Small runs that lead to a large one."""

from __future__ import annotations

import dataclasses
import re
from itertools import pairwise
from typing import Any

import pytest

from megatron_ds.config import Config
from megatron_ds.model.declaration.architecture import model_spec
from megatron_ds.scaling.rungs import Ladder, LadderSettings, Rung, ladder_of
from tests.problems import codes, raises_problem

LARGE: dict[str, Any] = {
    "num_layers": 12,
    "hidden_size": 768,
    "num_attention_heads": 24,
    "ffn_hidden_size": 2048,
    "num_query_groups": 6,
    "activation": "swiglu",
    "seq_length": 512,
    "vocab_size": 1000,
    "micro_batch_size": 8,
    "global_batch_size": 256,
    "train_tokens": 2_000_000_000,
    "lr": 1e-3,
    "lr_warmup_tokens": 20_000_000,
    "lr_decay_style": "cosine",
    "eval_iters": 10,
    "mock_data": True,
    "tokenizer_type": "NullTokenizer",
}
MUP = {"use_mup": True, "mup_base_hidden_size": 128}


def large(**changes: Any) -> Config:
    values = {**LARGE, **changes}
    config = Config().with_values(values)
    return dataclasses.replace(config, given=frozenset(values))


def ladder(config: Config | None = None, **settings: Any) -> Ladder:
    return ladder_of(config or large(**MUP), LadderSettings(**settings))


def test_the_budget_bounds_the_operations_and_the_sizes_are_geometric() -> None:
    result = ladder(runs=4, share=0.02)
    share = result.operations / result.target.operations
    assert 0.01 < share <= 0.02
    sizes = [rung.parameters for rung in result.rungs]
    assert len(sizes) == 4
    for small, next_size in pairwise(sizes):
        assert next_size / small == pytest.approx(2, rel=0.45)
    more = ladder(runs=4, share=0.1)
    assert more.rungs[-1].parameters > sizes[-1]
    repeated = ladder(runs=4, share=0.1, seeds=5)
    assert 5 * repeated.operations <= 0.1 * repeated.target.operations


def test_small_models_have_the_shape_of_the_large_one() -> None:
    for rung in ladder(share=0.05).rungs:
        model = rung.config.model
        assert model.head_dim == 32
        assert model.num_attention_heads % model.kv_heads == 0
        if model.num_attention_heads % 4 == 0:
            assert model.num_attention_heads // model.kv_heads == 4
        assert model.mlp_hidden_size / model.hidden_size == pytest.approx(2048 / 768, rel=0.05)
        assert model.num_layers == 12
        assert model.mup_base_hidden_size == 128
        assert codes(rung.config.problems(1)) == []


def test_layers_follow_only_with_transfer_over_depths() -> None:
    rungs = ladder(large(**MUP, mup_base_num_layers=2), share=0.02).rungs
    for rung in rungs:
        model = rung.config.model
        assert model.num_layers == max(1, round(12 * model.hidden_size / 768))
    assert rungs[0].config.model.num_layers < 12


def test_the_base_width_is_the_large_one_if_the_recipe_has_none() -> None:
    config = ladder(large(use_mup=True), share=0.02).rungs[0].config
    assert config.model.mup_base_hidden_size == 768


def test_tokens_batch_warmup_and_rate_follow_the_large_run() -> None:
    """Claim (command-line): the small runs of a ladder have the large run's tokens per parameter,
    rate, and fraction of warmup, and batches that grow with the root of the tokens"""
    result = ladder(share=0.05)
    target = result.target
    for rung in result.rungs:
        schedule = rung.config.schedule
        ratio = target.tokens / target.parameters
        assert rung.tokens / rung.parameters == pytest.approx(ratio, rel=0.02)
        assert schedule.train_tokens is None
        assert (schedule.train_iters, schedule.global_batch_size) == (rung.steps, rung.samples)
        root = (rung.tokens / target.tokens) ** 0.5
        assert rung.samples == pytest.approx(256 * root, abs=4)
        assert schedule.lr_warmup_tokens is None
        assert schedule.lr_warmup_iters / rung.steps == pytest.approx(0.01, rel=0.1)
        assert rung.config.optimizer.lr == 1e-3
    kept = ladder(share=0.05, batch_exponent=0.0).rungs[0]
    assert kept.samples == 256


def test_sizes_and_a_budget_give_the_tokens() -> None:
    wanted = (2e6, 8e6)
    result = ladder(sizes=wanted, tokens_per_parameter=(10.0, 40.0))
    assert len(result.rungs) == 4
    for rung, size in zip(result.rungs, (2e6, 2e6, 8e6, 8e6), strict=True):
        assert rung.parameters == pytest.approx(size, rel=0.2)
    budget = 3 * result.operations
    more = ladder(sizes=wanted, tokens_per_parameter=(10.0, 40.0), budget=float(budget))
    assert more.operations == pytest.approx(budget, rel=0.02)
    assert more.rungs[0].tokens == pytest.approx(3 * result.rungs[0].tokens, rel=0.02)


def test_parameters_are_half_of_the_operations_of_a_token() -> None:
    config = large()
    rung = Rung(config, 1, 1)
    spec = model_spec(config.model, config.moe)
    embedding = spec.elements([spec.before[0]])
    vectors = spec.elements(keep=lambda weight: len(weight.shape) == 1)
    # The output layer is tied, and multiplies all the same.
    multiplied = spec.elements() - vectors
    assert embedding > 0
    assert rung.parameters == pytest.approx(multiplied, rel=0.01)


def test_evaluations_have_about_the_same_samples() -> None:
    counts = [rung.config.evaluation.eval_iters * rung.samples for rung in ladder(share=0.05).rungs]
    assert max(counts) / min(counts) < 1.2
    assert all(rung.config.evaluation.eval_interval is None for rung in ladder().rungs)


@pytest.mark.parametrize(
    ("changes", "settings", "code"),
    [
        ({"train_tokens": None}, {}, "ladder-without-length"),
        ({"curriculum_seqlen": (8, 512, 100)}, {}, "ladder-of-changing-schedule"),
        ({"num_attention_heads": 3, "num_query_groups": None}, {}, "ladder-of-few-heads"),
        ({}, {"budget": 1e9}, "ladder-budget-too-small"),
    ],
)
def test_a_run_without_a_ladder_is_refused(
    changes: dict[str, Any], settings: dict[str, Any], code: str
) -> None:
    with raises_problem(code):
        ladder(large(**changes), **settings)


def test_the_least_budget_that_is_named_suffices() -> None:
    with raises_problem("ladder-budget-too-small") as caught:
        ladder(share=1e-6)
    percentage = re.search(r"([0-9.]+)%", str(caught.problem))
    assert percentage is not None
    share = float(percentage[1]) / 100
    assert len(ladder(share=share).rungs) == 3
    with raises_problem("ladder-budget-too-small"):
        ladder(share=share - 2e-4)
