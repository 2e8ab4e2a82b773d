"""The generated DeepSpeed JSON: complete, filled in from the file, free of contradictions."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from megatron_ds import schedules
from megatron_ds.cli.arguments import build_config
from megatron_ds.config import Config, flag_of
from megatron_ds.engine.ds_config import (
    LINKS,
    ZERO3_DEFAULTS,
    ZERO12_DEFAULTS,
    ZERO_DEFAULTS,
    build_ds_config,
    merge_file,
    zero_stage,
)
from megatron_ds.engine.ds_config_file import (
    BLOCKS,
    IGNORED_KEYS,
    OLD_PIN_KEY,
    OLD_SWITCHES,
    REFUSED,
    RENAMED,
    TOP_KEYS,
)
from megatron_ds.train_state import TrainState

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
    config, _ = build_config(f"{FLAGS} {line}".split(), world_size=2, warn=lambda _: None)
    assert config is not None
    return config


class Completing:
    """Completes the configuration of flags and a file, on 2 processes, and keeps the warnings."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.warnings: list[str] = []

    def __call__(self, file: object, line: str = "") -> tuple[Config, list[str]]:
        self.warnings = []
        return merge_file(config_of(line, file, self._folder), 2, self.warnings.append)


@pytest.fixture
def completed(tmp_path: Path) -> Completing:
    return Completing(tmp_path)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_shipped_file_gives_its_golden_json(path):
    """python tests/unit/engine/test_ds_config.py rewrites the golden files."""
    assert generated(path) == json.loads((GOLDEN / path.name).read_text())


def generated(path: Path) -> object:
    warnings: list[str] = []
    config, problems = merge_file(config_of(f"--deepspeed_config {path}"), 2, warnings.append)
    assert problems == []
    assert warnings == []
    return build_ds_config(config, dp_size=2)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_what_is_generated_reads_back_to_the_same(path: Path, tmp_path: Path) -> None:
    """A run's ds_config.json can be given to the next run."""
    written = tmp_path / "ds_config.json"
    written.write_text(json.dumps(generated(path)))
    assert generated(written) == generated(path)


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

    config, _ = merge_file(config_of(f"--deepspeed_config {path}"), 1)
    read_back = DeepSpeedConfig(build_ds_config(config, dp_size=1))
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
    assert build_ds_config(config, 2)["zero_optimization"]["stage"] == stage


@pytest.mark.parametrize(
    ("name", "refused"), [("zero2_offload", {0}), ("zero3_offload", {0, 1, 2})]
)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_file_that_offloads_refuses_stages_that_cannot(completed, name, refused, stage):
    _, problems = completed(with_stage(name, stage))
    assert any("offload" in problem for problem in problems) == (stage in refused), problems
    assert bool(problems) == (stage in refused)


def test_without_a_file_the_flags_decide():
    config, problems = merge_file(config_of("--clip-grad 0.5 --bf16 --zero-stage 2"), 2)
    assert problems == []
    result = build_ds_config(config, 2)
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
    size = build_ds_config(config.with_vocab(1000), 2)["zero_optimization"]["reduce_bucket_size"]
    assert 1000 * 64 < size < 1_000_000
    config, _ = completed({"zero_optimization": {"reduce_bucket_size": 5e7}})
    assert (
        build_ds_config(config.with_vocab(1000), 2)["zero_optimization"]["reduce_bucket_size"]
        == 5e7
    )


def test_zero_1_is_the_default():
    assert zero_stage(merge_file(config_of(), 2)[0]) == 1


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
    result = build_ds_config(config, 2)
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
    assert build_ds_config(config, 2)["train_batch_size"] == 16
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
        ({"zero_optimisation": {}}, "no key zero_optimisation; did you mean 'zero_optimization'"),
        ({"zero_optimization": {"stge": 1}}, "zero_optimization.stge; did you mean 'stage'"),
        ({"amp": {"enabled": True}}, "amp is not supported: the installed DeepSpeed no longer has"),
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
        ({"zero_optimization": {"offload_param": "cpu"}}, 'offload_param "cpu": must be an object'),
        (
            {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "nvme"}}},
            "needs an nvme_path",
        ),
        ({"fp16": []}, "fp16 []: must be an object"),
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
    _, problems = merge_file(config_of(line), 2)
    assert any(words in problem for problem in problems), problems


