"""DeepSpeed files: unknown, old, unsupported and invalid keys."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from megatron_ds.config import deepspeed_file
from megatron_ds.config.checks import json_remedy
from megatron_ds.engine.ds_config.generate import (
    ZERO3_DEFAULTS,
    ZERO12_DEFAULTS,
    ZERO_DEFAULTS,
    build_ds_config,
    zero_stage,
)
from megatron_ds.engine.ds_config.keys import (
    BLOCKS,
    IGNORED_KEYS,
    OLD_PIN_KEY,
    OLD_SWITCHES,
    REFUSED,
    RENAMED,
    TOP_KEYS,
)
from tests.problems import codes
from tests.unit.engine.ds_files import ROOT, Merge
from tests.versions import make_ds_keys

UNKNOWN, INVALID, UNSUPPORTED = "ds-key-unknown", "ds-value-invalid", "ds-key-unsupported"
CONTRADICTS = "ds-old-key-contradicts"
OFFLOAD = "zero_optimization.offload_optimizer"


@pytest.mark.parametrize(
    ("file", "code", "shown"),
    [
        ({"zero_optimisation": {}}, UNKNOWN, "'zero_optimization'"),
        ({"zero_optimization": {"stge": 1}}, UNKNOWN, "'stage'"),
        ({"bf16": {"enable": True}}, UNKNOWN, "'enabled'"),
        ({"optimizer": {"params": {"lrr": 1}}}, UNKNOWN, "'lr'"),
        ({"data_types": {"params": "fp32"}}, UNKNOWN, "data_types.params"),
        ({"activation_checkpointing": {"profil": True}}, UNKNOWN, "'profile'"),
        ({"timers": {"throughput": {"enable": 1}}}, UNKNOWN, "'enabled'"),
        ({"zero_optimization": {"offload_param": {"pin_mem": 1}}}, UNKNOWN, "pin_memory"),
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup_nu_steps": 0}}}, UNKNOWN, "num"),
        ({"bf16": {"enabled": "yes"}}, INVALID, "bf16.enabled"),
        ({"optimizer": {"type": "Lamb"}}, INVALID, "optimizer.type"),
        ({"optimizer": {"params": {"betas": [0.9]}}}, INVALID, "optimizer.params.betas"),
        ({"zero_optimization": {"offload_optimizer": {"device": "gpuu"}}}, INVALID, OFFLOAD),
        ({"zero_optimization": {"offload_param": "cpu"}}, INVALID, "offload_param"),
        ({"zero_optimization": {"cpu_offload": "yes"}}, INVALID, "zero_optimization.cpu_offload"),
        ({"zero_optimization": {"reduce_bucket_size": -1}}, INVALID, "reduce_bucket_size"),
        ({"fp16": []}, INVALID, "fp16"),
        ({"fp16": {"initial_scale_power": 1e400}}, INVALID, "fp16.initial_scale_power"),
        ({"fp16": {"initial_scale_power": 5000}}, INVALID, "fp16.initial_scale_power"),
        ({"train_batch_size": 2.5}, INVALID, "train_batch_size"),
        ({"steps_per_print": "ten"}, INVALID, "steps_per_print"),
        ({"gradient_accumulation_steps": 0}, INVALID, "gradient_accumulation_steps"),
        ({"zero_optimization": {"mics_shard_size": 2}}, UNSUPPORTED, "mics"),
        (
            {"compression_training": {"a": {"shared": {"enabled": True}}}},
            UNSUPPORTED,
            "compression",
        ),
        ({"elasticity": {"enabled": True}}, UNSUPPORTED, "elasticity"),
        ({"checkpoint": {"load_universal": True}}, UNSUPPORTED, "load_universal"),
        ({"optimizer": {"params": {"bias_correction": False}}}, UNSUPPORTED, "bias_correction"),
        (
            {"zero_optimization": {"cpu_offload": True, "offload_optimizer": {"device": "nvme"}}},
            CONTRADICTS,
            OFFLOAD,
        ),
        (
            {"gradient_clipping": 0.5, "optimizer": {"params": {"max_grad_norm": 1.0}}},
            CONTRADICTS,
            "gradient_clipping",
        ),
    ],
)
def test_wrong_key_is_reported(merge: Merge, file: object, code: str, shown: str) -> None:
    problem = next(problem for problem in merge(file).problems if problem.code == code)
    assert "ds.json:1: " in problem
    assert shown in problem


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('{\n  "bf16": {\n    "enabled": true,\n  }\n}', 3),
        ('{\n  "betas": [1, 2, ]\n}', 2),
        ('{\n  # stage\n  "bf16": {}\n}', 2),
        ('{\n  "bf16": {} // half\n}', 2),
        ('{\n  "bf16": {},\n\n  /* half */ "a": 1\n}', 4),
        ('{\n  "bf16" {}\n}', None),
        ('{"bf16": {},, "a": 1}', None),
    ],
)
def test_comment_or_trailing_comma_is_located(text: str, line: int | None) -> None:
    with pytest.raises(json.JSONDecodeError) as raised:
        json.loads(text)
    remedy = json_remedy(raised.value)
    assert re.findall(r"line (\d+)", remedy) == ([] if line is None else [str(line)])


PARAM_DEVICE = "zero_optimization.offload_param.device"
GATHER = "zero_optimization.stage3_gather_16bit_weights_on_model_save"


@pytest.mark.parametrize(
    ("file", "key", "value"),
    [
        ({"bfloat16": {"enabled": True}}, "bf16.enabled", True),
        ({"zero_optimization": True}, "zero_optimization.stage", 1),
        ({"zero_optimization": False}, "zero_optimization.stage", 0),
        ({"zero_optimization": {"stage": 3, "cpu_offload_params": True}}, PARAM_DEVICE, "cpu"),
        ({"zero_optimization": {"stage": 3, "cpu_offload_param": True}}, PARAM_DEVICE, "cpu"),
        (
            {"zero_optimization": {"cpu_offload": True, "cpu_offload_use_pin_memory": False}},
            OFFLOAD,
            {"device": "cpu", "pin_memory": False},
        ),
        (
            {"zero_optimization": {"stage": 3, "stage3_gather_fp16_weights_on_model_save": True}},
            GATHER,
            True,
        ),
        (
            {"zero_optimization": {"stage": 3, "max_live_parameters": 1e8}},
            "zero_optimization.stage3_max_live_parameters",
            1e8,
        ),
        ({"optimizer": {"params": {"max_grad_norm": 0.3}}}, "gradient_clipping", 0.3),
        ({"fp32_allreduce": True}, "communication_data_type", "fp32"),
    ],
)
def test_old_key_is_translated_with_a_warning(
    merge: Merge, file: object, key: str, value: object
) -> None:
    config, problems, warnings = merge(file)
    assert problems == []
    assert set(codes(warnings)) == {"ds-old-key"}
    assert deepspeed_file.get(build_ds_config(config, 2), key) == value


@pytest.mark.parametrize(
    "file",
    [
        {"amp": {"enabled": False}},
        {"curriculum_learning": {"enabled": False, "x": 1}},
        {"compression_training": {"a": {"shared": {"enabled": False}, "b": {"bits": 8}}}},
        {"sparse_gradients": False},
        {"zero_optimization": {"mics_shard_size": 0}},
        {"dataloader_drop_last": True},
    ],
)
def test_unsupported_key_that_is_off_is_dropped_with_a_warning(merge: Merge, file: Any) -> None:
    config, problems, warnings = merge(file)
    assert (problems, codes(warnings)) == ([], ["ds-key-dropped"])
    assert deepspeed_file.get(build_ds_config(config, 2), next(iter(file))) in (
        None,
        build_ds_config(merge({}).config, 2).get(next(iter(file))),
    )


def test_legacy_file_is_translated(merge: Merge) -> None:
    """A file of 2020, without batch sizes."""
    config, problems, warnings = merge((ROOT / "examples" / "deepspeed_config.json").read_text())
    assert problems == []
    assert (config.precision.fp16, zero_stage(config)) == (True, 3)
    assert config.deepspeed.cpu_optimizer
    zero = build_ds_config(config, 2)["zero_optimization"]
    assert zero["offload_optimizer"] == {"device": "cpu", "pin_memory": False, "ratio": 1.0}
    assert (zero["reduce_bucket_size"], zero["overlap_comm"]) == (2e8, True)
    assert "cpu_offload" not in zero
    assert codes(warnings) == ["ds-old-key", "ds-keys-ineffective"]
    assert ["ds.json:13" in warnings[0], "ds.json:7" in warnings[1]] == [True, True]
    assert "allgather_bucket_size" in warnings[1]


def test_problem_shows_line_of_its_key(merge: Merge) -> None:
    """Blocks share the names of their keys, and strings may look like keys."""
    problems = merge(
        """{
  "tensorboard": {"job_name": "\\"stge\\": {", "output_path": "x"},
  "comms_logger": {"prof_ops": ["stge", {"stge": 1}]},
  "fp16": {"enabled": false},
  "bf16": {
    "enabled": 7
  },
  "zero_optimization": {"stage": 1,
    "stge": 2}
}"""
    ).problems
    found = {problem.code: problem.split("ds.json:")[1].split(":")[0] for problem in problems}
    assert found == {"ds-key-unknown": "9", "ds-value-invalid": "6"}


def test_every_key_has_one_treatment() -> None:
    known = set(TOP_KEYS) | {f"{block}.{key}" for block, keys in BLOCKS.items() for key in keys}
    assert not known & {*REFUSED, *RENAMED, *OLD_SWITCHES, *IGNORED_KEYS, OLD_PIN_KEY}
    assert set(RENAMED.values()) <= known
    assert {new for new, _ in OLD_SWITCHES.values()} <= known
    defaults = ZERO_DEFAULTS | ZERO12_DEFAULTS | ZERO3_DEFAULTS
    assert defaults.keys() <= BLOCKS["zero_optimization"].keys()


def test_key_table_is_current_for_installed_deepspeed() -> None:
    """`python tests/versions/make_ds_keys.py` rewrites it."""
    assert json.loads(make_ds_keys.OUTPUT.read_text()) == make_ds_keys.keys()


def test_deprecated_keys_of_deepspeed_models_are_translated() -> None:
    translated = {*RENAMED, *OLD_SWITCHES, OLD_PIN_KEY, *REFUSED}
    for block, model in make_ds_keys.models().items():
        for name, field in model.model_fields.items():
            key = f"{block}.{field.alias or name}"
            assert (
                key in translated
                or key.rpartition(".")[2] in {*BLOCKS[block]}
                or (key in IGNORED_KEYS)
            )


def test_keys_that_deepspeed_has_removed_are_refused() -> None:
    from deepspeed.runtime import config as theirs

    removed = set(theirs._REMOVED_TOP_LEVEL_CONFIG_KEYS)
    removed |= {f"zero_optimization.{key}" for key in theirs._REMOVED_ZERO_CONFIG_KEYS}
    assert removed <= REFUSED.keys() | {"curriculum_learning"}  # which is translated
