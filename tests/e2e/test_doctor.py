"""tools/doctor.py --try trains what a script starts at a tiny size, with its features."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.e2e.runs import DEADLINE, REPOSITORY, clean_environment

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


def test_a_script_trains_at_a_tiny_size(tmp_path: Path) -> None:
    script = tmp_path / "train.sh"
    script.write_text(SCRIPT)
    command = [sys.executable, str(REPOSITORY / "tools" / "doctor.py"), str(script), "--try"]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    assert "--num-experts 8" in done.stdout
    assert "iteration        2/" in done.stderr
    assert "successfully saved checkpoint" in done.stderr
    assert [each.name for each in tmp_path.iterdir()] == ["train.sh"]
