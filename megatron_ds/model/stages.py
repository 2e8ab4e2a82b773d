"""Assigns layers to pipeline stages and ranks.

Every stage has at least one transformer layer; the first and the last one have the ends of the
model, too. Pure arithmetic, the same on every rank; imports no torch.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence

from megatron_ds.config import Config, ModelConfig, MoEConfig, ParallelConfig
from megatron_ds.config.options.parallel import LAYER_KINDS
from megatron_ds.model.declaration.architecture import DENSE, Layer, ModelSpec, model_spec, run_spec


@functools.cache
def layers_per_stage(
    model: ModelConfig, parallel: ParallelConfig, moe: MoEConfig = DENSE
) -> tuple[int, ...]:
    """Transformer layers of each stage, by --pp-partition-method.

    Args:
        model: Architecture; "parameters" needs the vocabulary size.
        parallel: Number of stages and method, both valid.
        moe: Options of mixture-of-experts layers.
    """
    stages = parallel.num_stages
    method = parallel.pp_partition_method
    if stages == 1:
        return (model.num_layers,)
    chosen = parallel.given_layers_per_stage
    if chosen is not None:
        return chosen
    tp_size = parallel.tensor_model_parallel_size
    ep_size = parallel.expert_model_parallel_size
    spec = model_spec(model, moe, tp_size, ep_size)
    pattern = parallel.partition_pattern
    parts = [spec.layers[part] for part in stage_slices(spec, [1] * model.num_layers)]
    if method == "parameters":
        return balanced([spec.elements(part) for part in parts], stages)
    kinds = [[LAYER_KINDS[layer.name.partition(".")[0]] for layer in part] for part in parts]
    if pattern is None:
        return balanced([len(part) for part in kinds], stages)
    return balanced([sum(map(bool, map(pattern.search, part))) for part in kinds], stages)


def stage_slices(spec: ModelSpec, layers: Sequence[int]) -> list[slice]:
    """The layers of each stage among all layers of the model.

    The first stage has those before the transformer layers, too, the last one those after them.

    Args:
        spec: The model.
        layers: Transformer layers of each stage.
    """
    ends = (len(spec.before) + end for end in itertools.accumulate(layers[:-1]))
    return [slice(*pair) for pair in itertools.pairwise([0, *ends, len(spec.layers)])]


def rank_layers(config: Config) -> list[list[Layer]]:
    """The layers of each pipeline rank.

    Args:
        config: Complete configuration, with the vocabulary size.
    """
    counts = layers_per_stage(config.model, config.parallel, config.moe)
    spec = run_spec(config)
    stages = [spec.layers[part] for part in stage_slices(spec, counts)]
    return [
        [layer for stage in held for layer in stages[stage]]
        for held in config.parallel.stages_of_ranks
    ]


def balanced(weights: Sequence[float], parts: int) -> tuple[int, ...]:
    """Lengths of consecutive, non-empty parts of nearly the same weight.

    The largest weight of a part is as small as possible, then the sum of the squares. Of equal
    divisions the one with the longer first parts is taken.

    Args:
        weights: Weight of each item, at least `parts` of them.
        parts: Number of parts.
    """
    return _balanced(tuple(weights), parts)


@functools.lru_cache(maxsize=256)
def _balanced(weights: tuple[float, ...], parts: int) -> tuple[int, ...]:
    sums = [0.0, *itertools.accumulate(weights)]
    total = len(weights)
    # Best division of the items from `start` on, for one more part in each round.
    best = {start: _cost((), sums, start, total) for start in range(total)}
    for count in range(2, parts + 1):
        last = total - count + 1
        best = {start: _divided(best, sums, start, last) for start in range(last)}
    return tuple(-length for length in best[0][2])


Division = tuple[float, float, tuple[int, ...]]
"""Largest weight of a part, sum of the squares, and the parts' lengths, negative."""


def _divided(
    rests: Mapping[int, Division], sums: Sequence[float], start: int, last: int
) -> Division:
    """The best division of the items from `start` on, whose first part ends at `last` or before."""
    best = _cost(rests[start + 1], sums, start, start + 1)
    for end in range(start + 2, last + 1):
        if sums[end] - sums[start] > best[0]:
            break  # a longer first part is the heaviest part
        best = min(best, _cost(rests[end], sums, start, end))
    return best


def _cost(rest: Division | tuple[()], sums: Sequence[float], start: int, end: int) -> Division:
    weight = sums[end] - sums[start]
    if not rest:
        return weight, weight**2, (start - end,)
    return max(weight, rest[0]), weight**2 + rest[1], (start - end, *rest[2])
