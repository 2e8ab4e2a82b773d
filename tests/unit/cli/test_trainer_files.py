"""Configuration files of other trainers are translated, and none of their keys is lost."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_ds import schedules
from megatron_ds.cli.doctor.commands import read_source
from megatron_ds.cli.doctor.diagnosis import Diagnosis, diagnose
from megatron_ds.cli.doctor.trainers import huggingface
from megatron_ds.cli.doctor.trainers.neox import feed_forward_size
from megatron_ds.cli.doctor.trainers.settings import Settings
from megatron_ds.config import GROUP_OF_FIELD
from megatron_ds.doctor import command as doctor
from megatron_ds.train_state import TrainState
from tests.problems import raises_problem
from tests.tables import tables

TABLES = tables(__file__)
FILES: dict[str, dict[str, Any]] = TABLES["files"]
REQUIRED = (
    "training-data-required",
    "run-length-required",
    "required",
    "tokenizer-option-required",
    "data-paths-incomplete",
)
"""Problems of a tiny file that leaves keys out."""
LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "rms_norm_eps": 1e-05,
    "max_position_embeddings": 128,
    "rope_theta": 10000.0,
}
MIXTRAL = {
    **LLAMA,
    "model_type": "mixtral",
    "num_hidden_layers": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "router_aux_loss_coef": 0.02,
}
MODELS = {
    "FOLDER": LLAMA,
    "MIXTRAL": MIXTRAL,
    "ROUTER": {**MIXTRAL, "output_router_logits": True},
}


def read(name: str, text: str, folder: Path) -> Diagnosis:
    """What a file means here, on eight processes."""
    for model, values in MODELS.items():
        (folder / model).mkdir()
        (folder / model / "config.json").write_text(json.dumps(values))
        text = text.replace(model, str(folder / model))
    (folder / "llama.yaml").write_text("num_layers: 2\nmodel_type: gpt\n")
    (folder / "mamba.yaml").write_text("num_layers: 2\nmodel_type: mamba\nmamba_state_dim: 16\n")
    (folder / name).write_text(text)
    (command,) = read_source([str(folder / name)], {}, 8)
    doctor._add_model(command)
    return diagnose(command, doctor._complete, folder)


@pytest.mark.parametrize("title", FILES)
def test_a_file_has_its_values_differences_and_what_is_lacking(title: str, tmp_path: Path) -> None:
    case = FILES[title]
    result = read(case["name"], case["text"], tmp_path)
    config = result.config
    values = case.get("values", {})
    actual = {name: getattr(getattr(config, GROUP_OF_FIELD[name]), name) for name in values}
    expected = {name: tuple(v) if isinstance(v, list) else v for name, v in values.items()}
    assert {k: tuple(v) if isinstance(v, list) else v for k, v in actual.items()} == expected
    assert not config.given & set(case.get("absent", ()))
    for part in case.get("differences", ()):
        assert any(part in entry for entry in result.differences), result.differences
    lacking = result.command.lacking
    assert len(lacking) == len(case.get("lacking", ())), lacking
    for start in case.get("lacking", ()):
        assert any(entry.startswith(start) for entry in lacking), (start, lacking)
    for key in case.get("unread", ()):
        assert key in result.command.unread
    others = [entry for entry in result.lacking if entry not in lacking]
    assert [entry for entry in others if entry.rpartition("[")[2].rstrip("]") not in REQUIRED] == []


@pytest.mark.parametrize(
    ("width", "multiple", "gated"),
    [(32768, 256, True), (4096, 256, True), (4096, 1, True), (14336, 1, True), (2000, 256, False)],
)
def test_the_sizes_of_gpt_neox_are_those_of_its_formula(
    width: int, multiple: int, gated: bool
) -> None:
    """With the floats and the roundings of gpt-neox, in its order."""
    first = int(width * 2 / 3) if gated else width
    second = first // 2 if gated else first
    first = int((2 * multiple) * ((first + 2 * multiple - 1) // (2 * multiple)))
    second = int(multiple * ((second + multiple - 1) // multiple))
    expected = (first // 2 if gated else first, second)
    assert feed_forward_size(width, multiple, gated=gated) == expected


@pytest.mark.parametrize(("name", "text", "hint"), TABLES["others"])
def test_files_of_programs_that_train_otherwise_are_named(
    name: str, text: str, hint: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(text.replace("\\n", "\n"))
    with raises_problem("doctor-other-file") as raised:
        read_source([str(tmp_path / name)], {}, None)
    assert hint in str(raised.problem)


@pytest.mark.parametrize(("name", "text"), TABLES["unknown"])
def test_a_file_without_the_keys_of_any_trainer_is_unknown(
    name: str, text: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(text)
    with raises_problem("doctor-unknown-file"):
        read_source([str(tmp_path / name)], {}, None)


def test_the_files_of_one_run_of_gpt_neox_are_read_together(tmp_path: Path) -> None:
    (tmp_path / "model.yml").write_text('{"num_layers": 2, "hidden_size": 64}')
    (tmp_path / "setup.yml").write_text('{"data_path": "d", "save": "s"}')
    words = [str(tmp_path / name) for name in ("model.yml", "setup.yml")]
    (command,) = read_source(words, {}, 1)
    assert command.flags[command.flags.index("--data-path") + 1] == "d"
    assert command.flags[command.flags.index("--num-layers") + 1] == "2"


def test_flags_of_the_trainer_in_a_script_are_read_as_its_settings(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(
        "torchrun --nproc_per_node 4 run_clm.py --per_device_train_batch_size 2 --do_train \\\n"
        "  --gradient-accumulation-steps=3 --learning_rate 3e-4 --bf16 --max_steps 100 \\\n"
        "  --num_train_epochs $EPOCHS --gradient_checkpointing False \\\n"
        "  --report_to wandb tensorboard \\\n"
        "  --output_dir $SCRATCH/out --neftune_noise_alpha $NOISE\n"
    )
    (command,) = read_source([str(script)], {}, None)
    result = diagnose(command, doctor._complete, tmp_path)
    schedule = result.config.schedule
    config = result.config
    assert (schedule.micro_batch_size, schedule.global_batch_size) == (2, 24)
    assert (config.optimizer.lr, config.precision.bf16, schedule.train_iters) == (3e-4, True, 100)
    assert result.command.unread == ["do_train", "report_to"]
    assert result.lacking[0].startswith("neftune_noise_alpha $NOISE: ")
    assert '--save "$SCRATCH/out"' in result.command_text()
    assert result.command_text().startswith("torchrun --nproc_per_node 4 pretrain_gpt.py")


def test_a_file_with_all_arguments_replaces_those_of_the_command(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(
        "cat > gpt.yaml <<EOF\nlanguage_model: {num_layers: 4, hidden_size: 64}\n"
        "model_parallel: {bf16: True}\nmicro_batch_size: 2\nEOF\n"
        "torchrun --nproc_per_node 4 pretrain_gpt.py --yaml-cfg gpt.yaml --num-layers 8\n"
        "torchrun --nproc_per_node 4 pretrain_gpt.py --yaml_cfg missing.yaml --num-layers 8\n"
    )
    command, missing = read_source([str(script)], {}, None)
    result = diagnose(command, doctor._complete, tmp_path)
    assert (result.config.model.num_layers, result.config.precision.bf16) == (4, True)
    assert (result.config.schedule.global_batch_size, result.world_size) == (8, 4)
    assert any(entry.endswith("--num-layers 8") for entry in result.differences)
    assert result.command_text().startswith("torchrun --nproc_per_node 4 pretrain_gpt.py")
    assert [entry.split(":")[0] for entry in missing.lacking] == ["--yaml-cfg missing.yaml"]


@pytest.mark.parametrize(
    "text", ["", "CONFIG=a\ntorchrun -m torchtitan.train --module llama3 --config $CONFIG\n"]
)
def test_settings_in_python_are_refused_and_not_executed(text: str, tmp_path: Path) -> None:
    path = tmp_path / ("run_train.sh" if text else "config_registry.py")
    path.write_text(text or f"open({str(tmp_path / 'marker')!r}, 'w')\n")
    with raises_problem("doctor-python-settings"):
        read_source([str(path)], {}, None, executes=not text)
    assert not (tmp_path / "marker").exists()


@pytest.mark.parametrize(
    ("changes", "coefficient"),
    [
        ({"output_router_logits": True}, "0.01"),
        ({"output_router_logits": True, "decoder_sparse_step": 2, "mlp_only_layers": [1]}, "0.04"),
        ({"output_router_logits": True, "router_aux_loss_coef": 0.0}, "0"),
        ({}, "0"),
        ({"output_router_logits": True, "model_type": "deepseek_v3"}, "0"),
    ],
)
def test_the_loss_of_the_router_weighs_as_much_as_in_transformers(
    changes: dict[str, Any], coefficient: str, tmp_path: Path
) -> None:
    """0.02 x 2 experts of a token / layers with experts."""
    (tmp_path / "config.json").write_text(json.dumps(MIXTRAL | changes))
    settings = Settings({"config_name": str(tmp_path), "max_steps": 1})
    huggingface.prepare(settings)
    flags = settings.flags
    assert flags[flags.index("--moe-aux-loss-coeff") + 1] == coefficient


def neox_rate(done: int, style: str, warmup: float, end: int) -> float:
    """megatron/learning_rates.py of gpt-neox, for a peak of 1 and a least rate of 0.1."""
    if done <= warmup:
        return done / warmup
    part = (done - warmup) / (end - warmup)
    if style == "linear":
        return max(1 - part, 0.1)
    return max(0.1 + 0.9 / 2 * (math.cos(math.pi * part) + 1), 0.1)


def titan_rate(done: int, style: str, warmup: int, decay: int, total: int) -> float:
    """components/lr_scheduler.py of torchtitan, for a peak of 1 and a least rate of 0.1."""
    if done < warmup:
        return (done + 1) / warmup
    if done < total + 1 - decay:
        return 1.0
    part = (done + decay - total) / decay
    factors = {"linear": 1 - part, "sqrt": 1 - math.sqrt(part), "cosine": _half_cosine(part)}
    return 0.1 + 0.9 * factors[style]


def nanotron_rate(done: int, style: str, warmup: int, start: int, length: int) -> float:
    """helpers.py of nanotron, for a peak of 1 and a least rate of 0.1."""
    if done <= warmup:
        return done / max(warmup, 1)
    if done < start:
        return 1.0
    if done >= start + length:
        return 0.1
    part = (done - start) / length
    factors = {"linear": 1 - part, "1-sqrt": 1 - math.sqrt(part), "cosine": _half_cosine(part)}
    return 0.1 + 0.9 * factors[style]


def _half_cosine(part: float) -> float:
    return 0.5 * (1 + math.cos(math.pi * part))


NEOX = """\
num_layers: 2
hidden_size: 64
train_micro_batch_size_per_gpu: 1
optimizer: {{params: {{lr: 1.0}}}}
min_lr: 0.1
train_iters: 100
lr_decay_style: {}
warmup: {}
{}
"""
TITAN = """\
[model]
name = "llama3"
[optimizer]
lr = 1.0
[training]
steps = 100
[lr_scheduler]
min_lr_factor = 0.1
decay_type = "{}"
warmup_steps = {}
{}
"""
NANOTRON = """\
model: {{model_config: {{is_llama_config: true, num_hidden_layers: 2}}}}
optimizer: {{learning_rate_scheduler: {{learning_rate: 1.0, min_decay_lr: 0.1,
  lr_warmup_style: linear, lr_decay_style: {}, lr_warmup_steps: {}, {}}}}}
