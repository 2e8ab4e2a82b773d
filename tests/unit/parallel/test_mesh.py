"""Rank arithmetic, the mesh of one process, and what DeepSpeed asks of it."""

from __future__ import annotations

import dataclasses
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from megatron_ds.parallel import host_sums
from megatron_ds.parallel.mesh import Group, Mesh, Mpu, axis_groups, groups_across_hosts
from tests.problems import raises_problem


def test_groups_are_those_of_a_table_written_by_hand() -> None:
    groups = axis_groups(16, 2, pp_size=2, ep_size=2)
    assert groups["tp"][:3] == [(0, 1), (2, 3), (4, 5)]
    assert groups["ulysses"] == [(rank,) for rank in range(16)]
    assert groups["ep"][:4] == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert groups["ep_tp"][:2] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert groups["expert_dp"] == [
        (0, 4), (1, 5), (2, 6), (3, 7), (8, 12), (9, 13), (10, 14), (11, 15),
    ]  # fmt: skip
    assert groups["dp"] == [(0, 2, 4, 6), (1, 3, 5, 7), (8, 10, 12, 14), (9, 11, 13, 15)]
    assert groups["pp"] == [(rank, rank + 8) for rank in range(8)]
    assert groups["model"] == [(rank, rank + 1, rank + 8, rank + 9) for rank in (0, 2, 4, 6)]
    assert groups["embedding"] == groups["pp"]
    four_stages = axis_groups(8, 2, pp_size=4)
    assert four_stages["embedding"] == [(0, 6), (1, 7), (2, 4), (3, 5)]

    groups = axis_groups(8, 2, ulysses_size=2)
    assert groups["ulysses"] == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert groups["dp"] == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert groups["model"] == groups["tp"] == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert groups["same_batch"] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert groups["replicas"] == groups["expert_dp"] == [(0, 2, 4, 6), (1, 3, 5, 7)]
    with_experts = axis_groups(8, 1, ulysses_size=2, ep_size=2)
    assert with_experts["ep"] == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert with_experts["expert_dp"] == [(0, 1, 4, 5), (2, 3, 6, 7)]

    groups = axis_groups(16, 2, cp_size=2, ulysses_size=2)
    assert groups["ulysses"][:2] == [(0, 2), (1, 3)]
    assert groups["cp"][:3] == [(0, 4), (1, 5), (2, 6)]
    assert groups["sequence"][:2] == [(0, 2, 4, 6), (1, 3, 5, 7)]
    assert groups["same_batch"] == [tuple(range(8)), tuple(range(8, 16))]
    assert groups["replicas"][0] == (0, 2, 4, 6, 8, 10, 12, 14)
    assert groups["dp"][:2] == [(0, 8), (1, 9)]
    assert groups["heads"] == groups["ulysses"]
    assert groups["chunks"] == groups["cp"]

    groups = axis_groups(16, 1, cp_size=8, cp_inner_size=4, ulysses_size=2)
    assert groups["cp"] == [tuple(range(0, 16, 2)), tuple(range(1, 16, 2))]
    assert groups["heads"] == [tuple(range(8)), tuple(range(8, 16))]
    assert groups["chunks"][:2] == [(0, 8), (1, 9)]
    assert groups["sequence"] == [tuple(range(16))]


