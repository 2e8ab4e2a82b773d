"""Random streams as a function of the data position."""

from __future__ import annotations

import torch

from megatron_ds.parallel.rng import RngStreams, stable_seed


def draws(rng: RngStreams) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    first = torch.rand(8)
    with rng.fork_tp_rng():
        cut = torch.rand(8)
    return first, cut, torch.rand(8)


def test_seeds_are_the_same_in_every_process() -> None:
    assert stable_seed("sharded", 1, 2) == 1725835950311597730
    assert stable_seed(1, 23) != stable_seed(12, 3)


def test_position_alone_decides() -> None:
    rng = RngStreams(0)
    rng.seed_micro_batch(7, 40)
    expected = draws(rng)
    draws(rng)
    rng.seed_micro_batch(7, 41)
    assert not torch.equal(draws(rng)[0], expected[0])
    again = RngStreams(0)
    again.seed_micro_batch(7, 40)
    for one, other in zip(draws(again), expected, strict=True):
        assert torch.equal(one, other)


def test_ranks_share_one_stream_and_not_the_other() -> None:
    results = []
    for tp_rank in (0, 1):
        rng = RngStreams(tp_rank)
        rng.seed_micro_batch(7, 40)
        results.append(draws(rng))
    (first, cut, after), (other_first, other_cut, other_after) = results
    assert torch.equal(first, other_first)
    assert torch.equal(after, other_after)
    assert not torch.equal(cut, other_cut)


def test_the_sharded_stream_goes_on_after_a_restored_region() -> None:
    rng = RngStreams(0)
    rng.seed_micro_batch(1, 1)
    state = rng.sharded_state()
    _, first, _ = draws(rng)
    with rng.restore_tp_rng(state):
        _, repeated, _ = draws(rng)
    _, second, _ = draws(rng)
    assert torch.equal(first, repeated)
    rng.seed_micro_batch(1, 1)
    assert torch.equal(draws(rng)[1], first)
    assert torch.equal(draws(rng)[1], second)
