"""Exported checkpoints are loaded by megatron-core's own models and optimizer, on the CPU."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ds.config import ModelConfig
from megatron_ds.conversion.megatron.names import canonical_name
from megatron_ds.conversion.megatron.open import open_megatron
from megatron_ds.conversion.megatron.optimizer import MOMENTS
from megatron_ds.conversion.megatron.write_common import grouped, padded
from megatron_ds.conversion.megatron.write_torch_dist import write_torch_dist
from megatron_ds.conversion.source import WriteOptions
from megatron_ds.engine.states.state_reader import MASTER, VOCABULARY_TABLES, TensorReaders
from tests.interop.core_parts import PARTS, TOKENS, state_of, write
from tests.interop.core_parts import ROWS as ROWS_OF_PARTS
from tests.interop.on_cpu import OnCpu, patch_devices
from tests.unit.conversion.models import (
    OTHER_LLAMA,
    logits,
    model,
    model_of,
    random_source,
    random_training,
)

pytestmark = [pytest.mark.interop, pytest.mark.filterwarnings("ignore")]

ROWS = 128
"""Of the vocabulary with padding."""
MODELS: dict[str, dict[str, Any]] = {
    "gpt": {},
    "llama": {
        "activation": "swiglu",
        "ffn_hidden_size": 24,
        "num_query_groups": 2,
        "add_bias_linear": False,
        "normalization": "RMSNorm",
        "position_embedding_type": "rope",
        "untie_embeddings_and_output_weights": True,
        "kv_channels": 6,
        "rotary_base": 5000.0,
    },
    "grouped, with biases": {"num_query_groups": 2, "gelu_approximation": "none"},
    "limited gate, normalized queries": {
        "activation": "quick-geglu",
        "ffn_hidden_size": 24,
        "num_query_groups": 2,
        "add_bias_linear": False,
        "normalization": "RMSNorm",
        "position_embedding_type": "rope",
        "untie_embeddings_and_output_weights": True,
        "kv_channels": 6,
        "rotary_base": 5000.0,
        "activation_func_clamp_value": 0.5,
        "glu_linear_offset": 1.0,
        "qk_l2_norm": True,
    },
}


@pytest.fixture(scope="module")
def core() -> Iterator[SimpleNamespace]:
    """Their modules, in a group of one process; what asks for a device gets the CPU."""
    patch = pytest.MonkeyPatch()
    patch_devices(patch)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    from megatron.core import dist_checkpointing, optimizer, parallel_state, transformer
    from megatron.core.dist_checkpointing.validation import StrictHandling
    from megatron.core.models.gpt import GPTModel, gpt_layer_specs

    parallel_state.initialize_model_parallel()
    yield SimpleNamespace(
        checkpointing=dist_checkpointing,
        strict=StrictHandling.RAISE_ALL,
        config=transformer.TransformerConfig,
        model=GPTModel,
        spec=gpt_layer_specs.get_gpt_layer_local_spec,
        optimizer=optimizer,
    )
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    patch.undo()


def their_model(core: SimpleNamespace, ours: ModelConfig, dtype: torch.dtype) -> Any:
    from megatron.core.activations import quick_gelu

    silu = torch.nn.functional.silu
    gelu = torch.nn.functional.gelu
    activations = {"swiglu": silu, "quick-geglu": quick_gelu, "gelu": gelu}
    config = core.config(
        num_layers=ours.num_layers, hidden_size=ours.hidden_size,
        num_attention_heads=ours.num_attention_heads, num_query_groups=ours.kv_heads,
        kv_channels=ours.head_dim, ffn_hidden_size=ours.mlp_hidden_size,
        gated_linear_unit=ours.is_gated, activation_func=activations[ours.activation],
        activation_func_clamp_value=ours.activation_func_clamp_value,
        glu_linear_offset=ours.glu_linear_offset, qk_l2_norm=ours.qk_l2_norm,
        bias_activation_fusion=not ours.is_gated and ours.gelu_kind == "tanh",
        add_bias_linear=ours.add_bias_linear, normalization=ours.normalization,
        layernorm_epsilon=ours.norm_epsilon, hidden_dropout=0.0, attention_dropout=0.0,
        rotary_interleaved=ours.rotary_interleaved, no_rope_freq=int(ours.no_rope_freq) or None,
        use_cpu_initialization=True, params_dtype=dtype, bf16=dtype == torch.bfloat16,
    )  # fmt: skip
    found = core.model(
        config, core.spec(normalization=ours.normalization, qk_l2_norm=ours.qk_l2_norm),
        vocab_size=ROWS,
        max_sequence_length=ours.seq_length,
        share_embeddings_and_output_weights=not ours.untie_embeddings_and_output_weights,
        position_embedding_type=ours.position_embedding_type, rotary_base=int(ours.rotary_base),
        rope_scaling=ours.use_rope_scaling, rope_scaling_factor=ours.rope_scaling_factor,
    )  # fmt: skip
    return found.to(dtype).eval()


@pytest.mark.parametrize("changes", MODELS.values(), ids=MODELS)
def test_their_model_loads_an_export_and_has_our_logits(
    core: SimpleNamespace, changes: dict[str, Any], tmp_path: Path
) -> None:
    """With every entry asked for and found, and none left over.

    Claim (checkpoints): models of `megatron-core` load it and compute our logits, and its
    optimizers load the states (`make test-interop`)
    """
    config = model(**changes)
    source = random_source(config)
    write_torch_dist(source, tmp_path / "out")
    theirs = their_model(core, config, torch.float32)
    folder = str(tmp_path / "out" / "release")

    loaded = core.checkpointing.load(
        {"model": theirs.sharded_state_dict()}, folder, strict=core.strict
    )
    theirs.load_state_dict(loaded["model"], strict=True)

    length = config.seq_length
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, config.vocab_size, (2, length), generator=generator)
    positions = torch.arange(length).expand(2, -1)
    mask = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
    with torch.no_grad():  # in fp64: rounding to fp32 alone makes 1.2e-5 on some processors
        found = theirs.double()(tokens, positions, mask)
        expected = model_of(source).double()(tokens)
    size = config.vocab_size
    torch.testing.assert_close(
        found[..., :size].double(), expected[..., :size].double(), atol=5e-6, rtol=0
    )


def their_optimizer(core: SimpleNamespace, theirs: Any, dtype: torch.dtype) -> Any:
    """Adam around a model, with their two parameter groups."""
    options = core.optimizer.OptimizerConfig(
        optimizer="adam", lr=0.1, weight_decay=0.1, bf16=dtype == torch.bfloat16,
        params_dtype=dtype, use_distributed_optimizer=False,
    )  # fmt: skip
    groups = [
        {
            "params": [each for each in theirs.parameters() if (each.dim() > 1) == (wd_mult > 0)],
            "wd_mult": wd_mult, "lr_mult": 1.0, "is_expert_parallel": False,
            "is_decoupled_lr": False,
        }
        for wd_mult in (1.0, 0.0)
    ]  # fmt: skip
    adam = torch.optim.AdamW(groups)

    def add_states(adam: torch.optim.Optimizer, config: Any = None) -> None:
        for group in adam.param_groups:
            for parameter in group["params"]:
                if not adam.state[parameter]:
                    adam.state[parameter] = {
                        kind: torch.zeros_like(parameter.data) for kind in MOMENTS
                    }

    kinds = core.optimizer.optimizer
    with OnCpu():
        if dtype == torch.float32:
            return kinds.FP32Optimizer(adam, options, add_states)
        return kinds.Float16OptimizerWithFloat16Params(adam, options, None, add_states)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_their_optimizer_loads_the_states(
    core: SimpleNamespace, dtype: torch.dtype, tmp_path: Path
) -> None:
    """Moments, steps and master weights, which their optimizer then steps.

    Claim (checkpoints): models of `megatron-core` load it and compute our logits, and its
    optimizers load the states (`make test-interop`)
    """
    config = model(**OTHER_LLAMA)
    source = random_source(config)
    source = dataclasses.replace(source, **random_training(config)).checked().to(dtype)
    training = source.training
    assert training is not None
    write_torch_dist(source, tmp_path / "out", WriteOptions(adam="torch"))
    theirs = their_model(core, config, dtype)
    optimizer = their_optimizer(core, theirs, dtype)
    names = {id(parameter): name for name, parameter in theirs.named_parameters()}
    is_half = dtype == torch.bfloat16
    groups = optimizer.float16_groups if is_half else [optimizer.get_parameters()]
    order = [names[id(each)] for group in groups for each in group]
    weights = theirs.sharded_state_dict()
    asked = {"model": weights, "optimizer": optimizer.sharded_state_dict(weights, is_loading=True)}
    folder = str(tmp_path / "out" / "iter_0000007")
    loaded = core.checkpointing.load(asked, folder, strict=core.strict)
    theirs.load_state_dict(loaded["model"], strict=True)
    optimizer.load_state_dict(loaded["optimizer"])

    def ours(name: str, tensors: TensorReaders) -> Tensor:
        canonical = canonical_name(name)
        assert canonical is not None
        full = tensors[canonical].read()
        if canonical in VOCABULARY_TABLES:
            return padded(full, ROWS)
        return grouped(full, config) if ".qkv." in canonical else full

    assert loaded["iteration"] == 7
    assert [group["betas"] for group in optimizer.param_groups] == [(0.8, 0.9)] * 2
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    states = [
        (parameter, optimizer.optimizer.state[parameter])
        for group in optimizer.param_groups
        for parameter in group["params"]
    ]
    masters = source.optimizer.get(MASTER, source.tensors)
    assert len(states) == len(order) == len(source.tensors)
    for name, (parameter, state) in zip(order, states, strict=True):
        assert float(state["step"]) == 6
        assert torch.equal(parameter.data, ours(name, masters)), name
        for kind in MOMENTS:
            assert torch.equal(state[kind], ours(name, source.optimizer[kind])), name
        parameter.grad = torch.ones_like(parameter)
    optimizer.optimizer.step()


@pytest.mark.parametrize("name", PARTS)
def test_parts_of_their_models_are_read(core: SimpleNamespace, name: str, tmp_path: Path) -> None:
    """Experts, multi-latent attention, sinks, gates and predictions, in files of both formats."""
    theirs = write(PARTS[name], tmp_path / "torch")
    folders = [tmp_path / "torch"]
    for is_single in (False, True):  # keys of each layer and expert
        folders.append(tmp_path / str(is_single) / "iter_0000001")
        folders[-1].mkdir(parents=True)
        weights = theirs.sharded_state_dict(
            metadata={"singleton_local_shards": is_single, "dp_cp_group": dist.group.WORLD}
        )
        with OnCpu():
            core.checkpointing.save({**state_of(PARTS[name]), "model": weights}, str(folders[-1]))
    torch.serialization.clear_safe_globals()  # as in a process without megatron-core
    reference = np.load(folders[0] / "reference.npz")
    for folder in folders:
        found = logits(open_megatron(folder).weights(), torch.from_numpy(reference["tokens"]))
        assert np.abs(found.numpy() - reference["logits"]).max() < 1e-5, folder


PRE_MLP = "pre_mlp_layernorm."
FUSED = "mlp.linear_fc1.layer_norm_"


@pytest.mark.parametrize("name", [name for name in PARTS if "predictions" not in name])
def test_their_models_load_exported_parts(core: SimpleNamespace, name: str, tmp_path: Path) -> None:
    """With every entry asked for and found, none left over, and the values that were saved.

    Predictions have other keys since version 0.17.
    """
    theirs = write(PARTS[name], tmp_path / "torch")
    torch.serialization.clear_safe_globals()
    write_torch_dist(open_megatron(tmp_path / "torch").weights(), tmp_path / "ours")
    torch.serialization.add_safe_globals([argparse.Namespace])
    saved = {key: value.clone() for key, value in theirs.named_parameters()}
    for parameter in theirs.parameters():
        parameter.data.zero_()
    weights = theirs.sharded_state_dict(metadata={"dp_cp_group": dist.group.WORLD})
    for entry in weights.values():  # with the norms of Transformer Engine's layers
        swap = (PRE_MLP, FUSED) if name == "latent_yarn" else (FUSED, PRE_MLP)
        entry.key = entry.key.replace(*swap)
    folder = str(tmp_path / "ours" / "release")
    with OnCpu():
        loaded = core.checkpointing.load({"model": weights}, folder, strict=core.strict)
    theirs.load_state_dict(loaded["model"], strict=False)
    for key, value in theirs.named_parameters():
        rows = TOKENS if value.shape[0] == ROWS_OF_PARTS else None
        assert torch.equal(value[:rows], saved[key][:rows]), key