def test_accumulation_of_the_file_gives_the_batch_where_no_flag_does(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text('{"gradient_accumulation_steps": 3}')
    config = config_of(f"--deepspeed_config {path}")
    schedule = dataclasses.replace(config.schedule, global_batch_size=None)
    config = dataclasses.replace(
        config, schedule=schedule, given=config.given - {"global_batch_size"}
    )
    config, problems = merge_file(config, 2)
    assert problems == []
    assert config.schedule.global_batch_size == 12


LEGACY_OFFLOAD = """{
  "fp16": {"enabled": true},
  "zero_optimization": {
    "stage": 3,
    "allgather_partitions": true,
    "allgather_bucket_size": 2e8,
    "overlap_comm": true,
    "reduce_scatter": true,
    "reduce_bucket_size": 2e8,
    "contiguous_gradients": true,
    "cpu_offload": true
  }
}"""
"""A file of 2020, without batch sizes."""


def test_a_legacy_file_is_honoured_with_warnings(completed: Completing) -> None:
    config, problems = completed(LEGACY_OFFLOAD)
    assert problems == []
    assert config.precision.fp16
    assert zero_stage(config) == 3
    assert config.deepspeed.cpu_optimizer
    zero = build_ds_config(config, 2)["zero_optimization"]
    assert zero["offload_optimizer"] == {"device": "cpu"}
    assert zero["reduce_bucket_size"] == 2e8
    assert zero["overlap_comm"] is True
    assert "cpu_offload" not in zero
    first, second = completed.warnings
    assert "ds.json:11: zero_optimization.cpu_offload is an old key: taken as" in first
    assert 'zero_optimization.offload_optimizer {"device": "cpu"}' in first
    assert "ds.json:5: no effect at ZeRO stage 3: allgather_partitions, allgather_bucket" in second


@pytest.mark.parametrize(
    ("file", "warning", "key", "value"),
    [
        ({"bfloat16": {"enabled": True}}, "taken as bf16", "bf16.enabled", True),
        ({"zero_optimization": True}, 'becomes {"stage": 1}', "zero_optimization.stage", 1),
        ({"zero_optimization": False}, 'becomes {"stage": 0}', "zero_optimization.stage", 0),
        (
            {"zero_optimization": {"stage": 3, "cpu_offload_params": True}},
            "taken as zero_optimization.offload_param",
            "zero_optimization.offload_param.device",
            "cpu",
        ),
        (
            {"zero_optimization": {"stage": 3, "cpu_offload_param": True}},
            "taken as zero_optimization.offload_param",
            "zero_optimization.offload_param.device",
            "cpu",
        ),
        (
            {"zero_optimization": {"cpu_offload": True, "cpu_offload_use_pin_memory": False}},
            "cpu_offload_use_pin_memory becomes pin_memory",
            "zero_optimization.offload_optimizer",
            {"device": "cpu", "pin_memory": False},
        ),
        (
            {"zero_optimization": {"stage": 3, "stage3_gather_fp16_weights_on_model_save": True}},
            "taken as zero_optimization.stage3_gather_16bit_weights_on_model_save true",
            "zero_optimization.stage3_gather_16bit_weights_on_model_save",
            True,
        ),
        (
            {"zero_optimization": {"stage": 3, "max_live_parameters": 1e8}},
            "taken as zero_optimization.stage3_max_live_parameters",
            "zero_optimization.stage3_max_live_parameters",
            1e8,
        ),
        (
            {"optimizer": {"params": {"max_grad_norm": 0.3}}},
            "taken as gradient_clipping 0.3",
            "gradient_clipping",
            0.3,
        ),
        ({"fp32_allreduce": True}, "communication_data_type", "communication_data_type", "fp32"),
        ({"amp": {"enabled": False}}, "amp is off: dropped", "bf16.enabled", False),
        ({"curriculum_learning": {"enabled": False, "x": 1}}, "is off", "bf16.enabled", False),
        (
            {"compression_training": {"a": {"shared": {"enabled": False}, "b": {"bits": 8}}}},
            "compression_training is off",
            "bf16.enabled",
            False,
        ),
        ({"sparse_gradients": False}, "is off", "bf16.enabled", False),
        ({"zero_optimization": {"mics_shard_size": 0}}, "is off", "bf16.enabled", False),
        ({"dataloader_drop_last": True}, "has no effect: batches are", "bf16.enabled", False),
        (
            {"optimizer": {"type": "FusedAdam"}},
            "taken as AdamW",
            "optimizer.params.torch_adam",
            False,
        ),
        (
            {"zero_optimization": {"stage": 1, "stage3_max_live_parameters": 5}},
            "no effect at ZeRO stage 1: stage3_max_live_parameters",
            "zero_optimization.stage",
            1,
        ),
    ],
)
def test_old_and_idle_keys_are_converted_with_a_warning(
    completed: Completing, file: object, warning: str, key: str, value: object
) -> None:
    config, problems = completed(file)
    assert problems == []
    assert any(warning in line and "ds.json:1" in line for line in completed.warnings)
    assert at(build_ds_config(config, 2), key) == value


def at(values: Any, dotted: str) -> Any:
    for part in dotted.split("."):
        values = values[part]
    return values


@pytest.mark.parametrize(
    ("file", "words"),
    [
        (
            {"zero_optimization": {"cpu_offload": True, "offload_optimizer": {"device": "nvme"}}},
            "cpu_offload contradicts zero_optimization.offload_optimizer",
        ),
        (
            {"gradient_clipping": 0.5, "optimizer": {"params": {"max_grad_norm": 1.0}}},
            "optimizer.params.max_grad_norm contradicts gradient_clipping 0.5",
        ),
        ({"zero_optimization": {"cpu_offload": "yes"}}, "must be true or false"),
        ({"zero_optimization": {"mics_shard_size": 2}}, "mics_shard_size is not supported"),
        ({"compression_training": {"a": {"shared": {"enabled": True}}}}, "is not supported"),
        ({"elasticity": {"enabled": True}}, "no longer has it; give the batch sizes"),
        ({"data_efficiency": {"enabled": True}}, "random-LTD are not there yet"),
        ({"checkpoint": {"load_universal": True}}, "loaded with --load"),
        ({"optimizer": {"params": {"bias_correction": False}}}, "always corrects"),
        ({"optimizer": {"params": {"adam_w_mode": False}}}, "adam is always AdamW"),
        ({"optimizer": {"type": "CPUAdam"}}, "give offload_optimizer (or --cpu-optimizer)"),
        (
            {"optimizer": {"type": "SGD"}, "zero_allow_untested_optimizer": False},
            "then refuses --optimizer sgd",
        ),
        (
            {"zero_optimization": {"stage": 2}, "prescale_gradients": True},
            "prescale_gradients true: ZeRO stage 2 cannot",
        ),
        ({"flops_profiler": {"enable": True}}, "flops_profiler.enable; did you mean 'enabled'"),
        ({"timers": {"throughput": {"enable": 1}}}, "no key timers.throughput.enable; did you"),
        (
            {"zero_optimization": {"offload_optimizer": {"device": "cpu", "pin_memor": 1}}},
            "no key zero_optimization.offload_optimizer.pin_memor; did you mean 'pin_memory'",
        ),
        ({"steps_per_print": "ten"}, 'steps_per_print "ten": must be a number'),
        ({"zero_optimization": {"overlap_comm": 1}}, "must be true or false"),
        ({"zero_optimization": {"reduce_bucket_size": -1}}, "must not be negative"),
        ({"fp16": {"initial_scale_power": 1e400}}, "must be a number"),
        ({"fp16": {"initial_scale_power": 5000}}, "fp16.initial_scale_power 5000"),
        ({"gradient_accumulation_steps": 0}, "must be positive"),
    ],
)
def test_what_cannot_be_converted_is_refused(
    completed: Completing, file: object, words: str
) -> None:
    _, problems = completed(file)
    assert any(words in problem for problem in problems), problems


OTHERS = {bool: (True, False), int: (3, 4), float: (0.5, 0.25)}
"""Two different values of a kind."""
SAID: dict[str, tuple[Any, Any]] = {
    "zero_optimization.stage": (1, 2),
    "zero_optimization.offload_optimizer.device": (True, "none"),
    "zero_optimization.offload_param.device": ("cpu", "nvme"),
    "fp16.loss_scale": (128.0, 0),
    "fp16.initial_scale_power": (2.0**16, 12),
    "data_types.grad_accum_dtype": (True, "bf16"),
    "optimizer.type": ("adam", "SGD"),
    "gradient_clipping": (0.5, 0.25),
    "fp16.min_loss_scale": (2.0, 1),
}
"""The flag's and the key's value where they are not simply two numbers or two switches."""


@pytest.mark.parametrize("link", LINKS, ids=lambda link: link.key)
def test_every_key_that_contradicts_its_flag_is_named(link: Any, tmp_path: Path) -> None:
    """In one line: the flag and its value, the key and its, the file and the line."""
    kind = BLOCKS.get(link.key.rpartition(".")[0], TOP_KEYS)[link.key.rpartition(".")[2]]
    default = {"as_flag": (True, False), "as_whole": (3, 4)}.get(kind.__name__, (0.5, 0.25))
    flag_value, key_value = SAID.get(link.key, default)
    file: Any = key_value
    for part in reversed(link.key.split(".")):
        file = {part: file}
    config = config_of("", json.dumps(file, indent=1), tmp_path)
    group = next(name for name, values in config.to_dict().items() if link.field in values)
    changed = dataclasses.replace(getattr(config, group), **{link.field: flag_value})
    config = dataclasses.replace(config, **{group: changed}, given=config.given | {link.field})
    _, problems = merge_file(config, 2)
    flag = flag_of(link.field).replace("--no-", "--")
    shown = flag if isinstance(flag_value, bool) else f"{flag} {flag_value}"
    line = 2 + link.key.count(".")
    said = f"{link.key} {json.dumps(key_value)} of {tmp_path / 'ds.json'}:{line}"
    assert any(problem.startswith(f"{shown} contradicts {said}") for problem in problems), problems


def test_a_problem_of_a_filled_value_names_its_key(tmp_path: Path) -> None:
    """What the flags' own checks say of a value that came from the file points to the file."""
    path = tmp_path / "ds.json"
    path.write_text(
        '{\n"gradient_clipping": -1,\n"zero_optimization": {"stage": 0},\n'
        '"bf16": {"enabled": true}}'
    )
    line = f"{FLAGS} --deepspeed_config {path}".split()
    _, problems = build_config(line, world_size=2, warn=lambda _: None, complete=merge_file)
    (clipping,) = [problem for problem in problems if "gradient_clipping" in problem]
    assert clipping.startswith("--clip-grad -1")
    assert clipping.endswith(f"(--clip-grad is gradient_clipping of {path}:2)")
    (stage,) = [problem for problem in problems if "take --zero-stage 1" in problem]
    assert f"--zero-stage is zero_optimization.stage of {path}:3" in stage
    assert f"--bf16 is bf16.enabled of {path}:4" in stage


LINEAR = {
    "enabled": True,
    "curriculum_type": "seqlen",
    "min_difficulty": 8,
    "max_difficulty": 128,
    "schedule_type": "fixed_linear",
    "schedule_config": {"total_curriculum_step": 30, "difficulty_step": 4},
}


@pytest.mark.parametrize(("start", "end", "total", "step"), [(8, 128, 30, 4), (16, 64, 7, 8)])
def test_a_curriculum_becomes_the_same_lengths(
    tmp_path: Path, start: int, end: int, total: int, step: int
) -> None:
    """Against DeepSpeed's own class, step by step."""
    from deepspeed.runtime.data_pipeline.curriculum_scheduler import CurriculumScheduler

    block = {
        **LINEAR,
        "min_difficulty": start,
        "max_difficulty": end,
        "schedule_config": {"total_curriculum_step": total, "difficulty_step": step},
    }
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"curriculum_learning": block}))
    warnings: list[str] = []
    config, _ = build_config(
        f"{FLAGS} --seq-length 128 --deepspeed_config {path}".split(),
        world_size=2,
        warn=warnings.append,
        complete=merge_file,
    )
    assert config is not None
    words = f"is taken as --curriculum-seqlen {start} {end} {total} --curriculum-seqlen-step {step}"
    assert any(words in line for line in warnings), warnings
    theirs = CurriculumScheduler(block)
    for done in range(40):
        # Engines and Megatron-DeepSpeed ask for the step to come, counted from 1.
        assert schedules.seq_length_at(config, done) == theirs.update_difficulty(done + 1), done
    assert "curriculum_learning" not in build_ds_config(config, 2)


