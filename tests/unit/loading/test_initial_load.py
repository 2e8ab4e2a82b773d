"""Options and states of a run that starts from a checkpoint of Megatron."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_ds.config import CheckpointConfig, Config, ModelConfig
from megatron_ds.config.problems import Problem
from megatron_ds.conversion.megatron.detect import detect_megatron
from megatron_ds.engine.states.state_reader import TensorReader
from megatron_ds.loading.initial_load import InitialLoad, conflicts, find_importable
from megatron_ds.loading.plan import make_plan
from megatron_ds.train_state import TrainState
from tests.problems import codes, fields
from tests.unit.checkpoint.fakes import run_of
from tests.unit.conversion.megatron_writer import Layout, write_checkpoint
from tests.unit.conversion.models import SMALL, random_source

MODEL = ModelConfig(**{**SMALL, "num_query_groups": 2, "kv_channels": 6})
ADAM = ("exp_avg", "exp_avg_sq")


def write(folder: Path, *, has_optimizer: bool = True, **layout: Any) -> Path:
    """A checkpoint with 50 tokens in 64 rows, at iteration 7 after 28 samples."""
    folder.mkdir()
    optimizer = {kind: random_source(MODEL, seed=seed) for seed, kind in enumerate(ADAM, 2)}
    layout = {"version": 3, **layout}
    states = optimizer if has_optimizer else None
    return write_checkpoint(folder, MODEL, random_source(MODEL), Layout(**layout), states)


def start_of(run: Config) -> InitialLoad:
    config, plan, _ = make_plan(run)
    assert plan.imported is not None
    return InitialLoad.of(plan.imported, config.with_vocab(50))


def test_options_of_the_model_come_from_the_checkpoint(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", has_optimizer=False)
    config, _, problems = make_plan(run_of(folder, seq_length=10, hidden_dropout=0.2))
    assert problems == []
    expected = dataclasses.replace(
        MODEL,
        **{name: value for name, value in MODEL.derived_values.items() if value is not None},
        seq_length=10,
        hidden_dropout=0.2,
        attention_dropout=ModelConfig.attention_dropout,
        vocab_size=0,
    )
    assert config.model == expected
    assert config.origins["num_layers"] == f"from {folder / 'iter_0000007'}"


def test_contradictions_name_both_values(tmp_path: Path) -> None:
    folder = write(tmp_path / "a")
    given = {"num_layers": 3, "activation": "swiglu", "hidden_size": 32}
    config, plan, problems = make_plan(run_of(folder, **given))
    assert codes(problems) == ["foreign-setting-differs"] * 2
    assert codes(conflicts(plan.imported, config, 50)) == []  # missing layers are no second problem
    assert sorted(fields(problems)) == [("activation",), ("num_layers",)]
    (layers,) = [problem for problem in problems if "num_layers" in problem.fields]
    assert "--num-layers 3" in str(layers)
    assert "--num-layers 2" in str(layers)


@pytest.mark.parametrize(
    ("arguments", "fitting", "others"),
    [({}, (50,), (49, 64)), ({"tokenizer_type": "GPT2BPETokenizer"}, (64, 20), (65,))],
    ids=["known size", "number of rows"],
)
def test_the_tokenizer_must_be_that_of_the_checkpoint(
    arguments: dict[str, str], fitting: tuple[int, ...], others: tuple[int, ...], tmp_path: Path
) -> None:
    """An unknown size of the vocabulary is at most the number of rows."""
    config, plan, _ = make_plan(run_of(write(tmp_path / "a", arguments=arguments)))
    for size in (*fitting, *others):
        expected = ["foreign-vocabulary-differs"] if size in others else []
        assert codes(conflicts(plan.imported, config, size)) == expected


def test_a_run_is_continued_with_its_samples_and_padding(tmp_path: Path) -> None:
    config, plan, _ = make_plan(run_of(write(tmp_path / "a")))
    assert config.model.softmax_vocab_size == 64
    start = InitialLoad.of(plan.imported, config.with_vocab(50))
    assert start.state == TrainState(
        iteration=7,
        consumed_samples=28,
        consumed_tokens=28 * 12,
        applied_samples=24,
        applied_tokens=24 * 12,
        applied_iterations=6,
        skipped_iterations=1,
    )
    assert start.optimizer_steps == 6
    assert start.weights["embedding.word.weight"].shape == (64, 32)
    assert start.notes == ()


@pytest.mark.parametrize(
    ("layout", "optimizer"),
    [
        ({"has_optimizer": False}, "adam"),
        ({}, "sgd"),
        ({"arguments": {"consumed_train_samples": None}}, "adam"),
    ],
)
def test_otherwise_only_the_weights_are_loaded(
    layout: dict[str, Any], optimizer: str, tmp_path: Path
) -> None:
    run = run_of(write(tmp_path / "a", **layout))
    start = start_of(run.with_values({"optimizer": optimizer}))
    assert codes(start.notes) == ["foreign-weights-alone"]
    assert (start.state, start.optimizer, start.optimizer_steps) == (TrainState(), {}, None)
    assert start.weights["embedding.word.weight"].shape == (50, 32)


@pytest.mark.parametrize(
    ("options", "state", "has_optimizer"),
    [
        ({"finetune": True}, TrainState(), False),
        ({"no_load_optim": True}, TrainState(7, 28, 336, 24, 288, 6, 1), False),
        ({"reset_iteration": True}, TrainState(applied_samples=24, applied_tokens=288), True),
    ],
)
def test_flags_leave_out_the_progress_or_the_optimizer(
    options: dict[str, bool], state: TrainState, has_optimizer: bool, tmp_path: Path
) -> None:
    run = run_of(write(tmp_path / "a"))
    run = run.with_values(options)
    start = start_of(run)
    assert (start.state, start.notes) == (state, ())
    assert bool(start.optimizer) == has_optimizer
    if "no_load_optim" in options:
        assert start_of(run.with_values({"optimizer": "sgd"})).state == state


def test_the_options_of_the_checkpoint_replace_given_ones_on_request(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", has_optimizer=False)
    run = run_of(folder, num_layers=3, activation="swiglu", seq_length=10)
    warnings: list[Problem] = []
    requested = run.with_values({"use_checkpoint_args": True})
    config, _, problems = make_plan(requested, warn=warnings.append)
    assert problems == []
    assert (config.model.num_layers, config.model.activation) == (2, MODEL.activation)
    assert config.model.seq_length == 10
    assert sorted(fields(warnings)) == [
        ("activation", "use_checkpoint_args"),
        ("num_layers", "use_checkpoint_args"),
    ]


def test_a_continued_run_keeps_its_sequence_length_at_first(tmp_path: Path) -> None:
    run = run_of(write(tmp_path / "a"), seq_length=10)
    _, _, problems = make_plan(run)
    assert codes(problems) == ["foreign-length-differs"]
    for name in ("finetune", "reset_iteration"):
        assert make_plan(run.with_values({name: True}))[2] == []


def test_a_release_has_weights_alone(tmp_path: Path) -> None:
    folder = write(tmp_path / "a")
    (folder / "iter_0000007").rename(folder / "release")
    (folder / "latest_checkpointed_iteration.txt").write_text("release\n")
    start = start_of(run_of(folder))
    assert start.path.name == "release"
    assert codes(start.notes) == ["foreign-weights-alone"]


def test_a_missing_stage_is_a_problem_of_the_start(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", tp=2)
    (folder / "iter_0000007" / "mp_rank_01" / "model_optim_rng.pt").unlink()
    assert codes(make_plan(run_of(folder))[2]) == ["megatron-files-missing"]


def test_a_checkpoint_of_this_program_is_preferred(tmp_path: Path) -> None:
    folder = write(tmp_path / "a")
    assert find_importable(folder, CheckpointConfig(), detect_megatron(folder)) is not None
    own = folder / "global_step9"
    own.mkdir()
    (own / "run.json").write_text("{}")
    (folder / "latest").write_text("global_step9")
    (folder / "latest_checkpointed_iteration.txt").write_text("9")
    assert find_importable(folder, CheckpointConfig(), detect_megatron(folder)) is None


def test_states_are_read_by_rows_and_columns(tmp_path: Path) -> None:
    start = start_of(run_of(write(tmp_path / "a")))
    reads: list[str] = []

    def counting(name: str, tensor: TensorReader) -> TensorReader:
        def load() -> Tensor:
            reads.append(name)
            return tensor.read()

        return TensorReader.full(tensor.shape, tensor.dtype, load)

    weights = {name: counting(name, tensor) for name, tensor in start.weights.items()}
    states = dataclasses.replace(start, weights=weights)
    name = "layers.1.attention.proj.weight"
    full = start.weights[name].read()

    parts = [states.tensor(name, "master").read(range(row, row + 8)) for row in range(0, 32, 8)]
    some = states.tensor(name, "master").read(range(2, 4), (1, [range(3), range(6, 8)]))
    table = states.tensor("embedding.word.weight", "exp_avg").read(range(60, 70))

    assert torch.equal(torch.cat(parts), full)
    assert torch.equal(some, full[2:4][:, [0, 1, 2, 6, 7]])
    assert torch.equal(table[:4], start.optimizer["exp_avg"]["embedding.word.weight"].read()[60:])
    assert table.shape == (10, 32)
    assert not table[4:].any()
    assert reads == [name]
    assert states.state_names(name) == ADAM
    assert states.steps(name) == 6
