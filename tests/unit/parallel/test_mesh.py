"""The mesh of one process, and what DeepSpeed may ask of it."""

from __future__ import annotations

from megatron_ds.parallel.mesh import Mesh


def test_a_single_process_is_alone_on_every_axis() -> None:
    mesh = Mesh.single()
    for group in (mesh.tp, mesh.dp, mesh.pp, mesh.model):
        assert (group.size, group.rank, group.ranks, group.handle) == (1, 0, (0,), None)


def test_mpu_answers_deepspeeds_questions_and_hides_the_name_it_must_not_have() -> None:
    mpu = Mesh.single().mpu()
    for axis in ("data_parallel", "model_parallel", "tensor_model_parallel"):
        assert getattr(mpu, f"get_{axis}_world_size")() == 1
        assert getattr(mpu, f"get_{axis}_rank")() == 0
        assert getattr(mpu, f"get_{axis}_group")() is None
    assert mpu.get_pipeline_model_parallel_world_size() == 1
    assert mpu.get_data_parallel_group_ranks() == [0]
    # DeepSpeed takes an object with this name for its own sequence-parallel state.
    assert not hasattr(mpu, "initialize_sequence_parallel")
