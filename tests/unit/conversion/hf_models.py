"""Small random models of transformers, one of each family and of each kind of its parts."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

VOCAB = 50
TOKENS = torch.randint(0, VOCAB, (2, 12), generator=torch.Generator().manual_seed(1))
PROMPTS = [TOKENS[0, :11].tolist(), TOKENS[1, :3].tolist()]
"""Longer and shorter than the windows below."""
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
LLAMA: dict[str, Any] = {
    **SIZES,
    "intermediate_size": 40,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "head_dim": 6}
EXPERTS |= {"router_aux_loss_coef": 0.0}
GPT_OSS = {key: LLAMA[key] for key in LLAMA if key not in ("num_hidden_layers", "rope_parameters")}
GPT_OSS |= {"num_local_experts": 4, "num_experts_per_tok": 3, "head_dim": 12, "sliding_window": 5}
GPT_OSS |= {"router_aux_loss_coef": 0.0}
GLM = {"n_routed_experts": 8, "moe_intermediate_size": 24, "n_shared_experts": 2}
GLM |= {"routed_scaling_factor": 2.5, "first_k_dense_replace": 1, "pad_token_id": None}
GPT2 = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 24}
GPT2 |= {"bos_token_id": 0, "eos_token_id": 1}
NEOX = {**SIZES, "intermediate_size": 64, "max_position_embeddings": 64}
HALF = {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 8192, "rope_theta": 500000.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
YARN |= {"rope_theta": 500.0}
SEQUENTIAL = {"parallel_attn": False, "max_position_embeddings": 64}

EAGER = {"attn_implementation": "eager"}
"""Other kernels leave out the bound of Gemma 2's scores."""
DEEPSEEK_YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 500.0, "mscale": 1.0}
DEEPSEEK_YARN |= {"mscale_all_dim": 0.5, "original_max_position_embeddings": 16}

