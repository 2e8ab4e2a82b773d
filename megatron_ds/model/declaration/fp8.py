"""Declares which matrices are multiplied in fp8 in training. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from megatron_ds.config import Config, PrecisionConfig
from megatron_ds.config.problems import Problem
from megatron_ds.model.declaration.architecture import Layer, run_spec
from megatron_ds.parallel.weights import Role, Weight

LAYERS = ("qkv", "proj", "fc_in", "fc_out")
"""Names of the linear layers of attention and of feed-forward layers."""


def fp8_weights(layer: Layer, precision: PrecisionConfig) -> dict[str, Weight]:
    """The matrices of a transformer layer that are multiplied in fp8, by canonical name.

    Args:
        layer: One of the layers that `PrecisionConfig.fp8_layers` selects.
        precision: The options.
    """
    return {
        name: weight
        for name, weight in _candidates(layer).items()
        if precision.rounds(*weight.shape[-2:])
    }


def _candidates(layer: Layer) -> dict[str, Weight]:
    return {
        name: weight
        for name, weight in layer.weights.items()
        if weight.role is Role.MATRIX and name.split(".")[-2] in LAYERS
    }


def fp8_matrices(config: Config, layers: Iterable[Layer]) -> list[Weight]:
    """The matrices of some layers that are multiplied in fp8, of all experts too.

    Args:
        config: Complete configuration.
        layers: Layers of the model.
    """
    precision = config.precision
    selected = {f"layers.{index}" for index in precision.fp8_layers(config.model.num_layers)}
    return [
        weight
        for layer in layers
        if layer.name in selected
        for weight in fp8_weights(layer, precision).values()
    ]


def fp8_problems(config: Config) -> Iterator[Problem]:
    """Check that some layer is large enough for fp8, and that no block is of two ranks.

    Args:
        config: Configuration without other problems.
    """
    yield from _size_problems(config)
    if config.precision.fp8_format is not None and config.precision.fp8_block is not None:
        yield from _shard_problems(config)
        yield from _slice_problems(config)


def _size_problems(config: Config) -> Iterator[Problem]:
    precision = config.precision
    blocks = run_spec(config).blocks
    selected = [blocks[index] for index in precision.fp8_layers(config.model.num_layers)]
    if not selected or any(fp8_weights(layer, precision) for layer in selected):
        return
    shapes = {weight.shape[-2:] for layer in selected for weight in _candidates(layer).values()}
    rows, columns = max(shapes, key=lambda shape: shape[0] * shape[1] / sum(shape))
    largest = int(rows * columns / (rows + columns))
    texts = {"rows": rows, "columns": columns, "largest": largest}
    yield Problem("fp8-of-small-layers", settings=precision, **texts)


def _shard_problems(config: Config) -> Iterator[Problem]:
    """Check that tensor-parallel ranks have complete blocks of weights."""
    precision = config.precision
    tp_size = config.parallel.tensor_model_parallel_size
    block = precision.fp8_block_size
    if tp_size == 1:
        return
    blocks = run_spec(config).blocks
    for index in precision.fp8_layers(config.model.num_layers):
        for name, weight in fp8_weights(blocks[index], precision).items():
            sections = weight.shard.sections if weight.shard is not None else ()
            local = next((size // tp_size for size in sections if size // tp_size % block), None)
            if local is not None:
                texts = {"name": name, "local": local, "block": block}
                yield Problem("fp8-blocks-of-shards", settings=precision, **texts)
                return


def _slice_problems(config: Config) -> Iterator[Problem]:
    """Check that ranks that share sequences have complete blocks of tokens."""
    parallel = config.parallel
    schedule = config.schedule
    block = config.precision.fp8_block_size
    parts = parallel.ulysses_size
    if parallel.cp_size > 1:  # of two chunks
        parts = parallel.cp_size * math.lcm(2, parts)
    if parts == 1:
        return
    samples = schedule.micro_batch_size
    unit = parts * block // math.gcd(block, samples)
    lengths = [config.model.seq_length]
    if schedule.curriculum_seqlen is not None:
        lengths += [*schedule.curriculum_seqlen[:2], schedule.curriculum_seqlen_step]
    for length in lengths:
        if length % unit:
            yield Problem(
                "fp8-blocks-of-shared-sequences",
                settings=config.precision,
                block=block,
                samples=samples,
                length=length,
                parts=parts,
                unit=unit,
            )
            return