@pytest.mark.parametrize(
    ("world", "tp", "pp", "cp", "ulysses", "ep"),
    [
        (1, 1, 1, 1, 1, 1),
        (4, 2, 2, 1, 1, 1),
        (12, 3, 2, 1, 1, 2),
        (24, 2, 1, 1, 3, 2),
        (16, 2, 2, 1, 2, 2),
        (96, 2, 2, 3, 2, 2),
    ],
)
def test_each_axis_has_every_rank_once(
    world: int, tp: int, pp: int, cp: int, ulysses: int, ep: int
) -> None:
    groups = axis_groups(world, tp, pp_size=pp, cp_size=cp, ulysses_size=ulysses, ep_size=ep)
    sp = cp * ulysses
    dp = world // (tp * pp * sp)
    sizes = {
        "tp": tp, "cp": cp, "ulysses": ulysses, "sequence": sp, "ep": ep,
        "expert_dp": dp * sp // ep, "dp": dp, "pp": pp,
        "model": tp * pp, "same_batch": sp * tp, "replicas": dp * sp, "ep_tp": ep * tp,
    }  # fmt: skip
    for name, size in sizes.items():
        assert sorted(rank for ranks in groups[name] for rank in ranks) == list(range(world))
        assert {len(ranks) for ranks in groups[name]} == {size}


@pytest.mark.parametrize("sizes", [{"tp_size": 3}, {"tp_size": 2, "ep_size": 4}, {"tp_size": 0}])
def test_sizes_that_do_not_divide_the_world_size_are_rejected(sizes: dict[str, int]) -> None:
    with raises_problem("world-size-not-divisible-by-parallel-sizes"):
        axis_groups(4, **sizes)


def test_single_process_is_alone_on_every_axis() -> None:
    mesh = Mesh.single()
    for group in mesh.groups().values():
        assert (group.size, group.rank, group.ranks, group.handle) == (1, 0, (0,), None)


def test_mesh_describes_the_axes_that_are_used() -> None:
    mesh = dataclasses.replace(Mesh.single(), ulysses=Group((0, 1), 0, None))
    assert mesh.describe() == "tensor parallel 1 x sequence parallel 2 x data parallel 1"
    assert "sequence parallel 2 (Ulysses) x data" in mesh.describe(detailed=True)
    mesh = dataclasses.replace(mesh, cp=Group((0, 1, 2, 3), 0, None))
    described = mesh.describe(detailed=True, exchange="p2p")
    assert "context parallel 4 (p2p) x sequence parallel 2 (Ulysses)" in described


def test_complete_sequences_are_of_each_rank_alone() -> None:
    pair = Group((0, 1), 1, None)
    mesh = dataclasses.replace(
        Mesh.single(), rank=1, tp=pair, cp=pair, ulysses=pair, sequence=Group((0, 1, 2, 3), 1, None)
    ).of_model(sequence_parallel=True)
    groups = {"tp": (0, 1), "cp": (0, 1), "ulysses": (0, 1), "sequence": (0, 1, 2, 3)}
    with mesh.complete_sequences():
        assert [mesh.cp.ranks, mesh.ulysses.ranks, mesh.sequence.ranks] == [(1,)] * 3
        assert mesh.tp.ranks == (0, 1)
        assert not mesh.tp.sequence_parallel
        assert pair.size == 2
    assert {name: getattr(mesh, name).ranks for name in groups} == groups
    assert mesh.tp.sequence_parallel


def test_mpu_answers_deepspeed_and_lacks_the_method_it_must_not_have() -> None:
    mpu = Mpu(Mesh.single())
    kinds = ("data", "model", "tensor_model", "pipeline_model")
    for axis in (f"{kind}_parallel" for kind in kinds):
        assert getattr(mpu, f"get_{axis}_world_size")() == 1
        assert getattr(mpu, f"get_{axis}_rank")() == 0
        assert getattr(mpu, f"get_{axis}_group")() is None
        assert getattr(mpu, f"get_{axis}_group_ranks")() == [0]
    assert not hasattr(mpu, "initialize_sequence_parallel")


