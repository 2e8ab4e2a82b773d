"""Parallel layers on 2 and 4 ranks have the output and gradients of one process.

Claim (logging): a replicated weight that acts on a rank's heads has the gradient of all heads, and
counts once in the norm

Claim (extension): an own loss that repeats the cross entropy has the losses of the built-in one;
with a sharded vocabulary, an own loss has those of one process
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from megatron_ds.engine.norms import is_counted
from megatron_ds.parallel import chunks
from megatron_ds.parallel.collectives import all_gather, gather_from_group, reduce_from_group_
from megatron_ds.parallel.embedding import VocabParallelEmbedding
from megatron_ds.parallel.fused_linear_cross_entropy import linear_cross_entropy
from megatron_ds.parallel.linear import ColumnParallelLinear, RowParallelLinear
from megatron_ds.parallel.mesh import Group, Mesh
from megatron_ds.parallel.rng import RngStreams
from megatron_ds.parallel.sharding import declared_parameter, take_shard
from megatron_ds.parallel.weights import Partial, Role, ShardSpec, Weight, linear_weights
from tests.dist.engine_harness import full_tensor
from tests.distributed import RankError, run_ranks
from tests.problems import raises_problem

VOCAB = 21
PADDED = 32
HIDDEN = 8  # with 4 ranks the last one holds nothing but padding


def draw(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def draw_shard(shape: tuple[int, ...], dim: int, ranges: Sequence[range]) -> torch.Tensor:
    index = torch.tensor([at for one in ranges for at in one], dtype=torch.int64)
    return draw(shape).index_select(dim, index)


DRAWS = SimpleNamespace(normal=lambda name, std: draw_shard)
TABLE = Weight("", (PADDED, HIDDEN), ShardSpec(0, (PADDED,)), 1.0, padding=PADDED - VOCAB)


def leaf(*shape: int) -> torch.Tensor:
    return draw(shape).requires_grad_()


def full_grad(param: torch.nn.Parameter, group: Group) -> torch.Tensor:
    return full_tensor(param.grad, param, group)


def full_input_grad(x: torch.Tensor, group: Group) -> torch.Tensor:
    assert x.grad is not None
    return torch.cat(list(all_gather(x.grad, group)), dim=-1)


def close(actual: torch.Tensor | None, expected: torch.Tensor | None) -> None:
    """Assert equality up to 1e-5 of the norm."""
    assert actual is not None
    assert expected is not None
    assert actual.shape == expected.shape
    error = (actual - expected).norm().item()
    assert error <= 1e-5 * expected.norm().item(), (error, actual, expected)


def check_collectives(group: Group) -> None:
    size = group.size
    rank = group.rank
    ranks = torch.arange(1.0, size + 1)
    part = leaf(3, 4)
    gathered = gather_from_group(part * ranks[rank], group)
    close(gathered, torch.cat([part * factor for factor in ranks], dim=-1))
    weights = draw((3, 4 * size))
    (gathered * weights).sum().backward()
    close(part.grad, weights.chunk(size, dim=-1)[rank] * ranks[rank])

    x = leaf(5)
    total = reduce_from_group_(x * ranks[rank], group)
    close(total, x * ranks.sum())
    total.sum().backward()
    close(x.grad, ranks[rank].expand(5))


def check_linear(group: Group) -> None:
    single = Mesh.single().tp
    x_shape = (5, 3, HIDDEN)
    for sections, bias in (((8, 4, 4), True), ((12,), False)):
        inner = sum(sections)
        spec = ShardSpec(2, sections)
        rows = ShardSpec(0, sections)
        columns = ShardSpec(1, (inner,))
        weights = list(linear_weights("", (inner, HIDDEN), rows, bias=bias, std=1.0))
        column, one_column = (
            ColumnParallelLinear(*weights, group=g, init=DRAWS) for g in (group, single)
        )
        x = leaf(*x_shape)
        one_x = leaf(*x_shape)
        y = column(x)
        one_y = one_column(one_x)
        close(y, take_shard(one_y, spec, group.rank, group.size))
        y.square().sum().backward()
        one_y.square().sum().backward()
        close(x.grad, one_x.grad)
        compare_gradients(column, one_column, group)

        weights = list(linear_weights("", (HIDDEN, inner), columns, bias=bias, std=1.0))
        row, one_row = (RowParallelLinear(*weights, group=g, init=DRAWS) for g in (group, single))
        for layer in (row, one_row):
            if layer.bias is not None:
                layer.bias.data.fill_(0.5)
        one_x = leaf(5, 3, inner)
        x = one_x.detach().chunk(group.size, dim=-1)[group.rank].clone().requires_grad_()
        y = row(x)
        one_y = one_row(one_x)
        close(y, one_y)
        y.square().sum().backward()
        one_y.square().sum().backward()
        close(full_input_grad(x, group), one_x.grad)
        compare_gradients(row, one_row, group)


def compare_gradients(layer: nn.Module, one: nn.Module, group: Group) -> None:
    for param, expected in zip(layer.parameters(), one.parameters(), strict=True):
        close(full_grad(param, group), expected.grad)


def check_embedding(group: Group) -> None:
    table, one = (
        VocabParallelEmbedding(TABLE, group=g, init=DRAWS) for g in (group, Mesh.single().tp)
    )
    ids = torch.tensor([[0, 20, 7], [8, 7, 15]])
    close(table(ids), one(ids))
    table(ids).square().sum().backward()
    one(ids).square().sum().backward()
    close(full_grad(table.weight, group), one.weight.grad)
    for wrong in (VOCAB, -1):
        with raises_problem("token-id-outside-vocabulary", contains=f"token id {wrong} "):
            table(torch.tensor([[3, wrong]]))


def check_partial_gradients(group: Group) -> None:
    """A vector that acts on this rank's heads has the gradient of all heads, and counts once."""
    x = draw((4 * group.size, 3))
    single = Mesh.single().tp
    part = x.chunk(group.size)[group.rank]
    for when, in_sequence in itertools.product(Partial, (False, True)):
        ranks = dataclasses.replace(group, sequence_parallel=in_sequence)
        weight = Weight("", (3,), mean=1.0, role=Role.VECTOR, partial_over=when)
        scale, one = (declared_parameter(weight, g, DRAWS) for g in (ranks, single))
        (part * scale).square().sum().backward()
        is_summed = when is Partial.ALWAYS or (when is Partial.SEQUENCE and in_sequence)
        ((x if is_summed else part) * one).square().sum().backward()
        close(scale.grad, one.grad)
        counts = is_counted(scale, dataclasses.replace(Mesh.single(), tp=ranks))
        assert all_gather(torch.tensor([counts]), group).sum() == 1


