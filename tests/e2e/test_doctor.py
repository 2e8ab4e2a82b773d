"""tools/doctor.py --try trains what a script starts at a tiny size, with its features."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_ds.doctor import command as doctor
from tests.e2e.runs import Launcher

SCRIPT = """\
cat <<EOT > ds_config.json
{"train_micro_batch_size_per_gpu": 4, "gradient_clipping": 1.0, "zero_optimization": {"stage": 1}}
EOT
ARGS=(
    --num-layers 24 --hidden-size 1024 --num-attention-heads 16 --num-query-groups 4
    --seq-length 2048 --position-embedding-type rope --swiglu --num-experts 8 --bf16
    --micro-batch-size 4 --global-batch-size 512 --rampup-batch-size 32 32 100_000
    --train-samples 1_000_000 --lr 1e-4 --lr-warmup-samples 10_000 --lr-decay-style cosine
    --checkpoint-activations --data-path nowhere --vocab-file no.json --merge-file no.txt
    --save checkpoints --load checkpoints --deepspeed_config ds_config.json
)
torchrun --nproc_per_node 1 pretrain_gpt.py "${ARGS[@]}"
"""


def test_a_script_trains_at_a_tiny_size(
    launcher: Launcher,
    run_tool: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    script = tmp_path / "train.sh"
    script.write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(doctor.subprocess, "call", launcher.call)
    printed = run_tool(doctor, script, "--try")
    assert "--num-experts 8" in printed.out
    assert "iteration        2/" in printed.err
    assert "successfully saved checkpoint" in printed.err
    assert [each.name for each in tmp_path.iterdir()] == ["train.sh"]
