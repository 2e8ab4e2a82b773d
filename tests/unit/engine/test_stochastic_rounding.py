"""Stochastic rounding to bf16, and AdamW with it, whose result no layout changes."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron_ds.engine.deepspeed.partitions import ParameterPlace
from megatron_ds.engine.optimizers import stochasticadamw
from megatron_ds.engine.optimizers.param_groups import keep_settings_on_load
from megatron_ds.engine.optimizers.rounding import (
    HIGH_HALF,
    Block,
    as_int32,
    blocks_of,
    halves,
    is_paired,
    joined,
    key_of,
    random_bits,
    round_stochastically,
    round_to_nearest,
)
from megatron_ds.engine.optimizers.stochasticadamw import StochasticAdamW, compile_update
from megatron_ds.engine.states.flats import Flat, Part
from megatron_ds.parallel.mesh import Group
from megatron_ds.parallel.sharding import mark_sharded, take_shard
from megatron_ds.parallel.weights import ShardSpec
from tests.proofs.cases import rotated, with_proofs

SETTINGS: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
COUNT = 2**16
SIGMAS = 5
"""Standard deviations that a mean of random numbers may be off."""
SHARDED = {
    "replicated": ((6, 5), None),
    "rows": ((8, 5), ShardSpec(0, (8,))),
    "sections of rows": ((12, 3), ShardSpec(0, (4, 6, 2))),
    "columns": ((5, 8), ShardSpec(1, (8,))),
    "sections of columns": ((3, 12, 2), ShardSpec(1, (8, 4))),
    "last columns": ((2, 3, 4), ShardSpec(2, (4,))),
}
"""Full shape, and how two tensor-parallel ranks have it."""


def positions(count: int = COUNT) -> Tensor:
    return torch.arange(count, dtype=torch.int32)


def bits_of(step: int = 1, name: str = "weight", count: int = COUNT) -> Tensor:
    return random_bits(torch.tensor(key_of(7, step, name), dtype=torch.int32), positions(count))


def floats(rounded: Tensor) -> Tensor:
    """The numbers in the high halves."""
    return (rounded & HIGH_HALF).view(torch.float32)


def group_of(rank: int, size: int) -> Group:
    return Group(tuple(range(size)), rank, None)


@pytest.mark.parametrize("value", [1.0 + 2**-10, -3.3, 1e-5, 1e-41, -1.0 + 2**-20])
def test_the_mean_of_rounded_values_is_the_value(value: float) -> None:
    """Claim (precision): stochastic rounding to bf16 keeps the mean: a value is rounded to one of
    its two neighbours, and to the nearer one as often as it is near"""
    exact = torch.full((COUNT,), value)
    rounded = floats(round_stochastically(exact, bits_of() & 0xFFFF))
    low, high = sorted(set(rounded.tolist()))
    assert low < float(exact[0]) < high
    part = (float(exact[0]) - low) / (high - low)
    share = (rounded == high).double().mean()
    assert abs(share - part) < SIGMAS * math.sqrt(part * (1 - part) / COUNT)


def test_what_bf16_has_stays() -> None:
    exact = torch.tensor([0.0, -0.0, 1.0, -2.5, math.inf, -math.inf, 2.0**-133])
    for bits in (0, 1, 0xFFFF):
        drawn_bits = torch.full(exact.shape, bits, dtype=torch.int32)
        for rounded in (round_stochastically(exact, drawn_bits), round_to_nearest(exact)):
            assert torch.equal(floats(rounded).view(torch.int32), exact.view(torch.int32))
    nan = torch.tensor([math.nan, -math.nan])
    assert floats(round_stochastically(nan, torch.tensor([0xFFFF] * 2).int())).isnan().all()
    assert floats(round_to_nearest(nan)).isnan().all()


def test_nearest_values_are_those_of_torch() -> None:
    """Of all upper halves, and lower halves next to ties."""
    high = torch.arange(-(2**15), 2**15, dtype=torch.int32).unsqueeze(1) << 16
    low = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=torch.int32)
    values = (high + low).view(torch.float32)
    values = values[~values.isnan().any(1)]
    expected = values.bfloat16().float()
    assert torch.equal(floats(round_to_nearest(values)), expected)


@pytest.mark.parametrize("columns", [6, 7])
@pytest.mark.parametrize("offset", [0, 1])
def test_pairs_are_two_numbers(columns: int, offset: int) -> None:
    values = drawn((columns + offset,), 1)[offset:].unsqueeze(0)
    assert is_paired(values) == (columns == 6 and offset == 0)
    if is_paired(values):
        pairs = values.view(torch.int32)
        first, second = halves(pairs)
        assert torch.equal(torch.stack([first, second], 2).flatten(1), values.float())
        again = joined(first.view(torch.int32) + 0x1234, second.view(torch.int32) + 0x5678)
        assert torch.equal(again, pairs)


def test_random_bits_are_uniform_and_independent() -> None:
    """Of positions, steps and names, and the two halves of each other."""
    found = [bits_of(), bits_of(step=2), bits_of(name="other"), bits_of() >> 16]
    tolerance = SIGMAS * 0.5 / math.sqrt(COUNT)
    for bits in found[:3]:
        means = torch.stack([((bits >> shift) & 1).double().mean() for shift in range(32)])
        assert (means - 0.5).abs().max() < tolerance
    low = [(bits & 0xFFFF).double() for bits in found]
    for one, other in itertools.combinations([*low, low[0].roll(1)], 2):
        assert abs(torch.corrcoef(torch.stack([one, other]))[0, 1]) < 2 * tolerance


def test_positions_are_taken_as_32_bits() -> None:
    assert [as_int32(value) for value in (5, 2**31, 2**32 + 5, -1)] == [5, -(2**31), 5, -1]


@pytest.mark.parametrize(("name", "rank"), with_proofs(*rotated(SHARDED, (0, 1))))
def test_blocks_are_the_elements_of_the_complete_weight(name: str, rank: int) -> None:
    """Whatever elements of a shard a data-parallel rank has."""
    shape, spec = SHARDED[name]
    full = torch.arange(math.prod(shape)).view(shape)
    shard = full if spec is None else take_shard(full, spec, rank, 2)
    flattened = shard.flatten()
    for start, stop in itertools.combinations(range(len(flattened) + 1), 2):
        part = part_of(shard, spec, range(start, stop), position=3)
        expected = torch.full((3 + stop - start,), -1)
        found = expected.clone()
        expected[3:] = flattened[start:stop]
        for block in blocks_of(Flat(found, ("weight",), (part,)), group_of(rank, 2)):
            for piece in (block, *block.split(2), *block.split(5)):
                rows = torch.arange(piece.rows).unsqueeze(1) * piece.full_step
                piece.view(found).copy_(piece.full_position + rows + torch.arange(piece.columns))
        assert torch.equal(found, expected)


def part_of(shard: Tensor, spec: ShardSpec | None, elements: range, position: int) -> Part:
    parameter = nn.Parameter(shard.float())
    if spec is not None:
        mark_sharded(parameter, spec)
    return Part(ParameterPlace("weight", tuple(shard.shape), 0), parameter, position, elements)


def optimizer_of(master: Tensor, blocks: Sequence[Block], seed: int = 3) -> StochasticAdamW:
    optimizer = StochasticAdamW([{"params": [master]}], **SETTINGS)
    optimizer.attach(seed, {master: blocks})
    return optimizer


def whole(count: int) -> list[Block]:
    return [Block("weight", 1, count, 0, count, 0, count)]


def drawn(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def trained(optimizer: StochasticAdamW, gradients: Sequence[Tensor]) -> list[Tensor]:
    """Weights and moments after steps with these gradients."""
    (master,) = optimizer.param_groups[0]["params"]
    for gradient in gradients:
        master.grad = gradient
        optimizer.step()
    state = optimizer.state[master]
    return [master.detach().clone(), state["exp_avg"].clone(), state["exp_avg_sq"].clone()]


@pytest.mark.parametrize("name", SHARDED)
def test_partitions_of_shards_are_stepped_as_the_complete_weight(name: str) -> None:
    """Claim (precision): with stochastic rounding, partitions of tensor-parallel shards get bit for
    bit the weights and moments that the complete weights get"""
    shape, spec = SHARDED[name]
    start = drawn(shape, 1)
    gradients = [drawn(shape, seed) * 1e-3 for seed in (2, 3, 4)]
    count = start.numel()
    flat = nn.Parameter(start.flatten().clone())
    complete = trained(optimizer_of(flat, whole(count)), [one.flatten() for one in gradients])
    for rank in range(2):

        def shard_of(full: Tensor, rank: int = rank) -> Tensor:
            return full.view(shape) if spec is None else take_shard(full.view(shape), spec, rank, 2)

        expected = [shard_of(values).flatten() for values in complete]
        size = len(expected[0])
        for elements in (range(size // 3), range(size // 3, size)):
            span = slice(elements.start, elements.stop)
            master = nn.Parameter(shard_of(start).flatten()[span].clone())
            part = part_of(shard_of(start), spec, elements, position=0)
            blocks = blocks_of(Flat(master, ("weight",), (part,)), group_of(rank, 2))
            parts = [shard_of(one).flatten()[span].clone() for one in gradients]
            found = trained(optimizer_of(master, blocks), parts)
            for one, other in zip(found, expected, strict=True):
                assert torch.equal(one, other[span])


def test_a_step_is_that_of_adamw_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """To one of the neighbours in bf16; the first moment to the nearest."""
    start = drawn((999,), 1)
    gradient = drawn((999,), 2)
    exact = nn.Parameter(start.float())
    reference = torch.optim.AdamW([exact], **SETTINGS)
    exact.grad = gradient.float()
    reference.step()
    found = trained(optimizer_of(nn.Parameter(start.clone()), whole(999)), [gradient])
    state = reference.state[exact]
    for rounded, value in zip(found, (exact, state["exp_avg"], state["exp_avg_sq"]), strict=True):
        ulp = 2.0 ** (torch.frexp(value.detach())[1] - 8)
        assert ((rounded.float() - value).abs() <= ulp * 1.001).all()
    assert torch.equal(found[1], state["exp_avg"].bfloat16())
    assert not torch.equal(found[0], exact.bfloat16())
    monkeypatch.setattr(stochasticadamw, "HOST_CHUNK", 10)
    parts = trained(optimizer_of(nn.Parameter(start.clone()), whole(999)), [gradient])
    assert all(map(torch.equal, parts, found))


def test_small_updates_are_kept_in_the_mean() -> None:
    """Of weights of 1, whose neighbours in bf16 are 2^-8 and 2^-7 away, in steps of 1e-4; second
    moments with a decay rate of 0.999 reach the squares of the gradients."""
    master = nn.Parameter(torch.ones(4096).bfloat16())
    optimizer = optimizer_of(master, whole(4096))
    optimizer.param_groups[0].update(lr=1e-4, weight_decay=0.0, betas=(0.9, 0.999))
    gradients = [torch.full((4096,), 0.5).bfloat16()] * 100
    weights, _, squares = trained(optimizer, gradients)
    assert float(weights.float().mean()) == pytest.approx(1 - 100 * 1e-4, abs=3e-4)
    assert float(squares.float().mean()) == pytest.approx(0.25 * (1 - 0.999**100), rel=0.01)
    assert float((master.detach() - 1e-4).mean()) == float(master.detach().mean())  # to nearest


def test_a_resume_continues_bit_for_bit() -> None:
    start = drawn((500,), 1)
    gradients = [drawn((500,), seed) for seed in range(2, 8)]
    expected = trained(optimizer_of(nn.Parameter(start.clone()), whole(500)), gradients)
    first = optimizer_of(nn.Parameter(start.clone()), whole(500))
    weights, *_ = trained(first, gradients[:3])
    second = optimizer_of(nn.Parameter(weights), whole(500))
    keep_settings_on_load(second)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    assert all(map(torch.equal, trained(second, gradients[3:]), expected))
    other = optimizer_of(nn.Parameter(start.clone()), whole(500), seed=4)
    assert not torch.equal(trained(other, gradients)[0], expected[0])


@pytest.mark.proof
@pytest.mark.parametrize("count", [10_006, 10_007])
def test_the_compiled_step_is_the_eager_one_bit_for_bit(count: int) -> None:
    """Of pairs, and of numbers that are no pairs, which are copied."""
    step, problem = compile_update(torch.device("cpu"))
    assert problem is None
    start = drawn((count,), 1)
    gradients = [drawn((count,), seed) for seed in (2, 3)]
    expected = trained(optimizer_of(nn.Parameter(start.clone()), whole(count)), gradients)
    compiled = optimizer_of(nn.Parameter(start.clone()), whole(count))
    compiled.attach(3, {compiled.param_groups[0]["params"][0]: whole(count)}, step)
    assert all(map(torch.equal, trained(compiled, gradients), expected))