def test_a_curriculum_that_is_auto_leaves_it_to_the_flags(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{"curriculum_learning": "auto"}')
    argv = f"{FLAGS} --deepspeed_config {path} --curriculum-seqlen 8 16 3".split()
    config, problems = build_config(argv, world_size=2, warn=lambda _: None, complete=merge_file)
    assert config is not None
    assert config.schedule.curriculum_seqlen == (8, 16, 3)
    assert not any("curriculum_learning" in problem for problem in problems)


@pytest.mark.parametrize(
    ("changes", "line", "words"),
    [
        ({"enabled": None}, "", 'needs "enabled": true'),
        (
            {"curriculum_type": "vocab"},
            "",
            ":1: curriculum_learning.curriculum_type 'vocab' is not",
        ),
        (
            {"schedule_type": "fixed_root"},
            "",
            "'fixed_root' is not supported: 'fixed_linear' alone",
        ),
        ({"schedule_type": None}, "", 'curriculum_learning needs "schedule_type": "fixed_linear"'),
        ({"schedule_config": {"difficulty_step": 8}}, "", "needs curriculum_learning.schedule_con"),
        ({"max_difficulty": 126}, "", "DeepSpeed ends at 124; write that"),
        ({"min_dificulty": 4}, "", "did you mean 'min_difficulty'"),
        ({"min_difficulty": 9}, "", "START 9 is not a multiple"),
        ({"min_difficulty": "a"}, "", "curriculum_learning.min_difficulty"),
        ({"max_difficulty": 256}, "", "END 256 exceeds --seq-length 128"),
        ({}, "--curriculum-seqlen 8 64 30", "contradicts curriculum_learning [8, 128, 30] of"),
        ({}, "--curriculum-seqlen-step 8", "--curriculum-seqlen-step 8 contradicts"),
    ],
)
def test_a_curriculum_that_is_not_ours_is_refused_in_words(
    tmp_path: Path, changes: dict[str, Any], line: str, words: str
) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"curriculum_learning": {**LINEAR, **changes}}))
    argv = f"{FLAGS} --seq-length 128 --deepspeed_config {path} {line}".split()
    _, problems = build_config(argv, world_size=2, warn=lambda _: None, complete=merge_file)
    assert any(words in problem for problem in problems), problems


