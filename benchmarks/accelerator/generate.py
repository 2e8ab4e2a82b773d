"""Generation speed beside transformers' `generate` with a model of the same shape."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.accelerator.models import SIZES, GptSize


def measure(
    device: torch.device, size_name: str, *, batches: tuple[int, ...], new_tokens: int
) -> list[dict[str, Any]]:
    """Measure greedy decoding of prompts of 32 tokens in bf16, with a key-value cache.

    Args:
        device: Device of the models.
        size_name: Key of SIZES.
        batches: Numbers of prompts.
        new_tokens: Tokens that each prompt is continued by.
    """
    size = SIZES[size_name]
    length = min(32, size.sequence // 2)
    new_tokens = min(new_tokens, size.sequence - length)
    generators = {"megatron_ds": _ours(size, device), "transformers": _theirs(size, device)}
    rows = []
    for batch in batches:
        prompts = torch.randint(size.vocab - 1, (batch, length)).tolist()
        for name, generate in generators.items():
            generate(prompts, 2)  # compiles and warms up
            begin = time.perf_counter()
            generate(prompts, new_tokens)
            seconds = time.perf_counter() - begin
            rows.append(
                {"name": name, "batch": batch, "tokens_per_second": batch * new_tokens / seconds}
            )
    return rows


def lines(rows: list[dict[str, Any]]) -> list[str]:
    """Format the figures of `measure`."""
    return [
        f"{row['name']:14} batch {row['batch']:3} {row['tokens_per_second']:10.0f} tokens/s"
        for row in rows
    ]


def _ours(size: GptSize, device: torch.device) -> Callable[[list[list[int]], int], object]:
    from megatron_ds.config import ModelConfig
    from megatron_ds.inference.generate import generate
    from megatron_ds.inference.sampling_params import SamplingParams
    from megatron_ds.inference.sequences import GenerationConfig
    from megatron_ds.model.gpt import GPTModel
    from megatron_ds.parallel.mesh import Mesh
    from megatron_ds.parallel.rng import RngStreams

    config = ModelConfig(
        num_layers=size.layers,
        hidden_size=size.hidden,
        num_attention_heads=size.heads,
        seq_length=size.sequence,
        vocab_size=size.vocab,
    )
    model = GPTModel(config, mesh=Mesh.build(1), rng=RngStreams(0, device), seed=1)
    model = model.to(device=device, dtype=torch.bfloat16).eval()

    def run(prompts: list[list[int]], count: int) -> object:
        sampling = SamplingParams(greedy=True)
        return generate(model, prompts, GenerationConfig(count, sampling))

    return run


def _theirs(size: GptSize, device: torch.device) -> Callable[[list[list[int]], int], object]:
    from benchmarks.train_step import Shape, transformers_gpt2

    shape = Shape(size.layers, size.hidden, size.heads, size.sequence, size.vocab, 1)
    model = transformers_gpt2(shape).to(device=device, dtype=torch.bfloat16).eval()
    model.config.use_cache = True

    def run(prompts: list[list[int]], count: int) -> object:
        ids = torch.tensor(prompts, device=device)
        return model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            pad_token_id=size.vocab - 1,
        ).tolist()

    return run