@pytest.mark.parametrize(
    ("world", "tp", "pp", "created"),
    [(1, 1, 1, 0), (1024, 1, 1, 1), (1024, 8, 1, 3), (1024, 1024, 1, 1), (1024, 8, 4, 7)],
)
def test_a_process_creates_one_group_per_axis(
    world: int, tp: int, pp: int, created: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only those that it belongs to: with 8 x 128 ranks tensor, data, and itself alone.

    Pipeline stages have one more, for the messages between them.
    """
    rank = world // 3
    groups: list[list[int]] = []

    def new_group(ranks: list[int], **options: object) -> object:
        assert options["use_local_synchronization"]
        groups.append(ranks)
        return object()

    everyone = object()
    monkeypatch.setattr(dist, "get_world_size", lambda: world)
    monkeypatch.setattr(dist, "get_rank", lambda: rank)
    monkeypatch.setattr(dist, "get_backend", lambda: "gloo")
    monkeypatch.setattr(host_sums, "connect", lambda *_: None)
    monkeypatch.setattr(dist, "new_group", new_group)
    monkeypatch.setattr(dist, "group", SimpleNamespace(WORLD=everyone))
    mesh = Mesh.build(tp, pp_size=pp)
    assert len(groups) == created
    assert all(rank in ranks for ranks in groups)
    assert (mesh.model.handle is mesh.tp.handle) == (pp == 1)
    assert mesh.ep.handle is mesh.ulysses.handle is not None
    assert (mesh.dp.handle is everyone) == (tp * pp == 1)


def test_groups_that_span_hosts_are_found() -> None:
    groups = axis_groups(8, 4)["tp"]
    assert groups_across_hosts(groups, "aaaabbbb") == []
    assert groups_across_hosts(groups, "aaabbbbb") == [(0, 1, 2, 3)]
    assert groups_across_hosts(groups, "abababab") == groups


class Options:
    """As `ProcessGroupNCCL.Options`."""

    _timeout = timedelta(minutes=10)

    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self.is_high_priority_stream = is_high_priority_stream


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
@pytest.mark.parametrize(
    ("world", "sizes", "urgent"),
    [
        (
            16,
            {"tp_size": 2, "pp_size": 2, "ulysses_size": 2},
            {"tp", "ulysses", "sequence", "heads", "pp", "p2p"},
        ),
        (
            8,
            {"tp_size": 1, "cp_size": 2, "ulysses_size": 2},
            {"cp", "ulysses", "sequence", "heads", "chunks"},
        ),
        (4, {"tp_size": 4}, {"tp"}),  # though there is a group of all processes
        (4, {"tp_size": 1, "pp_size": 4}, {"pp", "p2p"}),
        (4, {"tp_size": 1}, set()),
    ],
)
def test_messages_within_a_pass_go_before_other_kernels(
    world: int,
    sizes: dict[str, int],
    urgent: set[str],
    backend: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On NCCL, whose options offer it.

    Claim (parallel): the messages of tensor, sequence and pipeline parallelism go before other
    kernels with NCCL; those between stages have a group of their own
    """

    def new_group(ranks: list[int], *, pg_options: Options | None, **options: object) -> object:
        if pg_options is not None:
            assert pg_options._timeout == options["timeout"]
        return SimpleNamespace(options=pg_options)

    everyone = SimpleNamespace(options=None)
    monkeypatch.setattr(dist, "get_world_size", lambda: world)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_backend", lambda: backend)
    monkeypatch.setattr(host_sums, "connect", lambda *_: None)
    monkeypatch.setattr(dist, "new_group", new_group)
    monkeypatch.setattr(dist, "group", SimpleNamespace(WORLD=everyone))
    stub = SimpleNamespace(Options=Options)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", stub, raising=False)
    mesh = Mesh.build(**sizes, timeout=timedelta(minutes=3))
    names = axis_groups(world, **sizes)
    handles = {name: getattr(mesh, name).handle for name in [*names, "p2p"]}
    found = {
        name
        for name, handle in handles.items()
        if handle.options is not None and handle.options.is_high_priority_stream
    }
    assert found == (urgent if backend == "nccl" else set())
    # Messages between stages have a group of their own on every backend.
    shared = [name for name in names if handles[name] is handles["p2p"]]
    assert bool(shared) == (mesh.pp.size == 1)
