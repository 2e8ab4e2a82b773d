"""nanotron's files, built by the layout that its source states: it writes them on GPUs only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from megatron_ds.config import ModelConfig
from megatron_ds.conversion.registry import open_source
from tests.problems import raises_problem
from tests.unit.conversion.models import random_source
from tests.unit.conversion.test_write_trainers import LLAMA

SETTINGS = {
    "is_llama_config": True,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 60,
    "max_position_embeddings": 32,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_interleaved": False,
    "hidden_act": "silu",
    "rope_scaling": None,
    "tie_word_embeddings": False,
}
LAYER = "model.decoder.{}.pp_block"
MODULES = {
    "attention_norm.weight": ("input_layernorm", None, ()),
    "attention.qkv.weight": ("attn.qkv_proj", 0, (32, 16, 16)),
    "attention.proj.weight": ("attn.o_proj", 1, (32,)),
    "mlp_norm.weight": ("post_attention_layernorm", None, ()),
    "mlp.fc_in.weight": ("mlp.gate_up_proj", 0, (48, 48)),
    "mlp.fc_out.weight": ("mlp.down_proj", 1, (48,)),
}
"""Their module, the dimension that tensor parallelism cuts, and the sizes that it cuts."""
OUTER = {
    "embedding.word.weight": ("model.token_position_embeddings.pp_block.token_embedding", 0, (60,)),
    "final_norm.weight": ("model.final_layer_norm.pp_block", None, ()),
    "head.weight": ("model.lm_head.pp_block", 0, (60,)),
}


def write_tensor(
    folder: Path, module: str, value: Tensor, dim: int | None, chunks: tuple[int, ...], ranks: int
) -> None:
    path = folder / "model" / Path(*module.split("."))
    path.mkdir(parents=True)
    if dim is None:
        save_file({"data": value.contiguous()}, path / "model_weight.safetensors", {})
        return
    for rank in range(ranks):
        parts = []
        pairs = []
        local = 0
        start = 0
        for chunk in chunks:
            size = chunk // ranks
            first = start + rank * size
            parts.append(value.narrow(dim, first, size))
            bounds = [f"{local},{local + size},None", f"{first},{first + size},None"]
            other = "None,None,None"
            texts = [f"{text}|{other}" if dim == 0 else f"{other}|{text}" for text in bounds]
            pairs.append("#".join(texts))
            local += size
            start += chunk
        name = f"model_weight_pp-rank-0-of-1_tp-rank-{rank}-of-{ranks}.safetensors"
        metadata = {
            "version": "1.4",
            "local_global_slices_pairs": ";".join(pairs),
            # As of version 0.4 with numpy 2.
            "unsharded_shape": f"(np.int64({value.shape[0]}), {value.shape[1]})",
        }
        save_file({"data": torch.cat(parts, dim).contiguous()}, path / name, metadata)


def write_nanotron(folder: Path, ranks: int = 1, **settings: Any) -> dict[str, Tensor]:
    """Writes a checkpoint, and returns its tensors by canonical name."""
    source = random_source(ModelConfig(**LLAMA))
    tensors = {name: tensor.read() for name, tensor in source.tensors.items()}
    for name, value in tensors.items():
        prefix, _, inner = name.partition(".")[2].partition(".")
        if name.startswith("layers."):
            module, dim, chunks = MODULES[inner]
            module = f"{LAYER.format(prefix)}.{module}"
        else:
            module, dim, chunks = OUTER[name]
        write_tensor(folder, module, value, dim, chunks, ranks)
    (folder / "checkpoint_metadata.json").write_text(json.dumps({"version": "1.4", "tp": ranks}))
    (folder / "model_config.json").write_text(json.dumps(SETTINGS | settings))
    return tensors


@pytest.mark.parametrize("ranks", [1, 2])
def test_weights_are_put_together_from_their_shards(ranks: int, tmp_path: Path) -> None:
    tensors = write_nanotron(tmp_path / "10", ranks)
    for folder in (tmp_path, tmp_path / "10"):
        source = open_source(folder)
        assert source.format == "nanotron"
        assert source.tensors.keys() == tensors.keys()
        for name, value in tensors.items():
            assert torch.equal(source.tensors[name].read(), value), name
            rows = range(len(value) // 3, len(value) - 1)
            assert torch.equal(source.tensors[name].read(rows), value[rows.start : rows.stop])
    assert not source.settings.model.rotary_interleaved
    write_nanotron(tmp_path / "neighbors", rope_interleaved=True)
    assert open_source(tmp_path / "neighbors").settings.model.rotary_interleaved


def test_a_missing_shard_and_unsupported_settings_are_named(tmp_path: Path) -> None:
    write_nanotron(tmp_path / "a", 2)
    next((tmp_path / "a").rglob("*qkv_proj/*tp-rank-1*")).unlink()
    with raises_problem("foreign-tensors-missing", contains="qkv_proj"):
        open_source(tmp_path / "a")
    write_nanotron(tmp_path / "b", rope_scaling={"factor": 2.0}, moe_config={"num_experts": 4})
    with raises_problem("foreign-parts-lacking", contains="moe_config") as raised:
        open_source(tmp_path / "b")
    assert "rope_scaling" in str(raised.problem)
