"""The verification of a conversion by logits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_ds.conversion.convert import COMPARED_TOKENS, prompt_length, verify
from megatron_ds.conversion.huggingface.read_write import open_hf, write_hf
from megatron_ds.conversion.weights_locations import HF_CONFIG
from tests.problems import raises_problem
from tests.unit.conversion.hf_models import random_model

FAR = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}


@pytest.mark.parametrize(
    ("name", "changes", "damage", "length"),
    [
        # A window of more tokens than a short prompt has, in other layers.
        (
            "gemma3",
            {"sliding_window": 40, "max_position_embeddings": 512},
            {"layer_types": ["full_attention"] * 6},
            40 + COMPARED_TOKENS,
        ),
        ("mistral-window", {"sliding_window": 60}, {"sliding_window": None}, 64),
        # Scaled positions of another length before, which differ far from the start.
        (
            "qwen2",
            {"max_position_embeddings": 1024, "rope_parameters": {**FAR, "rope_theta": 500.0}},
            {"original_max_position_embeddings": 1024},
            512,
        ),
        ("llama", {}, {"rms_norm_eps": 0.5}, COMPARED_TOKENS),
    ],
)
def test_a_verification_reaches_windows_and_scaled_positions(
    tmp_path: Path, name: str, changes: dict[str, Any], damage: dict[str, Any], length: int
) -> None:
    random_model(name, **changes).save_pretrained(tmp_path / "theirs")
    source = open_hf(tmp_path / "theirs")
    assert prompt_length(source.settings.model) == length
    write_hf(source, tmp_path / "written")
    assert verify(source, tmp_path / "written", "hf") < 1e-5
    config = json.loads((tmp_path / "written" / HF_CONFIG).read_text())
    (tmp_path / "written" / HF_CONFIG).write_text(json.dumps(config | damage))
    native = open_hf(tmp_path / "theirs")
    with raises_problem("conversion-differs"):
        verify(native, tmp_path / "written", "hf")
