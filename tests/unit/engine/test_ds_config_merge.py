"""Filling the configuration from a DeepSpeed file, and contradictions between them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from megatron_ds import schedule_validation, schedules
from megatron_ds.cli.arguments import build_config
from megatron_ds.config.deepspeed_file import get, leaves
from megatron_ds.engine.ds_config.fields import MAPPINGS
from megatron_ds.engine.ds_config.generate import build_ds_config, value_origins
from megatron_ds.engine.ds_config.merge import merge_file
from megatron_ds.engine.ds_config.values import Kind, as_bool, as_int
from megatron_ds.model.declaration.architecture import model_spec
from megatron_ds.model.declaration.rates import multiplier_rule
from megatron_ds.train_state import TrainState
from tests.problems import codes, fields
from tests.tables import tables
from tests.unit.engine.ds_files import FLAGS, FLAGS_OF, SHIPPED, Merge, merged

TABLES = tables(__file__)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_editing_stage_of_file_is_enough(merge: Merge, path: Path, stage: int) -> None:
    """Claim (deepspeed): editing one number switches the ZeRO stage of `ds_configs/zero0.json` to
    `zero3.json`; the two `*_offload.json` reject stages that cannot offload"""
    file: dict[str, Any] = json.loads(path.read_text())
    file["zero_optimization"]["stage"] = stage
    expected = ["zero0-with-offload"] if "offload" in path.stem and stage == 0 else []
    if path.stem == "zero3_nvme" and stage < 3:
        expected = ["nvme-optimizer-below-zero3"] + ["zero0-with-offload"] * (stage == 0)
    config, problems, _ = merge(file, FLAGS_OF.get(path.stem, ""))
    assert sorted(codes(problems)) == expected
    block = build_ds_config(config, 2)["zero_optimization"]
    offloads_parameters = path.stem in ("zero3_offload", "zero3_nvme")
    assert (block["stage"], "offload_param" in block) == (stage, offloads_parameters and stage == 3)
    ineffective = {name for names in fields(config.warnings()) for name in names}
    assert ("remote_device" in ineffective) == (offloads_parameters and stage < 3)


def test_zero_stage_1_is_the_default() -> None:
    assert merged("").config.zero_stage == 1


def test_keys_set_fields_without_flags(merge: Merge) -> None:
    file = TABLES["file"]
    flags = "--recompute-granularity full --deepspeed-activation-checkpointing"
    config, problems, _ = merge(file, flags)
    assert problems == []
    result = build_ds_config(config, 2)
    assert [key for key in leaves(file) if get(result, key) != get(file, key)] == []
    assert "fused" not in result["optimizer"]["params"]
    assert (config.optimizer.clip_grad, config.optimizer.adam_beta1) == (0.3, 0.8)
    assert config.precision.bf16 is True


def test_auto_and_absent_values_come_from_flags(merge: Merge) -> None:
    file = {"train_batch_size": "auto", "bf16": {"enabled": "auto"}, "zero_optimization": {}}
    config, problems, _ = merge(file, "--bf16")
    assert problems == []
    assert build_ds_config(config, 2)["train_batch_size"] == 16
    assert config.precision.bf16 is True


def test_accumulation_steps_give_batch_size_without_flag(merge: Merge) -> None:
    file = {"gradient_accumulation_steps": 3}
    config, problems, _ = merge(file, without="--global-batch-size 16")
    assert problems == []
    assert config.schedule.global_batch_size == 12


INVALID = "ds-value-invalid"
VALUES: dict[str, tuple[Any, Any]] = TABLES["values"]
"""Key -> contradicting values of the flag and the key, where they are not simply two numbers."""


LOSS_SCALING = TABLES["loss_scaling"]
"""Flags next to which the file's fp16 block decides, with a value and that of the key."""


