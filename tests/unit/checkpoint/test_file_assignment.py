"""Which ranks verify, and which may load, the files of a checkpoint."""

from __future__ import annotations

import pytest

from megatron_ds.checkpoint.files.file_assignment import FileAssignment

OPTIMIZER = {
    (dp, tp): f"zero_pp_rank_{dp}_mp_rank_{tp:02d}_optim_states.pt"
    for dp in range(2)
    for tp in range(2)
}
MODEL = ("mp_rank_00_model_states.pt", "mp_rank_01_model_states.pt")
NAMES = (*OPTIMIZER.values(), *MODEL, "run.json")


@pytest.mark.parametrize("rank", range(4))
def test_each_rank_verifies_the_files_that_it_loads(rank: int) -> None:
    """Two data-parallel ranks of two tensor-parallel ones; the other files are distributed."""
    dp, tp = divmod(rank, 2)
    mine = FileAssignment(tp_size=2, dp_size=2, world_size=4).by_rank(dict.fromkeys(NAMES))[rank]
    assert OPTIMIZER[dp, tp] in mine
    assert len({*mine} & {*OPTIMIZER.values()}) == 1
    assert (MODEL[tp] in mine) == (dp == 0)


@pytest.mark.parametrize("rank", range(8))
def test_a_node_has_the_files_that_its_ranks_load(rank: int) -> None:
    """Two pipeline stages of two data-parallel ranks of two tensor-parallel ones."""
    stage = rank // 4
    dp, tp = divmod(rank % 4, 2)
    readers = FileAssignment(tp_size=2, dp_size=2, world_size=8)
    for model in range(4):
        is_own = model == 2 * stage + tp
        assert readers.is_read_by(f"mp_rank_{model:02d}_model_states.pt", rank) == is_own
        for other in range(2):
            name = f"bf16_zero_pp_rank_{other}_mp_rank_{model:02d}_optim_states.pt"
            assert readers.is_read_by(name, rank) == (is_own and other == dp)
    assert readers.is_read_by("run.json", rank)