tokens: {{micro_batch_size: 1, batch_accumulation_per_replica: 1, train_steps: 100}}
"""
RATES: dict[str, tuple[str, Callable[[int], float]]] = {
    "neox linear": ("a.yml", lambda done: neox_rate(done, "linear", 7.5, 100)),
    "neox linear to a fraction": ("a.yml", lambda done: neox_rate(done, "linear", 5, 50)),
    "neox cosine": ("a.yml", lambda done: neox_rate(done, "cosine", 10, 100)),
    "titan linear": ("a.toml", lambda done: titan_rate(done, "linear", 10, 90, 100)),
    "titan sqrt": ("a.toml", lambda done: titan_rate(done, "sqrt", 10, 20, 100)),
    "titan cosine without warmup": ("a.toml", lambda done: titan_rate(done, "cosine", 0, 100, 100)),
    "nanotron cosine": ("a.yaml", lambda done: nanotron_rate(done, "cosine", 10, 10, 60)),
    "nanotron 1-sqrt": ("a.yaml", lambda done: nanotron_rate(done, "1-sqrt", 5, 50, 30)),
}
TEXTS = {
    "neox linear": NEOX.format("linear", 0.075, ""),
    "neox linear to a fraction": NEOX.format("linear", 0.1, "lr_decay_fraction: 0.5"),
    "neox cosine": NEOX.format("cosine", 0.1, "lr_decay_iters: 100"),
    "titan linear": TITAN.format("linear", 10, ""),
    "titan sqrt": TITAN.format("sqrt", 10, "decay_ratio = 0.2"),
    "titan cosine without warmup": TITAN.format("cosine", 0, ""),
    "nanotron cosine": NANOTRON.format("cosine", 10, "lr_decay_steps: 60"),
    "nanotron 1-sqrt": NANOTRON.format(
        "1-sqrt", 5, "lr_decay_starting_step: 50, lr_decay_steps: 30"
    ),
}


@pytest.mark.parametrize("name", RATES)
def test_the_learning_rates_are_those_of_the_trainer(name: str, tmp_path: Path) -> None:
    file, formula = RATES[name]
    config = read(file, TEXTS[name], tmp_path).config
    batch = config.schedule.global_batch_size or 0
    for done in range(100):
        state = TrainState(applied_samples=done * batch)
        rate = schedules.learning_rate(config, state, 8)
        assert rate == pytest.approx(formula(done), abs=1e-7), done