DECAY = {
    "type": "WarmupDecayLR",
    "params": {
        "warmup_min_lr": 1e-5,
        "warmup_max_lr": 1e-4,
        "warmup_num_steps": 3,
        "total_num_steps": 10,
        "warmup_type": "linear",
    },
}


@pytest.mark.parametrize("length", ["--train-iters 12", "--train-samples 192"])
@pytest.mark.parametrize("kind", ["WarmupLR", "WarmupDecayLR"])
def test_a_scheduler_becomes_the_same_rates(tmp_path: Path, kind: str, length: str) -> None:
    """Against DeepSpeed's own class, step by step."""
    import torch
    from deepspeed.runtime import lr_schedules

    block = {"type": kind, "params": dict(DECAY["params"])}
    if kind == "WarmupLR":
        del block["params"]["total_num_steps"]
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"scheduler": block}))
    flags = FLAGS.replace("--train-iters 10", length)
    warnings: list[str] = []
    config, _ = build_config(
        f"{flags} --deepspeed_config {path}".split(),
        world_size=2,
        warn=warnings.append,
        complete=merge_file,
    )
    assert config is not None
    assert any("scheduler is taken as --lr-decay-style" in line for line in warnings)
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1e-4)
    theirs = getattr(lr_schedules, kind)(optimizer, **block["params"])
    for step in range(12):
        theirs.step(step)
        ours = schedules.learning_rate(config, TrainState(applied_samples=16 * step), 2)
        assert ours == pytest.approx(theirs.get_last_lr()[0], rel=1e-12), step