@pytest.mark.parametrize(
    ("key", "name"), [one[:2] for one in MAPPINGS if one[1] in LOSS_SCALING], ids=str
)
def test_flags_of_loss_scaling_have_no_effect_next_to_an_fp16_block(
    merge: Merge, key: str, name: str
) -> None:
    """As in the forks, where DeepSpeed's loss scaler reads its file alone."""
    given = {name: LOSS_SCALING[name][0]}
    last = key.removeprefix("fp16.")
    expected: dict[str, Any] = {"enabled": True, last: LOSS_SCALING[name][1]}
    for block, place in ((expected, f"{key} "), ({"enabled": True}, "fp16 of ")):
        config, problems, warnings = merge({"fp16": block}, given=given)
        assert (problems, codes(warnings)) == ([], ["ds-loss-scaling-by-file"])
        assert place in str(warnings[0])
        assert "ds.json:1" in str(warnings[0])
        defaults = build_ds_config(merge({"fp16": {"enabled": True}}).config, 2)["fp16"]
        assert build_ds_config(config, 2)["fp16"] == defaults | block
    for file in ({"fp16": {"enabled": True, last: "auto"}}, {}):
        config, problems, warnings = merge(file, "--fp16" if not file else "", given=given)
        assert (problems, warnings) == ([], [])
        assert getattr(config.precision, name) == given[name]


def test_a_loss_scale_of_the_file_is_no_contradiction_of_an_equal_flag(merge: Merge) -> None:
    file = {"fp16": {"enabled": True, "loss_scale": 128}}
    config, problems, warnings = merge(file, "--loss-scale 128")
    assert (config.precision.loss_scale, problems, warnings) == (128, [], [])


@pytest.mark.parametrize(("stage", "flags"), TABLES["stage_0"])
def test_stage_0_runs_as_stage_1_in_half_precision(
    merge: Merge, stage: int | None, flags: str
) -> None:
    file = {} if stage is None else {"zero_optimization": {"stage": stage}}
    config, problems, warnings = merge(file, flags)
    assert (problems, codes(warnings)) == ([], ["zero0-in-half-precision"])
    assert config.zero_stage == build_ds_config(config, 2)["zero_optimization"]["stage"] == 1
    assert "option:zero_stage" in str(warnings[0]) or "--zero-stage" in warnings[0].render()
    assert (
        "zero_optimization.stage of" in str(warnings[0]) or "ds.json:1: " in str(warnings[0])
    ) == bool(file)


def test_stage_0_remains_in_fp32_and_its_problems_name_both_places(merge: Merge) -> None:
    file = {"zero_optimization": {"stage": 0}}
    config, problems, warnings = merge(file, "--zero-stage 0")
    assert (config.zero_stage, problems, warnings) == (0, [], [])
    config, (problem,), _ = merge(file, "--zero-stage 0 --cpu-optimizer")
    assert problem.code == "zero0-with-offload"
    assert "zero_optimization.stage of " in str(config.with_origin(problem))


@pytest.mark.parametrize(
    ("key", "name", "read"),
    [one for one in MAPPINGS if "betas" not in one[0] and one[1] not in LOSS_SCALING],
)
def test_contradiction_names_flag_and_key_with_values_and_line(
    merge: Merge, key: str, name: str, read: Kind
) -> None:
    """Claim (deepspeed): every key that contradicts a flag is reported with both values and its
    line"""
    kinds = {as_bool: (True, False), as_int: (3, 4)}
    flag_value, key_value = VALUES.get(key, kinds.get(read, (0.5, 0.25)))
    file: Any = key_value
    for part in reversed(key.split(".")):
        file = {part: file}
    problems = merge(json.dumps(file, indent=1), given={name: flag_value}).problems
    (problem,) = [one for one in problems if one.code == "ds-key-contradicts-flag"]
    assert problem.fields == (name,)
    line = 2 + key.count(".")
    assert f"{key} {json.dumps(key_value)} of " in str(problem)
    assert f"ds.json:{line}" in str(problem)
    assert (str(flag_value) in str(problem)) or isinstance(flag_value, bool)


@pytest.mark.parametrize(("file", "code", "names"), TABLES["not_honoured"])
def test_key_that_cannot_be_honoured_is_rejected(
    merge: Merge, file: object, code: str, names: str
) -> None:
    problems = merge(file).problems
    assert (codes(problems), fields(problems)) == ([code], [tuple(names.split())])
    assert "ds.json:1" in str(problems[0])


