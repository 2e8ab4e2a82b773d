"""Models of other trainers' packages with random weights: python trainer_models.py FOLDER CASE ...

For each CASE, TRAINER_NAME, the package builds its own model, and FOLDER/CASE receives the
checkpoint in the trainer's files and reference.npz, the logits of the package's model. Packages
that these import for other purposes, such as downloads, are replaced by mocks.
"""

from __future__ import annotations

import dataclasses
import importlib.machinery
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

import numpy
import torch
import yaml
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

VOCABULARY = 128
WIDTH = 32
LENGTH = 32
TOKENS = torch.randint(0, VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(3))


def mock(*names: str) -> None:
    for name in names:
        sys.modules[name] = MagicMock(__spec__=importlib.machinery.ModuleSpec(name, None))


def randomize(model: nn.Module) -> None:
    """Random weights, norms and buffers of the selection of experts included."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in model.state_dict().items():
            if weight.is_floating_point():  # of the selection so small that scores stay positive
                is_selection = name.endswith(
                    ("score_correction_bias", "score_bias", "expert_bias_E")
                )
                scale = 0.03 if is_selection else 0.2
                weight.copy_(scale * torch.randn(weight.shape, generator=generator))
                weight += float("norm" in name and name.endswith("weight"))


# litgpt

LITGPT: dict[str, Any] = {
    "n_layer": 2,
    "n_embd": WIDTH,
    "n_head": 4,
    "n_query_groups": 2,
    "block_size": LENGTH,
    "padded_vocab_size": VOCABULARY,
    "vocab_size": VOCABULARY,
    "rotary_percentage": 1.0,
    "parallel_residual": False,
    "bias": False,
    "norm_class_name": "RMSNorm",
    "mlp_class_name": "LLaMAMoE",
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "n_expert": 8,
    "n_expert_per_token": 2,
}
GROUPS: dict[str, Any] = {
    "n_expert_groups": 4,
    "n_topk_groups": 2,
    "n_topk_scores_per_group": 2,
    "n_expert_per_token": 4,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
}
LITGPT_CASES: dict[str, dict[str, Any]] = {
    "experts": {"norm_topk_prob": True},
    "shared": {"n_shared_expert": 2},
    "groups": {**GROUPS, "n_shared_expert": 1, "first_k_dense_replace": 1},
    "biases": {"bias": True, "n_shared_expert": 1, "norm_class_name": "LayerNorm"},
}


def write_litgpt(folder: Path, name: str) -> None:
    if "litgpt" not in sys.modules:
        spec = importlib.util.find_spec("litgpt")
        assert spec is not None
        package = ModuleType("litgpt")  # whose __init__ imports what downloads and trains
        package.__path__ = list(spec.submodule_search_locations or [])
        sys.modules["litgpt"] = package
        mock("litgpt.scripts", "litgpt.scripts.convert_hf_checkpoint")
    from litgpt.config import Config
    from litgpt.model import GPT

    config = Config(name="model", **{**LITGPT, **LITGPT_CASES[name]})
    model = GPT(config).eval()
    randomize(model)
    torch.save({"model": model.state_dict()}, folder / "lit_model.pth")
    (folder / "model_config.yaml").write_text(yaml.safe_dump(dataclasses.asdict(config)))
    save_reference(folder, model(TOKENS))


# OLMo-core


def olmo_core_model(name: str) -> Any:
    from olmo_core.nn.attention import AttentionBackendName, GateConfig, GateGranularity
    from olmo_core.nn.attention import SlidingWindowAttentionConfig as Windows
    from olmo_core.nn.moe import MoEConfig, MoERouterConfig
    from olmo_core.nn.moe.moe import LatentMoEConfig
    from olmo_core.nn.rope import RoPEConfig, YaRNRoPEScalingConfig
    from olmo_core.nn.transformer import TransformerConfig

    config = TransformerConfig.llama_like(
        d_model=WIDTH, vocab_size=VOCABULARY, n_layers=4, n_heads=4, n_kv_heads=2, rope_theta=500000
    )
    block = config.block
    mixer = block.sequence_mixer
    experts = {
        "experts": MoERouterConfig(top_k=2),
        "normalized": MoERouterConfig(top_k=2, normalize_expert_weights=1.0),
        "sigmoid": MoERouterConfig(
            top_k=2, normalize_expert_weights=1.0, bias_gamma=1e-3, gating_function="sigmoid"
        ),
    }
    for same in ("latent", "mixed"):
        experts[same] = experts["normalized"]
    if name == "head_gate":
        mixer.gate = GateConfig(granularity=GateGranularity.headwise)
    elif name == "gate":
        mixer.gate = GateConfig(granularity=GateGranularity.elementwise)
    elif name == "sinks":
        mixer.attention_sinks = True
        mixer.backend = AttentionBackendName.torch
    elif name == "overrides":  # scaled positions in the layers without a window
        mixer.sliding_window = Windows(pattern=[8, -1])
        scaling = YaRNRoPEScalingConfig(factor=4, old_context_len=4096)
        config = config.with_rope_scaling(scaling)
    elif name == "pattern":  # another base in these layers
        local = block.copy()
        local.sequence_mixer = mixer.copy()
        local.sequence_mixer.sliding_window = Windows(
            pattern=[8],
            force_full_attention_on_first_layer=False,
            force_full_attention_on_last_layer=False,
        )
        local.sequence_mixer.rope = RoPEConfig(theta=10000)
        config.block = {"local": local, "global": block}
        config.block_pattern = ["local", "local", "global"]
    elif name in experts:
        moe = block.copy()
        moe.feed_forward = None
        moe.name = "moe_reordered_norm" if name == "sigmoid" else "moe"
        moe.feed_forward_moe = MoEConfig(
            name="dropless", num_experts=8, hidden_size=24, router=experts[name]
        )
        if name == "latent":
            moe.feed_forward_moe.latent_moe = LatentMoEConfig(latent_dim=16)
        config.name = "moe"
        if name == "mixed":
            config.block_overrides = {1: moe, 3: moe}
        else:
            config.block = moe
    return config


OLMO_CORE_CASES = (
    "head_gate",
    "gate",
    "sinks",
    "overrides",
    "pattern",
    "experts",
    "normalized",
    "sigmoid",
    "latent",
    "mixed",
)


def copies_of_tokens(x: Tensor, indices: Tensor, *others: Any) -> Tensor:
    """What OLMo-core's kernel for GPUs gives: the tokens in the order of their experts."""
    return x[indices // others[-1]]


def sums_of_copies(
    x: Tensor, indices: Tensor, bin_ids: Tensor, weights: Tensor, bins: Tensor, top_k: int
) -> Tensor:
    """The weighted sum of each token's copies, likewise."""
    out = x.new_zeros(len(x) // top_k, x.shape[1])
    return out.index_add_(0, indices // top_k, x * weights[indices].unsqueeze(1))


def write_olmo_core(folder: Path, name: str) -> None:
    mock("cached_path", "cached_path.schemes", "cached_path.schemes.scheme_client")
    from olmo_core.distributed.checkpoint import save_model_and_optim_state
    from olmo_core.ops import moe as operations

    operations.kernels = SimpleNamespace(gather=copies_of_tokens, scatter=sums_of_copies)
    config = olmo_core_model(name)
    model = config.build(init_device="cpu").eval()
    randomize(model)
    save_model_and_optim_state(folder / "model_and_optim", model)
    run = {"model": config.as_config_dict(), "dataset": {"sequence_length": LENGTH}}
    (folder / "config.json").write_text(json.dumps(run))
    save_reference(folder, model(TOKENS))


# torchtitan


class InFp32(TorchFunctionMode):
    """Computes torchtitan's experts in fp32, which it rounds to bf16 whatever the weights are."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is Tensor.bfloat16:
            return args[0]
        if func is torch._grouped_mm:
            return grouped(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def grouped(x: Tensor, matrices: Tensor, *, offs: Tensor) -> Tensor:
    starts = [0, *offs.tolist()]
    rows = (x[start:stop] for start, stop in zip(starts, starts[1:], strict=False))  # noqa: RUF007
    return torch.cat([part @ matrix for part, matrix in zip(rows, matrices, strict=True)])


TORCHTITAN_CASES: dict[str, dict[str, Any]] = {
    "experts": {"score_func": "softmax", "route_norm": True},
    "probabilities": {"score_func": "softmax", "route_norm": False, "route_scale": 2.0},
    "sigmoid": {"score_func": "sigmoid", "route_norm": True},
    "groups": {
        "score_func": "sigmoid", "route_norm": True, "num_expert_groups": 4,
        "num_limited_groups": 2, "top_k": 4,
    },
    "mixed": {"score_func": "softmax", "route_norm": True},
    "shared": {"score_func": "softmax", "route_norm": True},
}  # fmt: skip


def write_torchtitan(folder: Path, name: str) -> None:
    mock("torchtitan.distributed.minimal_async_ep.kernels")
    from torch.distributed import checkpoint
    from torchtitan.models import qwen3
    from torchtitan.models.common import CosSinRoPE, Embedding, Linear
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.common.config_utils import make_ffn_config

    attention = patch.object(
        qwen3, "get_attention_config", lambda name: ScaledDotProductAttention.Config()
    )
    sizes = {"n_layers": 2, "dim": WIDTH, "n_heads": 4, "n_kv_heads": 2, "head_dim": 8}
    rope = CosSinRoPE.Config(dim=8, max_seq_len=64, theta=1e6)
    options: dict[str, Any] = {"attn_backend": "sdpa", "rope": rope}
    router = dict(TORCHTITAN_CASES[name])
    chosen = router.pop("top_k", 2)
    with attention:
        layers = qwen3._build_qwen3_moe_layers(
            **sizes, moe_hidden_dim=24, num_experts=8, top_k=chosen, moe_comm_backend="standard",
            **options,
        )  # fmt: skip
        dense = qwen3._build_qwen3_layers(**sizes, hidden_dim=48, **options)
    for layer in layers:
        for key, value in router.items():
            setattr(layer.moe.router, key, value)
        if name == "shared":
            layer.moe.shared_experts = make_ffn_config(
                dim=WIDTH,
                hidden_dim=40,
                w1_param_init=qwen3._LINEAR_INIT,
                w2w3_param_init=qwen3._LINEAR_INIT,
            )
    config = qwen3.Qwen3Model.Config(
        vocab_size=VOCABULARY,
        dim=WIDTH,
        norm=qwen3._qwen3_norm(WIDTH),
        tok_embeddings=Embedding.Config(
            num_embeddings=VOCABULARY, embedding_dim=WIDTH, param_init=qwen3._EMBEDDING_INIT
        ),
        lm_head=Linear.Config(
            in_features=WIDTH, out_features=VOCABULARY, param_init=qwen3._LINEAR_INIT
        ),
        layers=[dense[0], layers[1]] if name == "mixed" else layers,
    )
    model = config.build()
    model.init_weights(buffer_device=None)
    model.eval()
    randomize(model)
    if router["score_func"] == "softmax":  # with which ours has no bias
        for layer in model.layers.values():
            if layer.moe_enabled:
                layer.moe.expert_bias_E.zero_()
    checkpoint.save(model.state_dict(), checkpoint_id=str(folder))
    positions = torch.arange(LENGTH).expand(len(TOKENS), -1)
    with InFp32():
        save_reference(folder, model(TOKENS, positions=positions))


def save_reference(folder: Path, logits: Any) -> None:
    numpy.savez(folder / "reference.npz", tokens=TOKENS, logits=logits.detach())


WRITERS = {"litgpt": write_litgpt, "olmo_core": write_olmo_core, "torchtitan": write_torchtitan}


def main() -> None:
    torch.set_num_threads(1)
    for case in sys.argv[2:]:
        trainer = next(name for name in WRITERS if case.startswith(f"{name}_"))
        folder = Path(sys.argv[1]) / case
        folder.mkdir(parents=True)
        with torch.no_grad():
            WRITERS[trainer](folder, case.removeprefix(f"{trainer}_"))


if __name__ == "__main__":
    main()