MODELS: dict[str, Callable[[], Any]] = {
    "gpt2": lambda: transformers.GPT2Config(**GPT2),
    "gpt2-relu2": lambda: transformers.GPT2Config(
        **GPT2, activation_function="relu2", n_inner=48, tie_word_embeddings=False
    ),
    "gpt-neox": lambda: transformers.GPTNeoXConfig(
        **NEOX, use_parallel_residual=False, rope_parameters=HALF
    ),
    "llama": lambda: transformers.LlamaConfig(**LLAMA),
    "llama-biases": lambda: transformers.LlamaConfig(
        **LLAMA, attention_bias=True, mlp_bias=True, head_dim=6, tie_word_embeddings=True
    ),
    "llama3": lambda: transformers.LlamaConfig(**{**LLAMA, "rope_parameters": LLAMA3}),
    "llama-linear": lambda: transformers.LlamaConfig(
        **{**LLAMA, "rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}}
    ),
    "llama-dynamic": lambda: transformers.LlamaConfig(
        **{**LLAMA, "rope_parameters": {"rope_type": "dynamic", "rope_theta": 50.0, "factor": 2.0}}
    ),
    "mistral": lambda: transformers.MistralConfig(**LLAMA, sliding_window=None),
    "mistral-window": lambda: transformers.MistralConfig(**LLAMA, sliding_window=5),
    "qwen2": lambda: transformers.Qwen2Config(**LLAMA, tie_word_embeddings=True),
    "qwen2-window": lambda: transformers.Qwen2Config(
        **LLAMA, use_sliding_window=True, sliding_window=5, max_window_layers=1
    ),
    "qwen3-window": lambda: transformers.Qwen3Config(
        **LLAMA,
        use_sliding_window=True,
        sliding_window=5,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "qwen3": lambda: transformers.Qwen3Config(**LLAMA, head_dim=6),
    "qwen2-yarn": lambda: transformers.Qwen2Config(**{**LLAMA, "rope_parameters": YARN}),
    "qwen3-yarn": lambda: transformers.Qwen3Config(
        **{**LLAMA, "rope_parameters": {**YARN, "attention_factor": 1.3, "truncate": False}}
    ),
    "smollm3": lambda: transformers.SmolLM3Config(
        **{**LLAMA, "num_hidden_layers": 4}, pad_token_id=None
    ),
    "smollm3-pattern": lambda: transformers.SmolLM3Config(
        **LLAMA, no_rope_layers=[0, 1], pad_token_id=None
    ),
    "mixtral": lambda: transformers.MixtralConfig(
        **LLAMA, num_local_experts=4, sliding_window=5, router_aux_loss_coef=0.0
    ),
    "qwen3-moe": lambda: transformers.Qwen3MoeConfig(**LLAMA, **EXPERTS, norm_topk_prob=True),
    "qwen3-moe-layers": lambda: transformers.Qwen3MoeConfig(
        **LLAMA, **EXPERTS, decoder_sparse_step=2
    ),
    "glm4-moe": lambda: transformers.Glm4MoeConfig(
        **LLAMA, **GLM, use_qk_norm=True, n_group=4, topk_group=2, num_experts_per_tok=4
    ),
    "deepseek-v3": lambda: transformers.DeepseekV3Config(
        **{**LLAMA, "num_key_value_heads": 4},
        **GLM,
        n_group=4,
        topk_group=2,
        num_experts_per_tok=4,
        v_head_dim=6,
        q_lora_rank=12,
        kv_lora_rank=10,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
    ),
    "deepseek-v3-yarn": lambda: transformers.DeepseekV3Config(
        **{**LLAMA, "num_key_value_heads": 4, "rope_parameters": DEEPSEEK_YARN},
        **GLM,
        n_group=1,
        topk_group=1,
        num_experts_per_tok=3,
        v_head_dim=6,
        q_lora_rank=None,
        kv_lora_rank=10,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
    ),
    "glm4-moe-biases": lambda: transformers.Glm4MoeConfig(
        **LLAMA, **GLM, attention_bias=True, num_experts_per_tok=3
    ),
    "gpt-oss": lambda: transformers.GptOssConfig(
        **GPT_OSS,
        num_hidden_layers=4,
        rope_parameters={**YARN, "truncate": False},
        swiglu_limit=0.5,
    ),
    "gpt-oss-types": lambda: transformers.GptOssConfig(
        **GPT_OSS,
        num_hidden_layers=2,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
        layer_types=["full_attention", "sliding_attention"],
        attention_bias=False,
    ),
    "phi3": lambda: transformers.Phi3Config(
        **{**LLAMA, "rope_parameters": HALF}, sliding_window=5, pad_token_id=None
    ),
    "pythia": lambda: transformers.GPTNeoXConfig(**NEOX, rope_parameters=HALF),
    "olmo2": lambda: transformers.Olmo2Config(**LLAMA),
    "gemma": lambda: transformers.GemmaConfig(
        **{**LLAMA, "num_key_value_heads": 1}, head_dim=6, pad_token_id=None
    ),
    "gemma2": lambda: transformers.Gemma2Config(
        **{**LLAMA, "num_hidden_layers": 3},
        head_dim=6,
        sliding_window=5,
        pad_token_id=None,
        query_pre_attn_scalar=9,
        attn_logit_softcapping=4.0,
        final_logit_softcapping=3.0,
    ),
    "gptj": lambda: transformers.GPTJConfig(**GPT2, rotary_dim=4, tie_word_embeddings=False),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **{**LLAMA, "num_hidden_layers": 6, "rope_parameters": None},
        head_dim=6,
        sliding_window=5,
        pad_token_id=None,
        query_pre_attn_scalar=9,
    ),
    "olmo3": lambda: transformers.Olmo3Config(
        **{**LLAMA, "num_hidden_layers": 4, "rope_parameters": None},
        sliding_window=5,
        rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8},
    ),
    "granite": lambda: transformers.GraniteConfig(
        **LLAMA,
        embedding_multiplier=12.0,
        residual_multiplier=0.22,
        logits_scaling=3.0,
        attention_multiplier=0.1,
    ),
    "bloom": lambda: transformers.BloomConfig(**SIZES),
    "bloom-norms": lambda: transformers.BloomConfig(
        **SIZES, apply_residual_connection_post_layernorm=True
    ),
    "phi": lambda: transformers.PhiConfig(**NEOX, rope_parameters=HALF, num_key_value_heads=2),
    "phi-norms": lambda: transformers.PhiConfig(**NEOX, rope_parameters=HALF, qk_layernorm=True),
    "falcon-parallel": lambda: transformers.FalconConfig(**SIZES, max_position_embeddings=64),
    "falcon": lambda: transformers.FalconConfig(**SIZES, **SEQUENTIAL),
    "falcon-heads": lambda: transformers.FalconConfig(
        **SIZES, **SEQUENTIAL, multi_query=False, bias=True
    ),
}


def random_model(name: str, **changes: Any) -> Any:
    """A model whose parameters are all random, biases and norms included."""
    config = MODELS[name]()
    config.update(changes)
    model = transformers.AutoModelForCausalLM.from_config(config, **EAGER).eval()
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            is_norm = parameter.dim() == 1 and key.endswith("weight")
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator) + is_norm)
        for key, state in model.named_buffers():
            if key.endswith("e_score_correction_bias"):
                state.copy_(0.3 * torch.randn(state.shape, generator=generator))
    return model


def load_strictly(folder: Path, **options: Any) -> Any:
    """The model of a folder, whose files have exactly its weights."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model, report = transformers.AutoModelForCausalLM.from_pretrained(
            folder, output_loading_info=True, **{**EAGER, **options}
        )
    assert not any(report.values()), report
    return model.eval()


def logits_of(model: Any, tokens: Tensor = TOKENS) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(tokens).logits
    return found


def greedy_ids(model: Any, prompt: list[int], new: int) -> list[int]:
    """The ids that transformers appends to a prompt, whatever they are."""
    settings = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    ids = model.generate(torch.tensor([prompt]), max_new_tokens=new, **settings)[0]
    return [*ids[len(prompt) :].tolist()]
