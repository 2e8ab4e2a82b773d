"""Assigns layers to pipeline stages and ranks.

Every stage has at least one layer; the first one has the embedding, too, the last one the final
norm and the output layer. Pure arithmetic, the same on every rank; imports no torch.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

from megatron_ds.config import Config, ModelConfig, MoEConfig, ParallelConfig
from megatron_ds.model.spec.architecture import DENSE, Layer, model_spec, run_spec


@functools.cache
def layers_per_stage(
    model: ModelConfig, parallel: ParallelConfig, moe: MoEConfig = DENSE
) -> tuple[int, ...]:
    """Transformer layers of each stage, by --pp-partition-method.

    Args:
        model: Architecture; "parameters" needs the vocabulary size.
        parallel: Number of stages and method, both valid.
        moe: Which layers have experts, and how many.
    """
    stages, method = parallel.num_stages, parallel.pp_partition_method
    if stages == 1:
        return (model.num_layers,)
    given = parallel.given_layers_per_stage
    if given is not None:
        return given
    if method == "parameters":
        tp_size, ep_size = parallel.tensor_model_parallel_size, parallel.expert_model_parallel_size
        spec = model_spec(model, moe, tp_size, ep_size)
        weights = [spec.elements(spec.layers[s]) for s in stage_slices([1] * model.num_layers)]
        return balanced(weights, stages)
    kinds = parallel.layer_kinds(model.num_layers)
    pattern = parallel.partition_pattern
    counts = [1.0 if pattern is None or pattern.search(kind) else 0.0 for kind in kinds]
    # The layers before and after the transformer layers are in the first and the last stage.
    embedding, *layers, norm, head = counts
    layers[0] += embedding
    layers[-1] += norm + head
    return balanced(layers, stages)


ENDS = ("embedding", "final_norm", "head")
"""Layers before and after the transformer layers."""


def stage_slices(layers: Sequence[int]) -> list[slice]:
    """The layers of each stage among all layers of the model.

    Args:
        layers: Transformer layers of each stage.
    """
    bounds = [0, *(1 + end for end in itertools.accumulate(layers[:-1])), sum(layers) + len(ENDS)]
    return [slice(*pair) for pair in itertools.pairwise(bounds)]


def rank_layers(config: Config) -> list[list[Layer]]:
    """The layers of each pipeline rank.

    Args:
        config: Complete configuration, with the vocabulary size.
    """
    counts = layers_per_stage(config.model, config.parallel, config.moe)
    stages = [run_spec(config).layers[part] for part in stage_slices(counts)]
    return [
        [layer for stage in own for layer in stages[stage]]
        for own in config.parallel.stages_of_ranks
    ]


def balanced(weights: Sequence[float], parts: int) -> tuple[int, ...]:
    """Lengths of consecutive, non-empty parts of nearly the same weight.

    The largest weight of a part is as small as possible, then the sum of the squares. Of equal
    divisions the one with the longer first parts is taken.

    Args:
        weights: Weight of each item, at least `parts` of them.
        parts: Number of parts.
    """
    sums = [0.0, *itertools.accumulate(weights)]
    total = len(weights)
    # Best division of the items from `start` on, for one more part in each round.
    best = {start: _cost((), sums, start, total) for start in range(total)}
    for count in range(2, parts + 1):
        best = {
            start: min(
                _cost(best[end], sums, start, end) for end in range(start + 1, total - count + 2)
            )
            for start in range(total - count + 1)
        }
    return tuple(-length for length in best[0][2])


Division = tuple[float, float, tuple[int, ...]]
"""Largest weight of a part, sum of the squares, and the parts' lengths, negative."""


def _cost(rest: Division | tuple[()], sums: Sequence[float], start: int, end: int) -> Division:
    weight = sums[end] - sums[start]
    if not rest:
        return weight, weight**2, (start - end,)
    return max(weight, rest[0]), weight**2 + rest[1], (start - end, *rest[2])