def test_number_of_checkpoints_must_be_that_of_the_flags_if_deepspeed_recomputes(
    merge: Merge,
) -> None:
    file = {"activation_checkpointing": {"number_checkpoints": 7, "cpu_checkpointing": True}}
    flags = "--recompute-granularity full --deepspeed-activation-checkpointing"
    problems = merge(file, flags).problems
    expected = ("num_layers", "checkpoint_num_layers")
    assert (codes(problems), fields(problems)) == ([INVALID], [expected])
    config, problems, warnings = merge(file)
    assert (problems, codes(warnings)) == ([], ["ds-keys-ineffective"])
    (ineffective,) = config.warnings()
    assert ineffective.fields == ("checkpoint_in_cpu",)
    assert "ds.json:1" in str(ineffective)


def test_betas_of_the_file_are_those_of_its_optimizer(merge: Merge) -> None:
    file = {"optimizer": {"type": "FusedLion", "params": {"betas": [0.8, 0.7]}}}
    config, problems, _ = merge(file)
    assert problems == []
    options = config.optimizer
    assert (options.optimizer, options.lion_beta1, options.lion_beta2) == ("lion", 0.8, 0.7)
    assert (options.adam_beta1, options.adam_beta2) == (0.9, 0.95)
    assert set(value_origins(config)) >= {"optimizer.type", "optimizer.params.betas"}
    assert build_ds_config(config, 2)["optimizer"]["params"]["betas"] == [0.8, 0.7]


