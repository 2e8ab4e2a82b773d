"""Models of other trainers' packages: python trainer_models.py write|load FOLDER CASE ...

For each CASE, TRAINER_NAME, the package builds its own model. `write`: with random weights;
FOLDER/CASE receives the checkpoint in the trainer's files. `load`: the package loads the checkpoint
in FOLDER/CASE; OLMo-core and litgpt also build the model by the settings there. Both write
reference.npz, the logits of the package's model. Packages that these import for other purposes,
such as downloads, are replaced by mocks.
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


def import_litgpt() -> None:
    if "litgpt" not in sys.modules:
        spec = importlib.util.find_spec("litgpt")
        assert spec is not None
        package = ModuleType("litgpt")  # whose __init__ imports what downloads and trains
        package.__path__ = list(spec.submodule_search_locations or [])
        sys.modules["litgpt"] = package
        mock("litgpt.scripts", "litgpt.scripts.convert_hf_checkpoint")


def write_litgpt(folder: Path, name: str) -> None:
    import_litgpt()
    from litgpt.config import Config
    from litgpt.model import GPT

    config = Config(name="model", **{**LITGPT, **LITGPT_CASES[name]})
    model = GPT(config).eval()
    randomize(model)
    torch.save({"model": model.state_dict()}, folder / "lit_model.pth")
    (folder / "model_config.yaml").write_text(yaml.safe_dump(dataclasses.asdict(config)))
    save_reference(folder, model(TOKENS))


def load_litgpt(folder: Path, name: str) -> None:
    import_litgpt()
    from litgpt.config import Config
    from litgpt.model import GPT

    model = GPT(Config.from_file(folder / "model_config.yaml")).eval()
    model.load_state_dict(torch.load(folder / "lit_model.pth", weights_only=True)["model"])
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
    "plain",
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


def copies_of_tokens(
    x: Tensor, indices: Tensor, bin_ids: Tensor, weights: Tensor | None, bins: Tensor, top_k: int
) -> Tensor:
    """What OLMo-core's kernel for GPUs gives: the tokens in the order of their experts."""
    rows = x[indices // top_k]
    return rows if weights is None else rows * weights[indices].unsqueeze(1)


def sums_of_copies(
    x: Tensor, indices: Tensor, bin_ids: Tensor, weights: Tensor | None, bins: Tensor, top_k: int
) -> Tensor:
    """The weighted sum of each token's copies, likewise."""
    out = x.new_zeros(len(x) // top_k, x.shape[1])
    rows = x if weights is None else x * weights[indices].unsqueeze(1)
    return out.index_add_(0, indices // top_k, rows)


def gradients_of_weights(
    x: Tensor, gradient: Tensor, indices: Tensor, bin_ids: Tensor, bins: Tensor, top_k: int
) -> Tensor:
    """The gradient of the weights in these sums, likewise."""
    products = (x * gradient[indices // top_k]).sum(1)
    return torch.empty_like(products).index_copy_(0, indices.long(), products)


def local_path(path: str, **options: Any) -> Path:
    """A file that needs no download."""
    return Path(path)


def import_olmo_core() -> None:
    mock("cached_path", "cached_path.schemes", "cached_path.schemes.scheme_client")
    sys.modules["cached_path"].cached_path = local_path  # type: ignore[attr-defined]
    from olmo_core.ops import moe as operations

    operations.kernels = SimpleNamespace(
        gather=copies_of_tokens, scatter=sums_of_copies, scatter_wgrad=gradients_of_weights
    )


def write_olmo_core(folder: Path, name: str) -> None:
    import_olmo_core()
    from olmo_core.distributed.checkpoint import save_model_and_optim_state

    config = olmo_core_model(name)
    model = config.build(init_device="cpu").eval()
    randomize(model)
    save_model_and_optim_state(folder / "model_and_optim", model)
    run = {"model": config.as_config_dict(), "dataset": {"sequence_length": LENGTH}}
    (folder / "config.json").write_text(json.dumps(run))
    save_reference(folder, model(TOKENS))


def load_olmo_core(folder: Path, name: str) -> None:
    import_olmo_core()
    from olmo_core.distributed.checkpoint import load_model_and_optim_state
    from olmo_core.nn.transformer import TransformerConfig

    values = json.loads((folder / "config.json").read_text())["model"]
    model = TransformerConfig.from_dict(values).build(init_device="cpu").eval()
    load_model_and_optim_state(folder / "model_and_optim", model)
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
    "llama": {"score_func": "softmax"},
    "dense": {"score_func": "softmax"},
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


def llama_model(theta: float) -> Any:
    """torchtitan's Llama 3, which rotates neighboring dimensions."""
    from torchtitan.models import llama3
    from torchtitan.models.common import Embedding, Linear, RMSNorm
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.common.rope import ComplexRoPE

    attention = patch.object(
        llama3, "get_attention_config", lambda name: ScaledDotProductAttention.Config()
    )
    with attention:
        layers = llama3._build_llama3_layers(
            n_layers=2,
            dim=WIDTH,
            n_heads=4,
            n_kv_heads=2,
            hidden_dim=48,
            rope=ComplexRoPE.Config(dim=8, max_seq_len=64, theta=theta),
            attn_backend="sdpa",
        )
    output = llama3._output_linear_init(WIDTH)
    return llama3.Llama3Model.Config(
        dim=WIDTH,
        vocab_size=VOCABULARY,
        tok_embeddings=Embedding.Config(
            num_embeddings=VOCABULARY, embedding_dim=WIDTH, param_init=llama3._EMBEDDING_INIT
        ),
        norm=RMSNorm.Config(normalized_shape=WIDTH, param_init=llama3._NORM_INIT),
        lm_head=Linear.Config(in_features=WIDTH, out_features=VOCABULARY, param_init=output),
        layers=layers,
    )


def qwen_model(name: str) -> Any:
    """torchtitan's Qwen 3, with experts in all layers, one, or none."""
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
    return qwen3.Qwen3Model.Config(
        vocab_size=VOCABULARY,
        dim=WIDTH,
        norm=qwen3._qwen3_norm(WIDTH),
        tok_embeddings=Embedding.Config(
            num_embeddings=VOCABULARY, embedding_dim=WIDTH, param_init=qwen3._EMBEDDING_INIT
        ),
        lm_head=Linear.Config(
            in_features=WIDTH, out_features=VOCABULARY, param_init=qwen3._LINEAR_INIT
        ),
        layers={"mixed": [dense[0], layers[1]], "dense": dense}.get(name, layers),
    )


def import_torchtitan() -> None:
    mock("torchtitan.distributed.minimal_async_ep.kernels")


def torchtitan_model(name: str) -> Any:
    import_torchtitan()
    model = (llama_model(1e6) if name == "llama" else qwen_model(name)).build()
    model.init_weights(buffer_device=None)
    return model.eval()


def write_torchtitan(folder: Path, name: str) -> None:
    from torch.distributed import checkpoint

    model = torchtitan_model(name)
    randomize(model)
    if TORCHTITAN_CASES[name]["score_func"] == "softmax":  # with which ours has no bias
        for layer in model.layers.values():
            if getattr(layer, "moe_enabled", False):
                layer.moe.expert_bias_E.zero_()
    checkpoint.save(model.state_dict(), checkpoint_id=str(folder))
    save_logits_of_torchtitan(folder, model)


def load_torchtitan(folder: Path, name: str) -> None:
    from torch.distributed import checkpoint

    model = torchtitan_model(name)
    states = model.state_dict()
    checkpoint.load(states, checkpoint_id=str(folder))
    model.load_state_dict(states)
    save_logits_of_torchtitan(folder, model)


def save_logits_of_torchtitan(folder: Path, model: Any) -> None:
    positions = torch.arange(LENGTH).expand(len(TOKENS), -1)
    with InFp32():
        save_reference(folder, model(TOKENS, positions=positions))


def save_reference(folder: Path, logits: Any) -> None:
    numpy.savez(folder / "reference.npz", tokens=TOKENS, logits=logits.detach())


WRITERS = {"litgpt": write_litgpt, "olmo_core": write_olmo_core, "torchtitan": write_torchtitan}
LOADERS = {"litgpt": load_litgpt, "olmo_core": load_olmo_core, "torchtitan": load_torchtitan}


def main() -> None:
    torch.set_num_threads(1)
    action, root, *cases = sys.argv[1:]
    functions = {"write": WRITERS, "load": LOADERS}[action]
    for case in cases:
        trainer = next(name for name in functions if case.startswith(f"{name}_"))
        folder = Path(root) / case
        folder.mkdir(parents=True, exist_ok=action == "load")
        with torch.no_grad():
            functions[trainer](folder, case.removeprefix(f"{trainer}_"))


if __name__ == "__main__":
    main()
