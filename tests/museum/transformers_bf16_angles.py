"""Cosines of a model's rotary positions after its weights were made bf16."""

import torch
from frame import verdict
from transformers import LlamaConfig, LlamaForCausalLM

LENGTH = 4096
WIDTH = 128
BASE = 10_000.0

if __name__ == "__main__":
    config = LlamaConfig(
        hidden_size=WIDTH,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=1,
        vocab_size=23,
        max_position_embeddings=LENGTH,
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16).model
    rotary = getattr(model, "rotary_emb", None) or model.layers[0].self_attn.rotary_emb
    values = torch.zeros(1, 1, LENGTH, WIDTH, dtype=torch.bfloat16)
    try:
        cosines, _ = rotary(values, torch.arange(LENGTH)[None])
    except (TypeError, RuntimeError):
        cosines, _ = rotary(values, seq_len=LENGTH)
    rates = BASE ** -(torch.arange(0, WIDTH, 2, dtype=torch.float64) / WIDTH)
    right = torch.outer(torch.arange(LENGTH, dtype=torch.float64), rates).cos()
    error = (cosines.reshape(LENGTH, WIDTH)[:, : WIDTH // 2].double() - right).abs().max().item()
    verdict(error > 0.05, f"cosines of positions to {LENGTH} wrong by up to {error:.3f}")
