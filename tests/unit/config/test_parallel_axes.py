"""A parallel axis is declared once: options, mesh, plans and checkpoints know each declared one."""

from __future__ import annotations

import dataclasses
import inspect
import math

import pytest

from megatron_ds.checkpoint.metadata import WORLD_SIZES, ParallelLayout
from megatron_ds.config import Config, ModelConfig, ParallelConfig, ScheduleConfig
from megatron_ds.config.parallel_axes import AXES, RANK_ORDER, REPLICA_OPTIONS, SEQUENCE_AXES
from megatron_ds.parallel.mesh import Mesh, axis_groups

SIZES = {axis.option: 2 for axis in AXES if axis.option}
WORLD = 2 ** len(REPLICA_OPTIONS) * 4
PARALLEL = ParallelConfig(**SIZES)


def test_each_axis_has_an_option_a_group_and_a_place_among_the_ranks() -> None:
    names = {axis.name for axis in AXES}
    assert sorted(names) == sorted(RANK_ORDER)
    assert SIZES.keys() <= {item.name for item in dataclasses.fields(ParallelConfig)}
    assert names <= Mesh.single().groups().keys()
    assert [*Mesh.single().axes()] == [axis.title for axis in AXES]
    assert all(hasattr(ParallelConfig, axis.size) for axis in AXES if axis.size)
    sizes = Config().axis_sizes
    for function in (Mesh.build, axis_groups):
        assert sizes.keys() <= inspect.signature(function).parameters.keys()


def test_the_sizes_of_all_axes_give_the_data_parallel_size_and_the_processes() -> None:
    model = ModelConfig(num_layers=2, hidden_size=8, num_attention_heads=2, vocab_size=8)
    schedule = ScheduleConfig(micro_batch_size=1, global_batch_size=4)
    config = Config(parallel=PARALLEL, model=model, schedule=schedule)
    assert PARALLEL.data_parallel_size(WORLD) == 4
    described = PARALLEL.describe_data_parallel_size(WORLD)
    assert all(option in described for option in REPLICA_OPTIONS)
    layout = ParallelLayout.of(config, 4)
    assert layout.world_size == WORLD
    assert {*WORLD_SIZES} <= {item.name for item in dataclasses.fields(ParallelLayout)}


def test_ranks_that_share_sequences_are_those_of_the_axes_that_split_them() -> None:
    split = {axis.option: 2 for axis in SEQUENCE_AXES}
    assert ParallelConfig(**split).sequence_ranks == 2 ** len(split)
    others = {option: 2 for option in SIZES if option not in split}
    assert ParallelConfig(**others).sequence_ranks == 1
    groups = axis_groups(WORLD, **dict.fromkeys(Config().axis_sizes, 2))
    assert len(groups["sequence"][0]) == 2 ** len(split)
    assert len(groups["same_batch"][0]) == 2 * 2 ** len(split)
    assert len(groups["replicas"][0]) == 4 * 2 ** len(split)


@pytest.mark.parametrize(
    ("kinds", "sizes", "expected"),
    [
        (("p2p",), None, (8, 3)),
        (("all_gather", "p2p"), None, (8, 3)),
        (("a2a",), None, (1, 24)),
        (("a2a", "a2a"), None, (1, 24)),
        (("a2a+p2p",), (2, 4), (4, 6)),
        (("a2a+p2p",), None, (8, 3)),  # an error of the options
        (("p2p", "a2a"), None, (8, 3)),  # whose layers have different groups
        (("a2a", "a2a+p2p"), (2, 4), (8, 3)),
    ],
)
def test_kinds_of_exchange_decide_which_ranks_share_heads(
    kinds: tuple[str, ...], sizes: tuple[int, ...] | None, expected: tuple[int, int]
) -> None:
    parallel = ParallelConfig(
        context_parallel_size=8,
        cp_comm_type=kinds,
        hierarchical_context_parallel_sizes=sizes,
        ds_sequence_parallel_size=3,
    )
    assert (parallel.cp_size, parallel.ulysses_size) == expected
    axes = {axis.name: parallel.size_of(axis) for axis in SEQUENCE_AXES}
    assert axes == {"cp": expected[0], "ulysses": expected[1]}
    assert math.prod(expected) == parallel.sequence_ranks
    assert parallel.cp_inner_size == (2 if kinds == ("a2a", "a2a+p2p") else 1)
    assert parallel.data_parallel_size(48) == 2
