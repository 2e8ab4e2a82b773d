"""DeepSpeed files of users: legacy ones written for tests, and examples of other projects.

The latter are read if a copy is next to the repository. Has no tests.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
FOLDER = REPOSITORY.parent / "shared" / "data" / "peer_ds_configs"

OWN: dict[str, tuple[Any, str]] = {
    "offload-of-2020": (
        json.loads((REPOSITORY / "examples" / "deepspeed_config.json").read_text()),
        "--micro-batch-size 2 --global-batch-size 4",
    ),
    "everything-old": (
        {
            "train_batch_size": 4,
            "gradient_accumulation_steps": 2,
            "bfloat16": {"enabled": True},
            "zero_optimization": True,
            "fp32_allreduce": True,
            "sparse_gradients": False,
            "dataloader_drop_last": True,
            "amp": {"enabled": False, "opt_level": "O1"},
            "optimizer": {
                "type": "Adam",
                "params": {"lr": 1.5e-4, "max_grad_norm": 0.5, "betas": [0.9, 0.95]},
            },
            "scheduler": {
                "type": "WarmupLR",
                "params": {"warmup_num_steps": 4, "warmup_type": "linear"},
            },
        },
        "--micro-batch-size 2",
    ),
    "all-auto": (
        {
            "train_batch_size": "auto",
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": "auto",
            "gradient_clipping": "auto",
            "bf16": {"enabled": "auto"},
            "fp16": {"enabled": "auto", "loss_scale": 0, "initial_scale_power": 16},
            "optimizer": {
                "type": "AdamW",
                "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
            },
            "zero_optimization": {
                "stage": 3,
                "overlap_comm": True,
                "contiguous_gradients": True,
                "sub_group_size": 1e9,
                "reduce_bucket_size": "auto",
                "stage3_prefetch_bucket_size": "auto",
                "stage3_param_persistence_threshold": "auto",
                "stage3_gather_16bit_weights_on_model_save": True,
            },
        },
        "--bf16 --micro-batch-size 2 --global-batch-size 4",
    ),
}
"""Name -> file and further flags."""

FILES = [path.stem for path in sorted(FOLDER.glob("*.json"))]

PLACEHOLDERS = {
    "CONFIG_BATCH_SIZE": "4",
    "GBSIZE": "4",
    "CONFIG_MBSIZE": "2",
    "MBSIZE": "2",
    "LOG_INTERVAL": "10",
    "ZERO_STAGE": "1",
    "PRESCALE_GRAD": "true",
    "CONFIG_FP16_ENABLED": "false",
    "CONFIG_BF16_ENABLED": "true",
    "CONFIG_CL_ENABLED": "false",
    "CL_ENABLED": "true",
    "LTD_ENABLED": "true",
}
"""Placeholders of the templates; all others are numbers."""


def fill_placeholders(text: str) -> str:
    """A template with its placeholders outside of quotes replaced."""
    pattern = re.compile(r'"[^"]*"|\b[A-Z][A-Za-z0-9]*(?:_[A-Za-z0-9]+)+\b|\bM?G?BSIZE\b')

    def value(match: re.Match[str]) -> str:
        word = match.group()
        return word if word.startswith('"') else PLACEHOLDERS.get(word, "8")

    return pattern.sub(value, text)