def check_cross_entropy(group: Group) -> None:
    compare_cross_entropy(group, linear_cross_entropy)


def check_custom_loss(group: Group) -> None:
    """A function of the logits of all ranks, in chunks."""
    function = functools.partial(F.cross_entropy, reduction="none")
    with chunks_of(3 * group.size, group):
        compare_cross_entropy(group, functools.partial(linear_cross_entropy, function=function))


def compare_cross_entropy(group: Group, compute: Callable[..., torch.Tensor]) -> None:
    # Nothing may depend on the values of the padding.
    table = F.pad(draw((VOCAB, HIDDEN)), (0, 0, 0, PADDED - VOCAB), value=3.0)
    labels = torch.arange(VOCAB).repeat(2)
    for weights in (None, (torch.arange(2 * VOCAB) % 3).float()):
        x = leaf(2 * VOCAB, HIDDEN)
        one_x = leaf(2 * VOCAB, HIDDEN)
        spread = 10.0  # large logits: the maximum over all ranks must be subtracted
        part = torch.nn.Parameter(table.chunk(group.size)[group.rank].clone())
        one_table = table.clone().requires_grad_()
        loss, _ = compute(x * spread, part, labels, weights, vocab_size=VOCAB, group=group)
        one_losses = F.cross_entropy(
            (one_x * spread) @ one_table[:VOCAB].t(), labels, reduction="none"
        )
        one_loss = (one_losses * (1.0 if weights is None else weights)).sum()
        close(loss, one_loss)
        (0.5 * loss).backward()
        (0.5 * one_loss).backward()
        close(x.grad, one_x.grad)
        assert part.grad is not None
        close(all_gather(part.grad, group).flatten(0, 1), one_table.grad)
        with torch.no_grad():
            value, _ = compute(x * spread, part, labels, weights, vocab_size=VOCAB, group=group)
            close(value, one_loss)


