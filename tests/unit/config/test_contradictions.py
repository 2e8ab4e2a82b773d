"""Every contradiction between options of a run, by code and fields."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from megatron_ds import schedule_validation
from megatron_ds.config import GROUPS, Config, ParallelConfig
from megatron_ds.config.fields import OptionSpec, option_fields
from megatron_ds.config.options.optimizer_specs import NAMES
from megatron_ds.config.problems import Problem
from megatron_ds.engine.ds_config.merge import merge_file
from tests.problems import codes, fields
from tests.tables import tables

VALID = {
    "num_layers": 2,
    "hidden_size": 48,
    "num_attention_heads": 6,
    "seq_length": 64,
    "vocab_size": 91,
    "tokenizer_type": "NullTokenizer",
    "data_path": ("data",),
    "micro_batch_size": 2,
    "train_samples": 1000,
    "lr": 1.0,
}
DP_SIZE = 2
TABLES = tables(str(Path(__file__).with_name("contradictions")), tuple)
SETTINGS = TABLES["settings"]
ROPE, FULL, PARTITIONED = (SETTINGS[name] for name in ("rope", "full", "partitioned"))


def config_of(**changes: Any) -> Config:
    return Config().with_values({**VALID, **changes})


def problems(config: Config, dp_size: int = DP_SIZE) -> list[Problem]:
    parallel = config.parallel
    replica = parallel.tensor_model_parallel_size * parallel.sequence_ranks
    world_size = dp_size * replica
    return [*config.problems(world_size), *schedule_validation.problems(config, dp_size)]


@pytest.mark.parametrize("changes", TABLES["valid"])
def test_valid_configurations_have_no_problem(changes):
    assert problems(config_of(**changes)) == []


CASES = [
    *((each, each.pop("problem")) for each in TABLES["contradictions"]),
    ({"save": f"{__file__}/x"}, "not-a-folder"),
]


@pytest.mark.parametrize(("changes", "expected"), CASES)
def test_contradiction_is_reported(changes, expected):
    """By a code with all fields that are set, or with the first fields after a colon.

    A colon alone stands for the last field that is set.
    """
    code, colon, names = expected.partition(":")
    found = problems(config_of(**changes))
    matching = fields(problem for problem in found if problem.code == code)
    if colon:
        first = tuple(names.split()) or tuple(changes)[-1:]
        assert any(each[: len(first)] == first for each in matching), codes(found)
    else:
        assert any(changes.keys() <= set(each) for each in matching), codes(found)


OPTIONS = [each for group in GROUPS.values() for each in option_fields(group)]


def test_every_value_out_of_its_range_is_reported():
    """docs/reference/flags.md has the ranges."""
    for item, spec in OPTIONS:
        # The value 0 of a size means that it is not given.
        low = None if spec.minimum is None else spec.minimum - (2 if item.default == 0 else 1)
        high = None if spec.maximum is None else spec.maximum + 1
        for value in (low, spec.above, high, spec.below):
            if value is not None:
                found = problems(config_of(**{item.name: (value,) if spec.nargs == "*" else value}))
                outcome = zip(codes(found), fields(found), strict=True)
                assert ("out-of-range", (item.name,)) in outcome, (item.name, value)


def test_required_options_are_reported_together():
    found = Config().problems(world_size=1)
    required = {"num_layers", "hidden_size", "num_attention_heads", "seq_length"}
    required |= {"micro_batch_size", "lr"}
    names = {problem.fields[0] for problem in found if problem.code == "required"}
    assert names == required
    assert {"training-data-required", "tokenizer-option-required"} <= set(codes(found))
    # A default that a flag requests is a value of its own.
    found = Config(given=frozenset({"num_layers"})).problems(world_size=1)
    assert ("out-of-range", ("num_layers",)) in zip(codes(found), fields(found), strict=True)


def test_layers_of_a_program_are_not_in_fp8():
    fp8 = config_of(fp8_format="hybrid", fp8_recipe="rowwise")
    assert codes(problems(fp8)) == []
    with_layer = dataclasses.replace(fp8, custom_parts={"layer": "__main__.layer"})
    assert codes(problems(with_layer)) == ["fp8-of-own-layers"]


def test_numbers_that_are_not_finite_suppress_other_problems():
    config = config_of(lr=float("inf"), clip_grad=float("inf"), hidden_size=50)
    found = config.problems(1)
    assert codes(found) == ["not-finite", "not-finite"]
    assert fields(found) == [("lr",), ("clip_grad",)]


def test_tensor_parallel_size_must_divide_heads_groups_and_mlp():
    def found(tp_size: int, **changes: Any) -> dict[str, Problem]:
        problems = list(config_of(**changes).model.problems(tp_size))
        assert set(codes(problems)) == {"not-divisible-by-tensor-parallel-size"}
        return {problem.fields[0]: problem for problem in problems}

    sizes = found(4, ffn_hidden_size=90)
    assert set(sizes) == {"num_attention_heads", "ffn_hidden_size"}
    assert "(nearest: 4 or 8; " in str(sizes["num_attention_heads"])
    assert ": 1, 2, 3, 6)" in str(sizes["num_attention_heads"])
    groups = found(6, num_query_groups=2)["num_query_groups"]
    assert ": 1, 2)" in str(groups)
    assert "(from --hidden-size 48)" in str(found(5)["ffn_hidden_size"])


BY_SLICES = "world-size-not-divisible-by-sequence-parallel-size"
BY_STAGES = "world-size-not-divisible-by-stages"


@pytest.mark.parametrize(
    ("sizes", "world_size", "expected"),
    [
        ((3, 1, 1), 4, {"world-size-not-divisible": "1, 2, 4; or start 3 or 6 processes"}),
        ((2, 4, 1), 12, {BY_STAGES: "stages: 1, 2, 3, 6; or start 8 or 16 processes"}),
        ((1, 1, 4), 18, {BY_SLICES: "that fit: 1, 2, 3, 6, 9, 18)"}),
        ((2, 2, 2), 6, {BY_SLICES: "", BY_STAGES: "stages: 1, 3; or start 4 or 8 processes"}),
        ((2, 2, 2), 6, {BY_SLICES: "", BY_STAGES: "of at least 2 ranks"}),
        # The sizes that are proposed fit the number of stages.
        ((2, 2, 4), 12, {BY_SLICES: "that fit: 1, 3)"}),
        (
            (1, 1, 2, 2),
            6,
            {BY_SLICES: "--context-parallel-size 2 x --ds-sequence-parallel-size 2 = 4 "},
        ),
    ],
)
def test_sizes_must_divide_the_processes(sizes, world_size, expected):
    tp_size, pp_size, ulysses_size, *cp_size = sizes
    parallel = ParallelConfig(
        tp_size,
        pp_size,
        ds_sequence_parallel_size=ulysses_size,
        context_parallel_size=cp_size[0] if cp_size else 1,
    )
    found = {problem.code: problem for problem in parallel.problems(world_size, num_layers=4)}
    assert found.keys() == expected.keys()
    assert all(text in str(found[code]) for code, text in expected.items())


def test_ranks_that_share_sequences_have_no_samples_of_their_own():
    parallel = ParallelConfig(tensor_model_parallel_size=2, ds_sequence_parallel_size=4)
    assert [parallel.data_parallel_size(size) for size in (24, 20)] == [3, 0]


def test_batch_size_problem_shows_its_arithmetic():
    config = config_of(tensor_model_parallel_size=2, global_batch_size=10)
    (problem,) = problems(config)
    assert "--micro-batch-size 2 x data-parallel size 2 = 4" in str(problem)
    assert "4 processes / --tensor-model-parallel-size 2 = 2" in str(problem)
    assert "(nearest: 8 or 12; data-parallel sizes valid for 10: 1, 5)" in str(problem)


LAST = {"train_samples": 35, "global_batch_size": 8}


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"train_samples": 32, "global_batch_size": 8}, None),
        (SETTINGS["iterations"], None),
        (LAST, "incomplete-last-batch"),
        ({**LAST, "rampup_batch_size": (4, 4, 10)}, "incomplete-last-batch"),
        ({"train_samples": 36, "curriculum_seqlen": (8, 64, 9)}, None),
        ({"train_samples": 36, "curriculum_seqlen": (8, 64, 18)}, "curriculum-not-completed"),
        ({"train_samples": 36, "curriculum_seqlen": (8, 48, 9)}, "curriculum-below-sequence"),
        ({"train_samples": 36, "train_tokens": 36 * 64 + 1}, "tokens-not-reached"),
        ({"train_samples": 38, "train_tokens": 36 * 64}, None),
        (
            {"train_samples": 36, "step_batch_size_schedule": ("0:4 2304:8",)},
            "batch-size-not-reached",
        ),
    ],
)
def test_unexpected_effect_of_a_valid_schedule_is_warned_of(changes, code):
    config = config_of(**changes)
    assert problems(config) == []
    found = list(schedule_validation.warnings(config, DP_SIZE))
    assert codes(found) == ([] if code is None else [code])


def other_optimizer(spec: OptionSpec) -> str | None:
    """An optimizer that does not have an option; None unless this is all that the option needs."""
    admitted = spec.conditions[0].admitted if len(spec.conditions) == 1 else {}
    if admitted.keys() != {"optimizer"}:
        return None
    return next(name for name in NAMES if name not in admitted["optimizer"])


def other_value(item: dataclasses.Field[Any], spec: OptionSpec) -> Any:
    """A valid value of an option that is not its default."""
    if spec.choices:
        return next(choice for choice in spec.choices if choice != item.default)
    if isinstance(item.default, bool):
        return not item.default
    return item.default + 1 if isinstance(item.default, int) else item.default / 2


CONDITIONAL = {item.name: item.default for item, spec in OPTIONS if spec.only_with}
INEFFECTIVE: dict[str, Sequence[tuple[Any, dict[str, Any]]]] = {
    **{name: [(not on, {})] for name, on in CONDITIONAL.items() if isinstance(on, bool)},
    **{
        item.name: [(other_value(item, spec), {"optimizer": name})]
        for item, spec in OPTIONS
        if (name := other_optimizer(spec)) is not None
    },
    **TABLES["ineffective"],
}
"""By field, values and other settings next to which they have no effect."""


@pytest.mark.parametrize(
    ("name", "value", "others"),
    [(name, *case) for name, cases in INEFFECTIVE.items() for case in cases],
)
def test_flag_without_effect_is_a_warning_and_no_error(
    name: str, value: Any, others: dict[str, Any]
) -> None:
    """Claim (command-line): any line of a script can be left out: flags that depend on it are
    warned of"""
    config = dataclasses.replace(
        config_of(**{name: value, **others}), given=frozenset({name, *others})
    )
    assert [*problems(config), *merge_file(config, DP_SIZE)[1]] == []
    found = [warning for warning in config.warnings() if name in warning.fields]
    assert codes(found) == ["no-effect"]


def test_a_condition_names_the_flags_that_are_missing_or_in_the_way() -> None:
    defaults = Config()._values
    for _, spec in (each for group in GROUPS.values() for each in option_fields(group)):
        for condition in spec.conditions:
            values = [value for each in condition.admitted.values() for value in each]
            if all(value is None or isinstance(value, bool) for value in values):
                assert condition.without_flags == condition.holds(defaults), condition


def test_every_conditional_flag_has_a_case_without_effect() -> None:
    assert CONDITIONAL.keys() == INEFFECTIVE.keys()


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"loss_scale": 1.0, "hysteresis": 3}, [("loss_scale", "hysteresis")]),
        ({"fp16": True, "hysteresis": 3}, []),
        ({"accumulate_allreduce_grads_in_fp32": False, "bf16": True}, []),
        ({**ROPE, "rotary_base": 5.0, "reset_position_ids": True}, []),
        ({"add_qkv_bias": True, "add_bias_linear": False}, []),
        ({"log_memory_to_tensorboard": True, "tensorboard_dir": "x"}, []),
        ({"save": "x", "save_interval": 2, "keep_last": 1}, []),
        ({"lr_warmup_init": 0.5, "lr_warmup_fraction": 0.1}, []),
        ({**FULL, **PARTITIONED, "contiguous_checkpointing": True, "profile_backward": True}, []),
        ({"zero_stage": 3, "remote_device": "cpu"}, []),
        ({"split": "1"}, []),
        ({"data_path": None, "per_split_data_args_path": "x", "split": "1"}, [("split",)]),
        ({**SETTINGS["own_files"], "valid_data_path": ("x",), "split": "1"}, [("split",)]),
    ],
)
def test_only_flags_without_effect_are_warned_of(
    changes: dict[str, Any], expected: list[tuple[str, ...]]
) -> None:
    config = dataclasses.replace(config_of(**changes), given=frozenset(changes))
    assert problems(config) == []
    assert fields(config.warnings()) == expected


def test_schedule_checks_accept_an_incomplete_configuration():
    assert list(schedule_validation.problems(Config(), 1)) == []
    assert list(schedule_validation.problems(config_of(train_samples=0), 0)) == []
