"""The generated DeepSpeed JSON: complete, filled in from the file, free of contradictions."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from megatron_ds.arguments import read
from megatron_ds.config import Config
from megatron_ds.engine.ds_config import (
    OWN_KEYS,
    PASSED_KEYS,
    REFUSED_KEYS,
    ZERO3_DEFAULTS,
    ZERO_DEFAULTS,
    ZERO_PASSED,
    complete,
    generate,
    zero_stage,
)

ROOT = Path(__file__).parents[3]
FILES = sorted((ROOT / "ds_configs").glob("*.json"))
GOLDEN = ROOT / "tests" / "golden" / "ds_configs"
FLAGS = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 2 "
    "--global-batch-size 16 --lr 1e-4 --adam-beta2 0.95 --weight-decay 0.1 --train-iters 10"
)


def config_of(line: str = "", file: object = None, folder: Path | None = None) -> Config:
    if file is not None:
        assert folder is not None
        path = folder / "ds.json"
        path.write_text(file if isinstance(file, str) else json.dumps(file))
        line += f" --deepspeed_config {path}"
    config, _ = read(f"{FLAGS} {line}".split(), world_size=2, warn=lambda _: None)
    assert config is not None
    return config


@pytest.fixture
def completed(tmp_path):
    """Gives the completed configuration and the problems of flags and a file, on 2 processes."""

    def run(file: object, line: str = "", world_size: int = 2) -> tuple[Config, list[str]]:
        return complete(config_of(line, file, tmp_path), world_size)

    return run


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_shipped_file_gives_its_golden_json(path):
    """python tests/unit/engine/test_ds_config.py rewrites the golden files."""
    assert generated(path) == json.loads((GOLDEN / path.name).read_text())


def generated(path: Path) -> object:
    config, problems = complete(config_of(f"--deepspeed_config {path}"), 2)
    assert problems == []
    return generate(config, dp_size=2)


def test_six_files_are_shipped():
    assert [path.stem for path in FILES] == [
        "zero0",
        "zero1",
        "zero2",
        "zero2_offload",
        "zero3",
        "zero3_offload",
    ]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_deepspeed_accepts_what_is_generated(path):
    from deepspeed.runtime.config import DeepSpeedConfig

    config, _ = complete(config_of(f"--deepspeed_config {path}"), 1)
    read_back = DeepSpeedConfig(generate(config, dp_size=1))
    assert read_back.train_batch_size == 16
    assert read_back.gradient_accumulation_steps == 8
    assert read_back.zero_config.stage == json.loads(path.read_text())["zero_optimization"]["stage"]


def with_stage(name: str, stage: int) -> dict[str, Any]:
    """A file of ds_configs with nothing but the stage changed."""
    file: dict[str, Any] = json.loads((ROOT / "ds_configs" / f"{name}.json").read_text())
    file["zero_optimization"]["stage"] = stage
    return file


@pytest.mark.parametrize("name", ["zero0", "zero1", "zero2", "zero3"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_editing_the_stage_of_the_file_switches_it(completed, name, stage):
    config, problems = completed(with_stage(name, stage))
    assert problems == []
    assert generate(config, 2)["zero_optimization"]["stage"] == stage


@pytest.mark.parametrize(
    ("name", "refused"), [("zero2_offload", {0}), ("zero3_offload", {0, 1, 2})]
)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_file_that_offloads_refuses_stages_that_cannot(completed, name, refused, stage):
    _, problems = completed(with_stage(name, stage))
    assert any("offload" in problem for problem in problems) == (stage in refused), problems
    assert bool(problems) == (stage in refused)


def test_without_a_file_the_flags_decide():
    config, problems = complete(config_of("--clip-grad 0.5 --bf16 --zero-stage 2"), 2)
    assert problems == []
    result = generate(config, 2)
    assert result["train_batch_size"] == 16
    assert result["train_micro_batch_size_per_gpu"] == 2
    assert result["gradient_accumulation_steps"] == 4
    assert result["gradient_clipping"] == 0.5
    assert result["bf16"]["enabled"] is True
    assert result["fp16"]["enabled"] is False
    assert result["data_types"]["grad_accum_dtype"] == "fp32"
    assert result["zero_optimization"]["stage"] == 2
    assert result["optimizer"]["params"] == {
        "lr": 1e-4,
        "betas": [0.9, 0.95],
        "eps": 1e-8,
        "weight_decay": 0.1,
        "torch_adam": True,
        "fused": True,
    }


def test_the_reduction_bucket_is_no_larger_than_the_model(completed):
    config, _ = completed({"zero_optimization": {"reduce_bucket_size": "auto"}})
    size = generate(config.with_vocab(1000), 2)["zero_optimization"]["reduce_bucket_size"]
    assert 1000 * 64 < size < 1_000_000
    config, _ = completed({"zero_optimization": {"reduce_bucket_size": 5e7}})
    assert generate(config.with_vocab(1000), 2)["zero_optimization"]["reduce_bucket_size"] == 5e7


def test_zero_1_is_the_default():
    assert zero_stage(complete(config_of(), 2)[0]) == 1


def test_keys_of_the_file_fill_in_flags_left_at_their_defaults(completed):
    config, problems = completed(
        {
            "gradient_clipping": 0.3,
            "bf16": {"enabled": True, "immediate_grad_update": True},
            "zero_optimization": {"stage": 3, "cpu_offload": True, "reduce_bucket_size": 2e8},
            "optimizer": {"type": "AdamW", "params": {"eps": 1e-6, "betas": [0.8, 0.95]}},
            "data_types": {"grad_accum_dtype": "bf16"},
            "activation_checkpointing": {"number_checkpoints": 4, "profile": True},
            "wall_clock_breakdown": True,
        }
    )
    assert problems == []
    result = generate(config, 2)
    assert config.optimizer.clip_grad == result["gradient_clipping"] == 0.3
    assert config.precision.bf16 is True
    assert result["bf16"]["immediate_grad_update"] is True
    assert config.optimizer.adam_beta1 == 0.8
    assert result["optimizer"]["params"]["eps"] == 1e-6
    assert result["optimizer"]["params"]["torch_adam"] is False
    assert "fused" not in result["optimizer"]["params"]
    assert result["zero_optimization"]["offload_optimizer"] == {"device": "cpu"}
    assert result["zero_optimization"]["reduce_bucket_size"] == 2e8
    assert result["data_types"]["grad_accum_dtype"] == "bf16"
    assert result["activation_checkpointing"]["number_checkpoints"] == 4
    assert result["activation_checkpointing"]["profile"] is True
    assert result["wall_clock_breakdown"] is True


def test_auto_and_absent_values_come_from_the_flags(completed):
    config, problems = completed(
        {"train_batch_size": "auto", "bf16": {"enabled": "auto"}, "zero_optimization": {}}, "--bf16"
    )
    assert problems == []
    assert generate(config, 2)["train_batch_size"] == 16
    assert config.precision.bf16 is True


@pytest.mark.parametrize(
    ("file", "line", "words"),
    [
        ({"train_batch_size": 32}, "", "--global-batch-size 16 contradicts train_batch_size 32"),
        ({"zero_optimization": {"stage": 2}}, "--zero-stage 1", "--zero-stage 1 contradicts"),
        ({"gradient_clipping": 0.5}, "--clip-grad 1.0", "contradicts gradient_clipping 0.5"),
        ({"bf16": {"enabled": False}}, "--bf16", "--bf16 contradicts bf16.enabled false"),
        (
            {"optimizer": {"type": "SGD"}},
            "--optimizer adam",
            '--optimizer adam contradicts optimizer.type "SGD"',
        ),
        ({"optimizer": {"params": {"betas": [0.9, 0.5]}}}, "", "--adam-beta2 0.95 contradicts"),
        ({"gradient_accumulation_steps": 3}, "", "x data-parallel size 2 = 12, but the global"),
    ],
)
def test_a_contradiction_names_both_sides(completed, file, line, words):
    _, problems = completed(file, line)
    assert any(words in problem for problem in problems), problems
    assert all("ds.json" in problem for problem in problems)


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ({"zero_optimisation": {}}, "no key 'zero_optimisation'; did you mean 'zero_optimization'"),
        ({"zero_optimization": {"stge": 1}}, "zero_optimization.stge; did you mean 'stage'"),
        ({"scheduler": {"type": "WarmupLR"}}, "scheduler is not supported"),
        ({"amp": {"enabled": False}}, "amp is not supported: DeepSpeed has removed it"),
        ({"bf16": {"enabled": "yes"}}, "must be true or false"),
        ({"optimizer": {"type": "Lamb"}}, "must be Adam, AdamW or SGD"),
        ({"optimizer": {"params": {"betas": [0.9]}}}, "betas [0.9]: must be two numbers"),
        (
            {"activation_checkpointing": {"number_checkpoints": 7}},
            "--checkpoint-num-layers 1 are 4",
        ),
        ({"bf16": {"enable": True}}, "no key bf16.enable; did you mean 'enabled'"),
        ({"optimizer": {"params": {"lrr": 1}}}, "no key optimizer.params.lrr"),
        ({"data_types": {"params": "fp32"}}, "no key data_types.params"),
        (
            {"activation_checkpointing": {"partition_activation": True}},
            "did you mean 'partition_activations'",
        ),
        (
            {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "gpuu"}}},
            'must be "none", "cpu" or "nvme"',
        ),
        ({"zero_optimization": {"offload_param": "cpu"}}, "offload_param must be an object"),
        (
            {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "nvme"}}},
            "needs an nvme_path",
        ),
        ({"fp16": []}, "fp16 must be an object"),
        ({"train_batch_size": 2.5}, "must be a whole number"),
        ("{", "ds.json:1:2: not JSON"),
        ('{"bf16": {}, "bf16": {}}', "stands twice"),
        ("[]", "must hold a JSON object"),
    ],
)
def test_a_wrong_file_is_an_error_in_words(completed, file, words):
    _, problems = completed(file)
    assert any(words in problem for problem in problems), problems


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--zero-stage 0 --bf16", "take --zero-stage 1"),
        ("--zero-stage 0 --fp16", "take --zero-stage 1"),
        ("--zero-stage 0 --cpu-optimizer", "take --zero-stage 1, 2 or 3"),
        ("--zero-stage 2 --remote-device cpu", "by ZeRO stage 3 alone, but the stage is 2"),
        ("--zero-stage 3 --remote-device nvme", "gives the nvme_path"),
        ("--optimizer sgd --cpu-optimizer", "cannot be offloaded"),
        ("--fp16 --initial-loss-scale 1000", "must be a power of two"),
    ],
)
def test_layouts_that_would_be_wrong_are_refused(line, words):
    _, problems = complete(config_of(line), 2)
    assert any(words in problem for problem in problems), problems


def test_legacy_keys_become_todays(completed):
    config, problems = completed(
        {
            "bfloat16": {"enabled": True},
            "zero_optimization": {
                "stage": 3,
                "cpu_offload_params": True,
                "cpu_offload_use_pin_memory": True,
                "stage3_gather_fp16_weights_on_model_save": True,
                "max_live_parameters": 1e8,
            },
        }
    )
    assert problems == []
    zero = generate(config, 2)["zero_optimization"]
    assert config.precision.bf16 is True
    assert zero["offload_param"] == {"device": "cpu"}
    assert zero["stage3_gather_16bit_weights_on_model_save"] is True
    assert zero["stage3_max_live_parameters"] == 1e8
    assert "cpu_offload_use_pin_memory" not in zero


def test_accumulation_of_the_file_gives_the_batch_where_no_flag_does(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text('{"gradient_accumulation_steps": 3}')
    config = config_of(f"--deepspeed_config {path}")
    schedule = dataclasses.replace(config.schedule, global_batch_size=None)
    config = dataclasses.replace(
        config, schedule=schedule, given=config.given - {"global_batch_size"}
    )
    config, problems = complete(config, 2)
    assert problems == []
    assert config.schedule.global_batch_size == 12


def test_no_key_is_both_known_and_refused():
    assert not (OWN_KEYS | PASSED_KEYS) & (REFUSED_KEYS.keys() - {"scheduler"})


def test_zero_keys_are_those_of_the_installed_deepspeed():
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    fields = DeepSpeedZeroConfig.model_fields
    known = set(fields) | {field.alias for field in fields.values()}
    assert (ZERO_DEFAULTS.keys() | ZERO3_DEFAULTS.keys() | ZERO_PASSED) <= known


if __name__ == "__main__":
    for path in FILES:
        (GOLDEN / path.name).write_text(json.dumps(generated(path), indent=2) + "\n")
