"""Random streams as a function of the data position."""

from __future__ import annotations

import pytest
import torch

from megatron_ds.parallel.rng import RngStreams, stable_seed


def draws(rng: RngStreams) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random numbers of the replicated, the sharded and again the replicated stream."""
    before = torch.rand(8)
    with rng.fork_tp_rng():
        sharded = torch.rand(8)
    return before, sharded, torch.rand(8)


def draws_at(
    position: int, *, tp_rank: int = 0, stride: int = 1, steps: int = 1, layer: int = 0
) -> list[float]:
    """Numbers of a layer in the last of some micro-batches that start at a position."""
    rng = RngStreams(tp_rank)
    rng.begin_step(7, position, stride)
    for _ in range(steps):
        rng.begin_layer(rng.next_micro_batch(), layer)
        drawn = torch.cat(draws(rng)).tolist()
    return drawn


def test_seeds_are_the_same_in_every_process() -> None:
    assert stable_seed("sharded", 1, 2) == 1725835950311597730
    assert stable_seed(1, 23) != stable_seed(12, 3)


def test_numbers_are_those_of_generators_seeded_by_position_and_rank() -> None:
    drawn = draws_at(40, tp_rank=1)
    torch.manual_seed(stable_seed("replicated", 7, 40, 0))
    replicated = torch.rand(16).tolist()
    torch.manual_seed(stable_seed("sharded", 7, 40, 0, 1))
    assert drawn == replicated[:8] + torch.rand(8).tolist() + replicated[8:]


def test_a_layer_needs_no_new_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = draws_at(40, layer=3)
    rng = RngStreams(0)
    rng.begin_step(7, 40, 1)
    monkeypatch.setattr(torch, "Generator", None)
    rng.begin_layer(rng.next_micro_batch(), 3)
    assert torch.cat(draws(rng)).tolist() == expected


def test_position_and_layer_alone_determine_the_numbers() -> None:
    expected = draws_at(40)
    assert draws_at(41) != expected != draws_at(40, layer=1)
    assert draws_at(40) == draws_at(32, stride=4, steps=3) == expected


def test_streams_are_left_alone_before_the_first_step() -> None:
    torch.manual_seed(1)
    expected = torch.rand(4)
    torch.manual_seed(1)
    rng = RngStreams(0)
    rng.begin_layer(rng.next_micro_batch(), 0)
    assert torch.equal(torch.rand(4), expected)


def test_ranks_share_the_replicated_stream_only() -> None:
    first = draws_at(40)
    second = draws_at(40, tp_rank=1)
    assert first[:8] + first[16:] == second[:8] + second[16:]
    assert first[8:16] != second[8:16]


def test_sharded_stream_continues_after_a_restored_region() -> None:
    rng = RngStreams(0)
    state = rng.sharded_state
    _, first, _ = draws(rng)
    with rng.restore_tp_rng(state):
        _, repeated, _ = draws(rng)
    _, second, _ = draws(rng)
    assert torch.equal(first, repeated)
    expected = RngStreams(0)
    assert torch.equal(draws(expected)[1], first)
    assert torch.equal(draws(expected)[1], second)


def test_streams_are_restored_after_an_error() -> None:
    rng = RngStreams(0)
    before = torch.get_rng_state()
    with pytest.raises(RuntimeError), rng.fork_tp_rng():
        raise RuntimeError
    assert torch.equal(torch.get_rng_state(), before)
