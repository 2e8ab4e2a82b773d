"""Generation speed: greedy beside transformers' `generate`, sampled, and of ragged prompts."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator

import torch

from benchmarks.accelerator.models import GptSize
from benchmarks.accelerator.processes import Row
from megatron_ds.config import ModelConfig
from megatron_ds.inference.generation.engine import GenerationEngine
from megatron_ds.inference.generation.sampling_params import SamplingParams
from megatron_ds.inference.generation.sequences import GenerationConfig, TextSequence
from megatron_ds.model.gpt import GPTModel
from megatron_ds.parallel.mesh import Mesh
from megatron_ds.parallel.rng import RngStreams

GRAPHS = "greedy, --decode-graphs"
RAGGED = "grouped queries, ragged"


def measure(
    device: torch.device, size: GptSize, *, batches: tuple[int, ...], new_tokens: int
) -> Iterator[Row]:
    """Measure decoding in bf16 with a key-value cache.

    Every batch is decoded greedily by both contenders, then by ours with top-p sampling, and with
    grouped queries from prompts of different lengths.

    Args:
        device: Device of the models.
        size: Shape of the models.
        batches: Numbers of prompts.
        new_tokens: Tokens that each prompt is continued by.
    """
    length = min(32, size.sequence // 2)
    new_tokens = min(new_tokens, size.sequence - length)
    config = size.config()
    ours = _ours(config, device, length + new_tokens)
    greedy = SamplingParams(greedy=True)
    grouped = dataclasses.replace(config, num_query_groups=size.heads // 4)
    contenders: dict[str, Callable[[list[list[int]], int], object]] = {
        "greedy": functools.partial(ours, greedy),
        GRAPHS: functools.partial(ours, greedy, graphs=True),
        "transformers, greedy": _theirs(size, device),
        "sampled": functools.partial(ours, SamplingParams(top_p=0.9)),
        RAGGED: functools.partial(_ours(grouped, device, length + new_tokens), greedy),
    }
    for batch in batches:
        prompts = torch.randint(size.vocab - 1, (batch, length)).tolist()
        greedy_ids: object = None
        for name, decode in contenders.items():
            texts = prompts
            if name == RAGGED:
                texts = [text[row % 8 :] for row, text in enumerate(prompts)]
            decode(texts, 2)  # compiles and warms up
            begin = time.perf_counter()
            ids = decode(texts, new_tokens)
            rate = batch * new_tokens / (time.perf_counter() - begin)
            row: Row = {"name": name, "batch": batch, "tokens_per_second": rate}
            if name == "greedy":
                greedy_ids = ids
            elif name == GRAPHS:
                row["passed"] = ids == greedy_ids
            yield row


def lines(row: Row) -> Iterator[str]:
    """Format the figures of a case."""
    verdict = "" if row.get("passed", True) else ", not the eager ids"
    rate = f"{row['tokens_per_second']:10,.0f} tokens/s"
    yield f"{row['name']:30} batch {row['batch']:3} {rate}{verdict}"


def _ours(
    config: ModelConfig, device: torch.device, longest: int
) -> Callable[..., list[list[int]]]:
    model = GPTModel(config, mesh=Mesh.build(1), rng=RngStreams(0, device), seed=1)
    model = model.to(device=device, dtype=torch.bfloat16).eval()

    @functools.cache
    def engine(slots: int, capacity: int, graphs: bool) -> GenerationEngine:
        return GenerationEngine(model, slots=slots, capacity=capacity, use_graphs=graphs)

    def run(
        sampling: SamplingParams, prompts: list[list[int]], count: int, *, graphs: bool = False
    ) -> list[list[int]]:
        generation = GenerationConfig(count, sampling)
        texts = [TextSequence.of(ids, generation, row) for row, ids in enumerate(prompts)]
        decoder = engine(len(prompts), longest, graphs)
        for text in texts:
            decoder.add(text)
        while decoder.is_busy:
            decoder.step()
        return [text.new_ids for text in texts]

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