def check_cross_entropy_in_chunks(group: Group) -> None:
    """Ranks with padding must form the same chunks, because they communicate once per chunk."""
    with chunks_of(3, group):
        check_cross_entropy(group)


def chunks_of(tokens: int, group: Group) -> AbstractContextManager[int]:
    size = 4 * tokens * PADDED // group.size
    return mock.patch.object(chunks, "CHUNK_BYTES", size)


def check_random_streams(group: Group) -> None:
    rng = RngStreams(group.rank)
    rng.begin_step(1, 5, 1)
    rng.begin_layer(rng.next_micro_batch(), 0)
    replicated = torch.rand(100)
    with rng.fork_tp_rng():
        sharded = torch.rand(100)
    after = torch.rand(100)
    for tensor in (replicated, after):
        assert (all_gather(tensor, group) == tensor).all()
    parts = all_gather(sharded, group)
    assert all((parts[0] != part).any() for part in parts[1:])


def check_mesh(rank: int) -> None:
    mesh = Mesh.build(tp_size=2)
    assert (mesh.tp.ranks, mesh.tp.rank) == ((rank // 2 * 2, rank // 2 * 2 + 1), rank % 2)
    assert (mesh.dp.ranks, mesh.dp.rank) == ((rank % 2, rank % 2 + 2), rank // 2)
    assert (mesh.pp.ranks, mesh.model.ranks) == ((rank,), mesh.tp.ranks)
    pipelined = Mesh.build(tp_size=2, pp_size=2)
    assert pipelined.pp.ranks == (rank % 2, rank % 2 + 2)
    assert pipelined.model.ranks == (0, 1, 2, 3)
    assert pipelined.model.rank == rank
    assert mesh.model.handle is mesh.tp.handle
    assert mesh.dp.handle is mesh.expert_dp.handle
    assert mesh.pp.handle is mesh.ulysses.handle is mesh.ep.handle
    sums = all_gather(torch.tensor([float(rank)]), mesh.dp).sum()
    assert sums == sum(mesh.dp.ranks)


CHECKS: list[Callable[[Group], None]] = [
    check_collectives,
    check_linear,
    check_embedding,
    check_partial_gradients,
    check_cross_entropy,
    check_cross_entropy_in_chunks,
    check_custom_loss,
    check_random_streams,
]


def check_all(rank: int, world_size: int) -> None:
    group = Mesh.build(tp_size=world_size).tp
    for check in CHECKS:
        check(group)
    if world_size == 4:
        check_mesh(rank)


def fail_on_rank_one(rank: int) -> None:
    if rank == 1:
        raise KeyError("only here")
    torch.distributed.barrier()


def test_a_failing_rank_fails_the_test() -> None:
    with pytest.raises(RankError, match=r"(?s)rank 1 failed.*in fail_on_rank_one.*only here"):
        run_ranks(fail_on_rank_one, 2)


def test_layers_on_two_ranks() -> None:
    run_ranks(check_all, 2, 2)


def test_layers_on_four_ranks() -> None:
    run_ranks(check_all, 4, 4)
