"""A resume repeats every field of the model, of the layout and of the data order."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from megatron_ds.checkpoint.compatibility import (
    CHANGEABLE_BATCH_SIZES,
    CHANGEABLE_FIELDS,
)
from megatron_ds.checkpoint.manager import CheckpointManager
from megatron_ds.checkpoint.metadata import DataOrder, ParallelLayout
from megatron_ds.config import (
    Config,
    DataConfig,
    DeepSpeedConfig,
    ModelConfig,
    MoEConfig,
    OptimizerConfig,
    ParallelConfig,
    PrecisionConfig,
    RuntimeConfig,
)
from megatron_ds.config.options.optimizer_specs import ADAM, ADAM_STOCHASTIC, SPECS
from megatron_ds.config.problems import UserError
from megatron_ds.parallel.mesh import Group, Mesh
from tests.optimizers import options_of
from tests.problems import codes, raises_problem
from tests.tables import tables
from tests.unit.checkpoint.fakes import Managers, save

TABLES = tables(__file__)

ROPE = {"position_embedding_type": "rope"}
MODEL: dict[str, tuple[Any, dict[str, Any]]] = TABLES["model"]
"""By field: another value, and the values of other fields with which it has an effect."""
EXPERTS = MoEConfig(num_experts=(4,))
MOE: dict[str, Any] = TABLES["moe"]
"""By field another value than that of EXPERTS."""
CHANGED_MOE: dict[str, Any] = TABLES["changed_moe"]
LAYOUT: dict[str, dict[str, Any]] = {
    "tensor_model_parallel_size": {"parallel": ParallelConfig(tensor_model_parallel_size=2)},
    "data_parallel_size": {},
    "ds_sequence_parallel_size": {"parallel": ParallelConfig(ds_sequence_parallel_size=2)},
    "expert_model_parallel_size": {
        "moe": EXPERTS,
        "parallel": ParallelConfig(expert_model_parallel_size=2),
    },
    "zero_stage": {"deepspeed": DeepSpeedConfig(zero_stage=2)},
    "precision": {"precision": PrecisionConfig(bf16=True)},
}
"""By field of the layout: settings with another value."""


def rejected(checkpoints: CheckpointManager) -> set[str]:
    """The fields because of which a run cannot resume."""
    with pytest.raises(UserError) as raised:
        checkpoints.restoring.select()
    return {name for problem in raised.value.problems for name in problem.fields}


def test_every_field_of_the_model_is_here() -> None:
    names = {item.name for item in dataclasses.fields(ModelConfig)}
    assert names - (CHANGEABLE_FIELDS - {"seq_length"}) - {"vocab_size"} == MODEL.keys()


@pytest.mark.parametrize("others", {str(others): others for _, others in MODEL.values()}.values())
def test_another_model_is_rejected(
    others: dict[str, Any], manager: Managers, config: Config
) -> None:
    model = dataclasses.replace(config.model, **others)
    save(manager(model=model), 1)
    assert manager(model=model).restoring.select() is not None
    for field, (value, needed) in MODEL.items():
        if needed == others:
            other = dataclasses.replace(model, **{field: value})
            assert field in rejected(manager(model=other))


ROPES: list[dict[str, Any]] = TABLES["ropes"]


@pytest.mark.parametrize("changes", ROPES)
def test_another_rope_needs_a_flag(
    changes: dict[str, Any], manager: Managers, config: Config, logged: list[str]
) -> None:
    model = dataclasses.replace(config.model, **ROPE)
    save(manager(model=model), 1)
    scaled = dataclasses.replace(model, **changes)
    with pytest.raises(UserError) as raised:
        manager(model=scaled).restoring.select()
    assert set(codes(raised.value.problems)) == {"resume-rope-changed"}
    assert rejected(manager(model=scaled)) <= {*changes, "override_rope"}
    logged.clear()
    assert manager(model=scaled, override_rope=True).restoring.select() is not None
    assert len(logged) == len(raised.value.problems)
    for other in ({"rotary_interleaved": True}, {"position_embedding_type": "alibi"}):
        changed = dataclasses.replace(scaled, **other)
        assert next(iter(other)) in rejected(manager(model=changed, override_rope=True))


def test_another_length_changes_the_base_of_ntk_scaling(manager: Managers, config: Config) -> None:
    ntk = {**ROPE, "rope_ntk_factor": 2.0, "max_position_embeddings": 4}
    model = dataclasses.replace(config.model, **ntk)
    save(manager(model=model), 1)
    longer = dataclasses.replace(model, seq_length=8)
    with raises_problem("resume-rope-changed", "seq_length", "override_rope", contains=" 8 "):
        manager(model=longer).restoring.select()
    assert manager(model=longer, override_rope=True).restoring.select() is not None


@pytest.mark.parametrize("length", [3, 8])
@pytest.mark.parametrize("kind", ["rope", "alibi", "none", "learned_absolute"])
def test_the_sequence_length_may_change_if_every_position_has_an_embedding(
    kind: str, length: int, manager: Managers, config: Config, logged: list[str]
) -> None:
    model = dataclasses.replace(config.model, position_embedding_type=kind)
    save(manager(model=model), 1)
    other = dataclasses.replace(model, seq_length=length)
    if kind == "learned_absolute":
        with raises_problem("resume-positions-changed", "seq_length", contains="--max-position-em"):
            manager(model=other).restoring.select()
        other = dataclasses.replace(other, max_position_embeddings=4)
        if length > 4:
            return
    logged.clear()
    assert manager(model=other).restoring.select() is not None
    (warning,) = logged
    assert warning.startswith("WARNING: --seq-length is 4 in ")


@pytest.mark.parametrize("field", [item.name for item in dataclasses.fields(MoEConfig)])
def test_experts_are_those_of_the_checkpoint(field: str, manager: Managers) -> None:
    names = {item.name for item in dataclasses.fields(MoEConfig)}
    assert names == MOE.keys() | (names & CHANGEABLE_FIELDS)
    parts = {"moe_shared_expert_intermediate_size": 8, "moe_router_num_groups": 4}
    experts = dataclasses.replace(EXPERTS, moe_expert_capacity_factor=2.0, **parts)
    save(manager(moe=experts), 1)
    value = {**MOE, **CHANGED_MOE}.get(field, 0.3)
    other = manager(moe=dataclasses.replace(experts, **{field: value}))
    if field in MOE:
        assert field in rejected(other)
    else:
        assert other.restoring.select() is not None


@pytest.mark.parametrize("field", LAYOUT)
@pytest.mark.parametrize("is_8_bit", [False, True])
def test_another_layout_is_rejected_for_8_bit_moments_only(
    field: str, is_8_bit: bool, manager: Managers, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert {item.name for item in dataclasses.fields(ParallelLayout)} >= LAYOUT.keys()
    optimizer = OptimizerConfig(use_bnb_optimizer=is_8_bit)
    moe = {"moe": EXPERTS} if "moe" in LAYOUT[field] else {}
    save(manager(optimizer=optimizer, **moe), 1)
    other = manager(optimizer=optimizer, **LAYOUT[field])
    if field == "data_parallel_size":
        mesh = dataclasses.replace(Mesh.build(1), dp=Group((0, 1), 0, None))
        monkeypatch.setattr(other.restoring, "_mesh", mesh)
    if is_8_bit:
        with raises_problem("resume-8-bit-moments", contains=" -> "):
            other.restoring.select()
    else:
        assert other.restoring.select() is not None


def test_another_optimizer_and_moments_of_another_width_are_rejected(manager: Managers) -> None:
    save(manager(), 1)
    for spec in (spec for spec in SPECS if spec not in (ADAM, ADAM_STOCHASTIC)):
        assert rejected(manager(optimizer=options_of(spec))) == {"optimizer"}
    unused = OptimizerConfig(optimizer="sgd", use_bnb_optimizer=True)
    save(manager(optimizer=OptimizerConfig(optimizer="sgd")), 2)
    assert manager(optimizer=unused).restoring.select() is not None


def test_another_data_order_is_rejected(manager: Managers) -> None:
    first = DataConfig(data_path=("tokens",), split="9,1")
    changes: dict[str, dict[str, Any]] = {
        "seed": {"runtime": RuntimeConfig(seed=1)},
        "split": {"data": dataclasses.replace(first, split="8,2")},
        "dataloader_type": {"data": dataclasses.replace(first, dataloader_type="cyclic")},
    }
    names = {item.name for item in dataclasses.fields(DataOrder)}
    assert names - set(CHANGEABLE_BATCH_SIZES) == changes.keys()
    save(manager(data=first), 1)
    assert manager(data=first).restoring.select() is not None
    for field, change in changes.items():
        assert field in rejected(manager(**{"data": first, **change})), field
    with raises_problem("resume-data-order-changed", "split") as raised:
        manager(data=dataclasses.replace(first, split=None)).restoring.select()
    assert "None" not in str(raised.problem)


def test_documents_that_are_left_out_must_be_named_again(manager: Managers) -> None:
    first = DataConfig(data_path=("tokens",), exclude_documents="out.txt")
    save(manager(data=first), 1)
    assert manager(data=dataclasses.replace(first, exclude_documents="more.txt")).restoring.select()
    with raises_problem("resume-exclusion-missing", "exclude_documents"):
        manager(data=dataclasses.replace(first, exclude_documents=None)).restoring.select()
