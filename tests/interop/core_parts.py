"""Small models of megatron-core with the parts that it alone has, in checkpoints with their logits.

tests/golden/core_parts.tar.xz has the folders that this program writes with megatron-core 0.19.2,
which needs a later Python to be installed and runs from its unpacked wheel:

    PYTHONPATH=.:WHEEL python -m tests.interop.core_parts FOLDER
"""

from __future__ import annotations

import argparse
import importlib
import importlib.machinery
import sys
import types
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from tests.interop.on_cpu import OnCpu, patch_devices

TOKENS = 60
LENGTH = 12
ROWS = 64
COMMON: dict[str, Any] = {
    "num_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "ffn_hidden_size": 24,
    "add_bias_linear": False, "normalization": "RMSNorm", "layernorm_epsilon": 1e-5,
    "hidden_dropout": 0.0, "attention_dropout": 0.0, "apply_rope_fusion": False,
}  # fmt: skip
LATENT = {
    "multi_latent_attention": True, "kv_lora_rank": 10, "qk_head_dim": 8, "v_head_dim": 6,
    "qk_pos_emb_head_dim": 4, "rotary_base": 10000.0,
}  # fmt: skip
EXPERTS = {"num_moe_experts": 4, "moe_ffn_hidden_size": 12, "moe_router_dtype": "fp32"}
EXPERTS |= {"moe_router_load_balancing_type": "none", "moe_token_dispatcher_type": "allgather"}
PARTS: dict[str, dict[str, Any]] = {
    "latent_sigmoid_predictions": {
        **LATENT, **EXPERTS, "q_lora_rank": 12, "qk_layernorm": True, "rope_type": "rope",
        "moe_layer_freq": [0, 1], "moe_router_topk": 2, "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True, "moe_router_topk_scaling_factor": 2.5,
        "moe_router_num_groups": 2, "moe_router_group_topk": 1, "mtp_num_layers": 1,
        "moe_shared_expert_intermediate_size": 16,
    },
    "latent_yarn": {
        **LATENT, "q_lora_rank": None, "rope_type": "yarn", "rotary_scaling_factor": 4.0,
        "original_max_position_embeddings": 16, "mscale": 1.0, "mscale_all_dim": 0.5,
    },
    "sinks": {
        **EXPERTS, "add_bias_linear": True, "moe_router_topk": 3, "softmax_type": "learnable",
        "num_query_groups": 2, "kv_channels": 6, "activation_func_clamp_value": 0.5,
        "glu_linear_offset": 1.0,
    },
    "gates": {
        **EXPERTS, "attention_output_gate": True, "qk_layernorm": True, "num_query_groups": 2,
        "kv_channels": 4, "moe_shared_expert_intermediate_size": 16,
        "moe_shared_expert_gate": True, "moe_router_topk": 2, "moe_latent_size": 8,
        "moe_router_pre_softmax": True,
    },
}  # fmt: skip


