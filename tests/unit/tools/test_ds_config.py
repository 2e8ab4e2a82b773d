"""tools/ds_config.py prints the configuration of a run and the origin of its values."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_ds.cli.arguments import build_config
from megatron_ds.engine.ds_config.generate import build_ds_config
from megatron_ds.engine.ds_config.merge import merge_file
from tools import ds_config

FLAGS = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 2 "
    "--lr 1e-4 --train-iters 10 --tokenizer-type NullTokenizer --vocab-size 90 "
    "--data-path nowhere --adam-beta1 0.8 --adam-beta2 0.95"
)


@pytest.fixture
def line(tmp_path: Path) -> list[str]:
    path = tmp_path / "ds.json"
    path.write_text(
        '{\n"gradient_clipping": 0.5,\n"zero_optimization": {\n"stage": 3,\n"cpu_offload": true,\n'
        '"sub_group_size": 5\n},\n"steps_per_print": "auto",\n'
        '"scheduler": {"type": "WarmupLR", "params": {"warmup_type": "linear"}}\n}'
    )
    return [*FLAGS.split(), "--deepspeed_config", str(path)]


def test_printed_json_equals_the_configuration_of_a_run(
    line: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ds_config.main(["--world-size", "4", *line])
    printed = json.loads(capsys.readouterr().out)
    config, _ = build_config(line, world_size=4, warn=lambda _: None, complete=merge_file)
    assert printed == build_ds_config(config.with_vocab(91), 4)
    assert printed["train_batch_size"] == 8

    again = tmp_path / "again.json"
    again.write_text(json.dumps(printed))
    flags = [*line[:-1], str(again), "--lr-decay-style", "constant"]
    ds_config.main(["--world-size", "4", *flags])
    assert json.loads(capsys.readouterr().out) == printed


def test_origin_of_each_value_is_printed(
    line: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    ds_config.main(line)
    printed = capsys.readouterr().err
    rows = dict(text.split("  ", 1) for text in printed.splitlines() if not text.startswith("WARN"))
    rows = {key: source.strip().replace(line[-1], "ds.json") for key, source in rows.items()}
    assert rows == {
        "gradient_clipping": "gradient_clipping of ds.json:2",
        "optimizer.params.betas": "--adam-beta1 0.8, --adam-beta2 0.95",
        "optimizer.params.lr": "--lr 0.0001",
        "train_micro_batch_size_per_gpu": "--micro-batch-size 2",
        "zero_optimization.offload_optimizer.device": (
            "zero_optimization.offload_optimizer.device of ds.json:5"
        ),
        "zero_optimization.stage": "zero_optimization.stage of ds.json:4",
        "zero_optimization.sub_group_size": "zero_optimization.sub_group_size of ds.json:6",
    }
    assert "[ds-old-key]" in printed
    assert "[ds-scheduler-translated]" in printed


def test_all_contradictions_are_reported(
    line: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_info:
        ds_config.main([*line, "--zero-stage", "1", "--clip-grad", "2"])
    assert exit_info.value.code == 2
    assert capsys.readouterr().err.count("[ds-key-contradicts-flag]") == 2
