"""Which transformer layers each pipeline stage has, and how large stages and ranks are.

Every stage has at least one layer; the first one has the embedding, too, the last one the final
norm and the output layer. Pure arithmetic, the same on every rank; imports no torch.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections import Counter
from collections.abc import Sequence

from megatron_ds.config import ModelConfig, MoEConfig, ParallelConfig
from megatron_ds.model.flops import DENSE, expert_parameters_per_rank, parameter_sizes


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
        return balanced(_parameter_weights(model, parallel, moe), stages)
    kinds = parallel.layer_kinds(model.num_layers)
    pattern = parallel.partition_pattern
    counts = [1 if pattern is None or pattern.search(kind) else 0 for kind in kinds]
    return balanced(_with_ends(counts), stages)


def stage_parameters(
    model: ModelConfig,
    tp_size: int,
    layers: Sequence[int],
    moe: MoEConfig = DENSE,
    ep_size: int = 1,
) -> list[Counter[int]]:
    """`parameter_sizes` of each stage, the copies of a tied embedding included.

    Args:
        model: Architecture.
        tp_size: Tensor-parallel size.
        layers: Transformer layers of each stage.
        moe: Which layers have experts, and how many.
        ep_size: Expert-parallel size.
    """

    def sizes(num_layers: int) -> Counter[int]:
        first = dataclasses.replace(model, num_layers=num_layers)
        return parameter_sizes(first, tp_size, moe, ep_size)

    if len(layers) == 1:
        return [sizes(layers[0])]
    ends = sizes(0)
    table = model.padded_vocab(tp_size) // tp_size * model.hidden_size
    last: Counter[int] = Counter()
    last[table] += 1
    last[model.hidden_size] += 1 if model.normalization == "RMSNorm" else 2
    bounds = itertools.pairwise([0, *itertools.accumulate(layers)])
    stages = [sizes(end) - sizes(start) for start, end in bounds]
    tied = 0 if model.untie_embeddings_and_output_weights else 1
    stages[0] += ends + Counter({table: tied}) - last
    stages[-1] += last
    return stages


@functools.cache
def rank_parameters(
    model: ModelConfig, parallel: ParallelConfig, moe: MoEConfig = DENSE
) -> tuple[int, ...]:
    """Parameters of each pipeline rank, on one tensor-parallel rank.

    Args:
        model: Architecture, with the vocabulary size.
        parallel: Tensor- and expert-parallel size, number of stages, method and schedule.
        moe: Which layers have experts, and how many.
    """
    tp_size, ep_size = parallel.tensor_model_parallel_size, parallel.expert_model_parallel_size
    layers = layers_per_stage(model, parallel, moe)
    stages = stage_parameters(model, tp_size, layers, moe, ep_size)
    counts = [sum(size * count for size, count in sizes.items()) for sizes in stages]
    result = [sum(counts[stage] for stage in held) for held in parallel.stages_of_ranks]
    if {0, len(stages) - 1} <= {*parallel.stages_of_ranks[0]} and len(stages) > 1:
        tied = not model.untie_embeddings_and_output_weights  # both stages use one copy
        result[0] -= tied * model.padded_vocab(tp_size) // tp_size * model.hidden_size
    return tuple(result)


@functools.cache
def rank_experts(model: ModelConfig, parallel: ParallelConfig, moe: MoEConfig) -> tuple[int, ...]:
    """Parameters of the experts of each pipeline rank. Arguments as for `rank_parameters`."""
    tp_size, ep_size = parallel.tensor_model_parallel_size, parallel.expert_model_parallel_size
    ends = [0, *itertools.accumulate(layers_per_stage(model, parallel, moe))]
    up_to = [
        expert_parameters_per_rank(
            dataclasses.replace(model, num_layers=end), tp_size, moe, ep_size
        )
        for end in ends
    ]
    counts = [after - before for before, after in itertools.pairwise(up_to)]
    return tuple(sum(counts[stage] for stage in held) for held in parallel.stages_of_ranks)


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


def _with_ends(counts: Sequence[float]) -> list[float]:
    """The weights of the transformer layers, with those of the layers before and after them."""
    embedding, *layers, norm, head = counts
    layers[0] += embedding
    layers[-1] += norm + head
    return layers


def _parameter_weights(model: ModelConfig, parallel: ParallelConfig, moe: MoEConfig) -> list[float]:
    tp_size, ep_size = parallel.tensor_model_parallel_size, parallel.expert_model_parallel_size
    single = stage_parameters(model, tp_size, [1] * model.num_layers, moe, ep_size)
    return [sum(size * count for size, count in sizes.items()) for sizes in single]