def test_two_keys_of_one_field_must_agree(merge: Merge) -> None:
    file = {"bf16": {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": False}}
    problems = merge(file).problems
    assert "ds-keys-contradict" in codes(problems)
    assert ("bf16_master_weights",) in fields(problems)


@pytest.mark.parametrize(
    ("file", "warning"),
    [
        ({"optimizer": {"type": "FusedAdam"}}, "ds-optimizer-is-class-name"),
        ({"zero_optimization": {"stage3_max_live_parameters": 5}}, "ds-keys-ineffective"),
    ],
)
def test_ineffective_key_is_reported(merge: Merge, file: object, warning: str) -> None:
    config, problems, warnings = merge(file)
    assert (problems, codes(warnings)) == ([], [warning])
    uses_fused_adam = warning == "ds-optimizer-is-class-name"
    assert build_ds_config(config, 2)["optimizer"]["params"]["torch_adam"] != uses_fused_adam


def test_a_key_that_leaves_its_value_open_is_not_called_ineffective(merge: Merge) -> None:
    """So that a file's stage can be changed by its number alone."""
    file = {"zero_optimization": {"stage": 3, "allgather_bucket_size": "auto"}}
    assert merge(file)[1:] == ([], [])


def test_keys_of_a_contradicted_stage_are_not_called_ineffective(merge: Merge) -> None:
    file = {"zero_optimization": {"stage": 3, "stage3_max_live_parameters": 5}}
    _, problems, warnings = merge(file, "--zero-stage 1")
    assert (codes(problems), codes(warnings)) == (["ds-key-contradicts-flag"], [])


@pytest.mark.parametrize(("flags", "code"), TABLES["wrong_layouts"])
def test_layout_that_deepspeed_computes_wrongly_is_rejected(flags: str, code: str) -> None:
    assert codes(merged(flags).problems) == [code]


def test_problem_of_a_value_from_the_file_shows_its_key(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(
        '{\n"gradient_clipping": -1,\n"zero_optimization": {"stage": 0,\n'
        '"offload_optimizer": {"device": "cpu"}}}'
    )
    argv = f"{FLAGS} --deepspeed_config {path}".split()
    _, problems = build_config(argv, world_size=2, warn=lambda _: None, complete=merge_file)
    assert any(f"gradient_clipping of {path}:2" in str(problem) for problem in problems)
    (stage,) = [one for one in problems if f"zero_optimization.stage of {path}:3" in str(one)]
    assert f"zero_optimization.offload_optimizer.device of {path}:4" in str(stage)


CURRICULUM = TABLES["curriculum"]


SHORT = {"min_difficulty": 16, "max_difficulty": 64}
SHORT_STEPS = {"total_curriculum_step": 7, "difficulty_step": 8}


@pytest.mark.parametrize("changes", [{}, {**SHORT, "schedule_config": SHORT_STEPS}])
def test_curriculum_gives_lengths_of_deepspeed_scheduler(
    merge: Merge, changes: dict[str, Any]
) -> None:
    from deepspeed.runtime.data_pipeline.curriculum_scheduler import CurriculumScheduler

    block = {**CURRICULUM, **changes}
    config, problems, warnings = merge({"curriculum_learning": block}, "--seq-length 128")
    assert (problems, codes(warnings)) == ([], ["ds-curriculum-translated"])
    theirs = CurriculumScheduler(block)
    for done in range(40):
        # Engines and Megatron-DeepSpeed ask for the step to come, counted from 1.
        assert schedules.seq_length_at(config, done) == theirs.update_difficulty(done + 1), done
    assert "curriculum_learning" not in build_ds_config(config, 2)


def test_curriculum_auto_leaves_flags_alone(merge: Merge) -> None:
    config, problems, _ = merge({"curriculum_learning": "auto"}, "--curriculum-seqlen 8 16 3")
    assert (config.schedule.curriculum_seqlen, problems) == ((8, 16, 3), [])


@pytest.mark.parametrize(("changes", "flags", "code"), TABLES["curricula"])
def test_unsupported_curriculum_is_rejected(
    merge: Merge, changes: dict[str, Any], flags: str, code: str
) -> None:
    block = {**CURRICULUM, **changes}
    problems = merge({"curriculum_learning": block}, f"--seq-length 128 {flags}").problems
    assert codes(problems) == [code]
    assert all("curriculum_seqlen" in problem.fields[0] for problem in problems)


WARMUP = TABLES["warmup"]


LENGTHS = ["--train-iters 12", "--train-samples 192"]


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("style", ["linear", "log", None])
@pytest.mark.parametrize(("kind", "changes"), TABLES["learning_rates"])
def test_scheduler_gives_learning_rates_of_deepspeed(
    merge: Merge, kind: str, changes: dict[str, Any], style: str | None, length: str
) -> None:
    """With all keys, or with the defaults of absent ones; the default of the style is "log".

    Claim (deepspeed): `WarmupLR`, `WarmupDecayLR` and `WarmupCosineLR` give the learning rates
    of DeepSpeed's classes, those of a logarithmic warmup to the last bit
    """
    import torch
    from deepspeed.runtime import lr_schedules

    params = {**WARMUP, "warmup_type": style, **changes}
    params = {key: value for key, value in params.items() if value is not None}
    file = {"optimizer": {"params": {"lr": 2e-3}}, "scheduler": {"type": kind, "params": params}}
    given = "--lr 1e-4 --adam-beta2 0.95 --weight-decay 0.1 --train-iters 10"
    config, problems, warnings = merge(file, length, without=given)
    ineffective = [] if kind == "WarmupCosineLR" else ["ds-key-dropped"]
    assert (problems, codes(warnings)) == ([], ["ds-scheduler-translated", *ineffective])
    assert not [*schedule_validation.problems(config, 2)]
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=2e-3)
    theirs = getattr(lr_schedules, kind)(optimizer, **params)
    for step in range(12):
        theirs.step(step)
        (rate,) = theirs.get_last_lr()
        ours = schedules.learning_rate(config, TrainState(applied_samples=16 * step), 2)
        rounding = 1e-13 if kind == "WarmupCosineLR" else 1e-15
        assert ours == pytest.approx(rate, rel=rounding), step
        is_logarithmic = style != "linear" and step < params.get("warmup_num_steps", 1000)
        is_logarithmic &= kind != "WarmupCosineLR"
        assert ours == rate or not is_logarithmic, step


def test_a_scheduler_leaves_the_rates_of_other_groups(merge: Merge) -> None:
    """After the warm-up, embeddings and matrices of Muon have theirs, and no one's factor acts
    twice."""
    params = {"warmup_min_lr": 0, "warmup_max_lr": 2e-3, "warmup_num_steps": 4}
    file = {"scheduler": {"type": "WarmupLR", "params": {**params, "warmup_type": "linear"}}}
    flags = "--decoupled-lr 6e-3 --optimizer muon --param-group pattern=layers.0.*,lr=0.25x"
    config, problems, warnings = merge(file, flags, without="--lr 1e-4")
    assert (problems, codes(warnings)) == ([], ["ds-scheduler-translated"])
    weights = model_spec(config.model, config.moe).weights()
    rule = multiplier_rule(config.optimizer, config.model)
    rates = []
    for step in (2, 4, 9):
        plan = schedules.plan(config, TrainState(applied_samples=16 * step), 2)
        assert plan.decoupled_lr is not None
        rates.append((plan.lr, plan.decoupled_lr))
    assert rates == [pytest.approx(pair) for pair in ((1e-3, 3e-3), (2e-3, 6e-3), (2e-3, 6e-3))]
    factors = {name: rule(weight) for name, weight in weights.items()}
    assert factors["layers.0.mlp.fc_in.weight"].lr == 0.25
    assert factors["layers.0.mlp.fc_in.weight"].is_matrix
    assert factors["layers.1.mlp.fc_in.weight"].lr == 1.0
    file["optimizer"] = {"type": "Muon", "params": {"lr": 2e-3, "muon_lr": 2e-2, "adam_lr": 1e-5}}
    problems = merge(file, without="--lr 1e-4").problems
    assert codes(problems) == ["ds-key-unsupported"] * 2
    assert "--decoupled-lr" in str(problems[1])


def test_unknown_style_of_warmup_is_reported_with_its_line(merge: Merge) -> None:
    params = {**WARMUP, "warmup_type": "squared"}
    config = merge({"scheduler": {"type": "WarmupDecayLR", "params": params}}).config
    problem = next(one for one in config.problems(2) if "lr_warmup_style" in one.fields)
    assert "scheduler.params.warmup_type of" in str(config.with_origin(problem))


def test_auto_scheduler_takes_its_values_from_the_flags(merge: Merge) -> None:
    """A block of Hugging Face's documentation, whose warm-up is logarithmic."""
    names = ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps")
    file = {
        "optimizer": {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps"), "auto")},
        "scheduler": {"type": "WarmupDecayLR", "params": dict.fromkeys(names, "auto")},
    }
    config, problems, warnings = merge(file, "--lr-warmup-iters 4")
    assert (problems, codes(warnings)) == ([], ["ds-scheduler-translated"])
    rates = [
        schedules.learning_rate(config, TrainState(applied_samples=16 * step), 2)
        for step in range(11)
    ]
    expected = [1e-4 * math.log(step + 1) / math.log(4) for step in range(4)]
    assert rates == pytest.approx([*expected, *(1e-4 * (10 - step) / 6 for step in range(4, 11))])
    config, problems, (warning,) = merge(file)
    assert (problems, config.schedule.has_warmup) == ([], False)
    assert "--lr-warmup-iters" in str(warning)
    assert not [one for one in config.warnings() if "lr_warmup_style" in one.fields]


def test_flags_replace_absent_keys_of_a_scheduler(merge: Merge) -> None:
    file = {"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 9}}}
    flags = "--lr-warmup-fraction 0.5 --lr-warmup-style linear"
    config, problems, _ = merge(file, flags)
    assert problems == []
    schedule = config.schedule
    assert (schedule.lr_warmup_style, schedule.lr_warmup_iters) == ("linear", 0)
    assert (config.optimizer.lr, schedule.lr_decay_iters) == (1e-4, 9)


def test_scheduler_replaces_the_rate_of_the_optimizer(merge: Merge) -> None:
    scheduler = {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-3}}
    file = {"optimizer": {"params": {"lr": 1e-4}}, "scheduler": scheduler}
    config, problems, warnings = merge(file, without="--lr 1e-4")
    assert (problems, config.optimizer.lr) == ([], 1e-3)
    assert codes(warnings) == ["ds-scheduler-translated", "ds-key-dropped"]
    assert "optimizer.params.lr has no effect" in str(warnings[1])


@pytest.mark.parametrize("block", [{}, {"params": {"warmup_num_steps": 5}}, {"type": None}])
def test_scheduler_without_a_type_is_none(merge: Merge, block: Any) -> None:
    config, problems, _ = merge({"scheduler": block})
    assert (problems, config.schedule.has_warmup) == ([], False)


@pytest.mark.parametrize(("params", "kind", "flags", "code"), TABLES["schedulers"])
def test_unsupported_scheduler_is_rejected(
    merge: Merge, params: Any, kind: str, flags: str, code: str
) -> None:
    assert codes(merge({"scheduler": {"type": kind, "params": params}}, flags).problems) == [code]


def test_scheduler_is_not_translated_with_an_invalid_parallel_size(merge: Merge) -> None:
    file = {"scheduler": {"type": "WarmupDecayLR", "params": WARMUP}}
    config = merge(file, "--tensor-model-parallel-size 0 --train-samples 192").config
    assert config.schedule.lr_decay_samples is None
