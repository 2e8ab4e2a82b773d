"""Transformer layers of pipeline stages, by every partition method."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from megatron_ds.config import Config, ModelConfig, ParallelConfig
from megatron_ds.config.options.parallel import LAYER_KINDS
from megatron_ds.model import stages as model_stages
from megatron_ds.model.declaration.architecture import Layer, model_spec
from megatron_ds.model.stages import balanced, layers_per_stage, rank_layers, stage_slices

MODEL = ModelConfig(
    num_layers=7,
    hidden_size=16,
    num_attention_heads=2,
    seq_length=8,
    vocab_size=2000,
    make_vocab_size_divisible_by=8,
)


def layers(method: str, stages: int = 3, model: ModelConfig = MODEL) -> tuple[int, ...]:
    parallel = ParallelConfig(pipeline_model_parallel_size=stages, pp_partition_method=method)
    assert list(parallel.problems(stages, model.num_layers)) == []
    return layers_per_stage(model, parallel)


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("type:transformer", (3, 2, 2)),
        ("type:Transformer|embedding", (2, 3, 2)),
        ("type:embedding", (5, 1, 1)),
        ("uniform", (3, 3, 1)),
        ("parameters", (1, 5, 1)),
        ("4,1,2", (4, 1, 2)),
    ],
)
def test_partition_methods(method: str, expected: tuple[int, ...]) -> None:
    assert layers(method) == expected


def test_stages_are_folded_over_the_ranks() -> None:
    parallel = ParallelConfig(pipeline_model_parallel_size=3, pipeline_schedule="dualpipev")
    assert parallel.stages_of_ranks == ((0, 5), (1, 4), (2, 3))
    assert layers_per_stage(MODEL, parallel) == (2, 1, 1, 1, 1, 1)


@pytest.mark.parametrize("weights", [(1, 1, 1, 1, 1), (5, 1, 1, 1, 4, 2), (1, 9, 1, 1)])
@pytest.mark.parametrize("parts", [1, 2, 3, 4])
def test_balanced_division_is_the_best_of_all(weights: tuple[int, ...], parts: int) -> None:
    def cost(cuts: tuple[int, ...]) -> tuple[int, int]:
        ends = (0, *cuts, len(weights))
        sums = [sum(weights[one:other]) for one, other in itertools.pairwise(ends)]
        return max(sums), sum(value**2 for value in sums)

    found = balanced(weights, parts)
    best = min(map(cost, itertools.combinations(range(1, len(weights)), parts - 1)))
    assert (len(found), sum(found)) == (parts, len(weights))
    assert min(found) > 0
    assert cost(tuple(itertools.accumulate(found[:-1]))) == best


def test_a_further_end_is_in_the_last_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    """And counts there, by its kind."""
    spec = model_spec(MODEL)
    longer = dataclasses.replace(spec, after=(Layer("extra", {}), *spec.after))
    (*_, last) = stage_slices(longer, (2, 3, 2))
    names = ["layers.5", "layers.6", "extra", "final_norm", "head"]
    assert [layer.name for layer in longer.layers[last]] == names
    monkeypatch.setitem(LAYER_KINDS, "extra", "ExtraPipe")
    monkeypatch.setattr(model_stages, "model_spec", lambda *_: longer)
    layers_per_stage.cache_clear()
    assert layers("type:transformer|extra") == (3, 3, 1)
    layers_per_stage.cache_clear()


def test_layers_of_ranks_are_those_of_their_stages() -> None:
    spec = model_spec(MODEL)
    names = [layer.name for layer in spec.layers]
    first, second, third = (names[part] for part in stage_slices(spec, (2, 3, 2)))
    assert first == ["embedding", "layers.0", "layers.1"]
    assert second == ["layers.2", "layers.3", "layers.4"]
    assert third == ["layers.5", "layers.6", "final_norm", "head"]
    parallel = ParallelConfig(
        pipeline_model_parallel_size=2, pipeline_schedule="dualpipev", pp_partition_method="1,3,2,1"
    )
    folded = rank_layers(Config(model=MODEL, parallel=parallel))
    assert [[layer.name for layer in layers] for layers in folded] == [
        [*names[:2], *names[-3:]],
        names[2:-3],
    ]