@pytest.mark.parametrize(
    ("params", "kind", "line", "words"),
    [
        ({"warmup_type": "log"}, "WarmupLR", "", 'is "log": the warm-up is linear here'),
        ({}, "WarmupLR", "", 'is absent, which DeepSpeed takes for "log"'),
        ({"warmup_num_steps": 9}, "WarmupDecayLR", "--lr-warmup-iters 5", "5 contradicts sched"),
        ({"warmup_max_lr": 1.0}, "WarmupLR", "", "--lr 0.0001 contradicts scheduler.params"),
        ({}, "WarmupDecayLR", "", "needs scheduler.params.total_num_steps"),
        ({"warmup_num_steps": 0}, "WarmupLR", "", "must be positive"),
        ({"warmup_nu_steps": 0}, "WarmupLR", "", "did you mean 'warmup_num_steps'"),
        (
            {"warmup_num_steps": 4, "total_num_steps": 9, "cos_min_ratio": 0.1},
            "WarmupCosineLR",
            "",
            "--lr-decay-style cosine --lr-warmup-iters 4 --lr-decay-iters 9 --lr-warmup-init 0 "
            "--min-lr 1e-05",
        ),
        ({"cycle_min_lr": 1}, "OneCycle", "", "'OneCycle' is not supported: leave the block out"),
        (
            {"warmup_type": "linear", "warmup_num_steps": 4},
            "WarmupLR",
            "--rampup-batch-size 4 4 100",
            "whose size --rampup-batch-size changes",
        ),
    ],
)
def test_a_scheduler_that_is_not_ours_is_refused_with_the_flags_to_give(
    completed: Completing, params: Any, kind: str, line: str, words: str
) -> None:
    _, problems = completed({"scheduler": {"type": kind, "params": params}}, line)
    assert any(words in problem for problem in problems), problems