class Linear(torch.nn.Linear):
    """Stands for the layer of Transformer Engine, which needs a GPU."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool, **ignored: Any) -> None:
        super().__init__(inputs, outputs, bias=bias)

    def forward(self, inputs: torch.Tensor) -> Any:
        return super().forward(inputs), None


def stub_triton() -> None:
    """Lets modules be imported that declare kernels."""

    class Anything(types.ModuleType):
        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return Anything(name)

        def __call__(self, *args: Any, **options: Any) -> Any:
            return args[0] if len(args) == 1 and callable(args[0]) else Anything("value")

    for name in ("torch._functorch.aot_autograd", "torch._inductor.compile_fx"):
        importlib.import_module(name)  # asks for triton, too, and must find none
    for name in ("triton", "triton.language", "triton.language.extra"):
        module: Any = Anything(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        module.__path__ = []
        module.__version__ = "3.0.0"
        sys.modules[name] = module


def build(options: dict[str, Any]) -> Any:
    """Their model of some options, with random weights that files store in half their bytes."""
    from megatron.core.activations import quick_gelu
    from megatron.core.models import backends
    from megatron.core.models.gpt import GPTModel, gpt_layer_specs
    from megatron.core.transformer import multi_latent_attention, transformer_config
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.moe import moe_layer, moe_utils

    class Core(DotProductAttention):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            size = kwargs.pop("v_channels", None)
            _ = kwargs.pop("k_channels", None)
            super().__init__(*args, **kwargs)
            if size is not None:
                self.hidden_size_per_partition = size * self.num_attention_heads_per_partition

    has_latents = "kv_lora_rank" in options
    is_limited = "glu_linear_offset" in options
    cls = "MLATransformerConfig" if has_latents else "TransformerConfig"
    act = quick_gelu if is_limited else F.silu
    config = getattr(transformer_config, cls)(
        **COMMON | options, use_cpu_initialization=True, gated_linear_unit=True, activation_func=act
    )
    local = {"use_transformer_engine": False}
    moe_utils.te_general_gemm = None  # a name that 0.16 asks for, and does not define
    with (
        OnCpu(),
        patch.object(moe_layer, "HAVE_TE", True),
        patch.object(moe_layer, "TELinear", Linear, create=True),
        patch.object(multi_latent_attention, "HAVE_TE", False),
        patch.object(backends.LocalSpecProvider, "core_attention", lambda provider: Core),
    ):
        spec = gpt_layer_specs.get_gpt_decoder_block_spec(config, normalization="RMSNorm", **local)
        mtp = None
        if config.mtp_num_layers:
            mtp = gpt_layer_specs.get_gpt_mtp_block_spec(config, spec, **local)
        model = GPTModel(
            config, spec, vocab_size=ROWS, max_sequence_length=LENGTH, mtp_block_spec=mtp,
            share_embeddings_and_output_weights=False, position_embedding_type="rope",
        )  # fmt: skip
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if isinstance(tensor, torch.nn.Parameter) or "expert_bias" in name:
                is_norm = "norm" in name and name.endswith("weight")
                values = 0.3 * torch.randn(tensor.shape, generator=generator) + is_norm
                tensor.copy_(values.bfloat16())
    return model.float().eval()


def state_of(options: dict[str, Any]) -> dict[str, Any]:
    """What their training program saves besides the weights: its own spelling of the options."""
    options = COMMON | options
    renamed = {"num_moe_experts": "num_experts", "layernorm_epsilon": "norm_epsilon"}
    arguments = {renamed.get(name, name): value for name, value in options.items()}
    is_limited = "glu_linear_offset" in options
    arguments |= {
        "swiglu": not is_limited, "quick_geglu": is_limited, "seq_length": LENGTH,
        "max_position_embeddings": LENGTH, "position_embedding_type": "rope",
        "rotary_base": 10000, "rotary_percent": 1.0, "group_query_attention": True,
        "untie_embeddings_and_output_weights": True, "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1, "padded_vocab_size": ROWS,
    }  # fmt: skip
    info = {"original_vocab_size": TOKENS}
    args = argparse.Namespace(**arguments)
    return {"args": args, "checkpoint_version": 3.0, "iteration": 0, "checkpoint_info": info}


def write(options: dict[str, Any], folder: Path) -> Any:
    """Writes a checkpoint of one file, with tokens and logits; returns the model."""
    model = build(options)
    path = folder / "release" / "mp_rank_00" / "model_optim_rng.pt"
    path.parent.mkdir(parents=True)
    (folder / "latest_checkpointed_iteration.txt").write_text("release")
    weights = model.state_dict_for_save_checkpoint()
    weights = {name: value for name, value in weights.items() if "_extra_state" not in name}
    torch.save(state_of(options) | {"model": weights}, path)
    tokens = torch.randint(0, TOKENS, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    mask = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).triu(1)
    outputs: list[torch.Tensor] = []  # those of predictions first, which need labels
    model.output_layer.register_forward_hook(
        lambda layer, args, out: outputs.append(out[0].clone())
    )
    with torch.no_grad(), OnCpu():
        model(tokens, torch.arange(LENGTH).expand(2, -1), mask, labels=tokens)
    logits = outputs[-1].transpose(0, 1)[..., :TOKENS]
    np.savez(folder / "reference.npz", tokens=tokens.numpy(), logits=logits.numpy())
    return model


if __name__ == "__main__":
    stub_triton()
    patch_devices(pytest.MonkeyPatch())
    from megatron.core import parallel_state

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    for part, chosen in PARTS.items():
        write(chosen, Path(sys.argv[1]) / part)