def test_the_line_of_a_key_is_its_own(completed: Completing) -> None:
    """Blocks share the names of their keys, and texts may look like keys."""
    _, problems = completed(
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
    )
    assert [problem.split("ds.json:")[1].split(":")[0] for problem in problems] == ["9", "6"]


def test_no_key_is_both_known_and_otherwise_treated() -> None:
    known = set(TOP_KEYS) | {f"{block}.{key}" for block, keys in BLOCKS.items() for key in keys}
    assert not known & {*REFUSED, *RENAMED, *OLD_SWITCHES, *IGNORED_KEYS}
    assert set(RENAMED.values()) <= known
    assert {new for new, _ in OLD_SWITCHES.values()} <= known


def test_the_keys_of_each_block_are_those_of_the_installed_deepspeed() -> None:
    """Every field that DeepSpeed's models have is known, refused, or an old spelling."""
    from deepspeed.comm.config import CommsLoggerConfig
    from deepspeed.monitor import config as monitor
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.zero import offload_config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    models: dict[str, Any] = {
        "zero_optimization": DeepSpeedZeroConfig,
        "zero_optimization.offload_optimizer": offload_config.DeepSpeedZeroOffloadOptimizerConfig,
        "zero_optimization.offload_param": offload_config.DeepSpeedZeroOffloadParamConfig,
        "fp16": DeepSpeedFP16Config,
        "bf16": DeepSpeedBF16Config,
        "comms_logger": CommsLoggerConfig,
        "tensorboard": monitor.TensorBoardConfig,
        "csv_monitor": monitor.CSVConfig,
        "wandb": monitor.WandbConfig,
        "comet": monitor.CometConfig,
    }
    for block, model in models.items():
        theirs = {item.alias or name for name, item in model.model_fields.items()}
        spelled = theirs | set(model.model_fields)
        ours = set(BLOCKS[block])
        assert ours <= spelled, block
        treated = {*REFUSED, *RENAMED, *OLD_SWITCHES, *IGNORED_KEYS, OLD_PIN_KEY}
        assert {f"{block}.{key}" for key in theirs - ours} <= treated, block
    defaults = ZERO_DEFAULTS | ZERO12_DEFAULTS | ZERO3_DEFAULTS
    assert defaults.keys() <= BLOCKS["zero_optimization"].keys()


def test_what_deepspeed_has_removed_is_refused() -> None:
    from deepspeed.runtime import config as theirs

    removed = set(theirs._REMOVED_TOP_LEVEL_CONFIG_KEYS)
    removed |= {f"zero_optimization.{key}" for key in theirs._REMOVED_ZERO_CONFIG_KEYS}
    assert removed <= REFUSED.keys() | {"curriculum_learning"}  # which is translated


if __name__ == "__main__":
    for path in FILES:
        (GOLDEN / path.name).write_text(json.dumps(generated(path), indent=2) + "\n")
