"""Token generation: ids in, ids out. Must not know tokenizers, checkpoints or process groups.

Prompts of different lengths share a batch without padding: the batch starts with as many tokens as
the shortest prompt has; for a longer prompt, the next prompt token takes the place of a sampled
one. So all rows have the same number of tokens at any time, with the positions and masks of a
prompt on its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from megatron_ds.config import ModelConfig
from megatron_ds.config.problems import Problem, raise_if_any
from megatron_ds.inference.kv_cache import PreallocatedCache
from megatron_ds.inference.sampling import choose, prompt_generator
from megatron_ds.inference.sampling_params import SamplingParams
from megatron_ds.inference.stop_rules import StopRules
from megatron_ds.model.gpt import GPTModel

ShouldContinue = Callable[[], bool]
"""Called before each forward pass; False cancels the generation. All tensor-parallel ranks must get
the same results."""


class Cancelled(Exception):
    """The result is no longer wanted."""


@dataclass(frozen=True)
class GenerationConfig:
    """How prompts are continued."""

    max_new_tokens: int
    sampling: SamplingParams
    eod: int | None = None
    """Token that ends a text; it is part of the result."""
    max_length: int | None = None
    """Tokens of a text, prompt included."""
    rules: StopRules | None = None
    is_complete: Callable[[Sequence[int]], bool] | None = None
    """Whether these new tokens of a text are all that is wanted. Does not depend on the rank."""
    use_cache: bool = True
    """Keep keys and values; otherwise every new token recomputes all tokens."""

    def final_length(self, prompt_length: int) -> int:
        """Maximal number of tokens of a prompt and its continuation."""
        length = prompt_length + self.max_new_tokens
        return length if self.max_length is None else min(length, self.max_length)


@dataclass
class _Row:
    """A prompt in progress."""

    ids: list[int]
    """The prompt and the tokens chosen so far."""
    prompt_length: int
    generator: torch.Generator

    @property
    def new_tokens(self) -> int:
        return len(self.ids) - self.prompt_length

    def is_done(self, config: GenerationConfig) -> bool:
        """An end of document inside the prompt does not end the text."""
        if len(self.ids) == config.final_length(self.prompt_length):
            return True
        if self.new_tokens == 0:
            return False
        previous, new = self.ids[-2:]
        if new == config.eod or (config.rules is not None and config.rules.ends(previous, new)):
            return True
        return config.is_complete is not None and config.is_complete(self.ids[self.prompt_length :])


def generate(
    model: GPTModel,
    prompts: Sequence[Sequence[int]],
    config: GenerationConfig,
    *,
    indexes: Sequence[int] | None = None,
    should_continue: ShouldContinue | None = None,
) -> list[list[int]]:
    """Continues every prompt. Collective on tensor-parallel ranks, with equal arguments.

    Learned positions limit the length of a text; rope, alibi and no positions can exceed the
    training's sequence length.

    Args:
        model: This rank's shard of the model, in evaluation mode.
        prompts: Ids of each prompt.
        config: How prompts are continued.
        indexes: Number of each prompt (default: from 0). With the seed it determines the random
            stream, so that a prompt's sample does not depend on the other prompts in the batch.
        should_continue: See `ShouldContinue`.

    Returns:
        The new tokens of each prompt. A text ends with `eod`, where the stop rules end it, or at
        its maximal length.

    Raises:
        UserError: Before any computation, if a prompt is empty, has ids outside the vocabulary or
            does not fit, or if the sampling parameters are invalid. Later, if the model's logits
            are not finite.
        Cancelled: If `should_continue` returned False.
    """
    raise_if_any([*prompt_problems(model.config, prompts, config), *config.sampling.problems()])
    rows = [
        _Row(list(prompt), len(prompt), prompt_generator(config.sampling.seed, index))
        for index, prompt in zip(indexes or range(len(prompts)), prompts, strict=True)
    ]
    with torch.no_grad():
        _extend(model, rows, config, should_continue)
    return [row.ids[row.prompt_length :] for row in rows]


def prompt_problems(
    model: ModelConfig, prompts: Sequence[Sequence[int]], config: GenerationConfig
) -> Iterator[Problem]:
    """Checks that a model can continue prompts."""
    if config.max_new_tokens < 1:
        yield Problem("no-new-tokens", max_new_tokens=config.max_new_tokens)
        return
    has_learned_positions = model.position_embedding_type == "learned_absolute"
    vocab, positions = model.vocab_size, model.num_positions
    for number, prompt in enumerate(prompts, start=1):
        length = len(prompt)
        if not prompt:
            yield Problem("prompt-without-tokens", number=number)
            continue
        invalid = next((token for token in prompt if not 0 <= token < vocab), None)
        if invalid is not None:
            yield Problem(
                "prompt-id-out-of-range", number=number, invalid=invalid, vocab_size=vocab
            )
        new = config.final_length(length) - length
        if new <= 0:
            limit = config.max_length
            yield Problem("prompt-fills-sequence", number=number, length=length, max_length=limit)
        elif has_learned_positions and length + new > positions:
            yield Problem(
                "prompt-exceeds-learned-positions",
                number=number,
                num_prompt=length,
                new=new,
                num_positions=positions,
            )


def check_cancelled(should_continue: ShouldContinue | None) -> None:
    """
    Raises:
        Cancelled: If `should_continue` returns False.
    """
    if should_continue is not None and not should_continue():
        raise Cancelled


def _extend(
    model: GPTModel,
    rows: list[_Row],
    config: GenerationConfig,
    should_continue: ShouldContinue | None,
) -> None:
    """Appends to the rows' ids until every row is done."""
    device = next(model.parameters()).device
    cache = None
    if config.use_cache and rows:
        # The last token of a row is never fed to the model.
        capacity = max(config.final_length(row.prompt_length) for row in rows) - 1
        cache = PreallocatedCache(model.config.num_layers, capacity)
    while rows:
        check_cancelled(should_continue)
        start = 0 if cache is None else cache.length
        length = min(len(row.ids) for row in rows)
        tokens_BS = torch.tensor([row.ids[start:length] for row in rows], device=device)
        last_1BH = model(tokens_BS, cache=cache, hidden_only=True)[-1:]
        logits_BV = model.logits(last_1BH)[:, 0]
        # The other rows are longer: their next token is still one of the prompt.
        rows_to_sample = [index for index, row in enumerate(rows) if len(row.ids) == length]
        if config.rules is not None:
            for index in rows_to_sample:
                logits_BV[index, list(config.rules.forbidden(rows[index].ids[-1]))] = -torch.inf
        _sample(rows, rows_to_sample, logits_BV, config.sampling)
        remaining = [index for index, row in enumerate(rows) if not row.is_done(config)]
        if len(remaining) < len(rows):
            rows = [rows[index] for index in remaining]
            if cache is not None:
                cache.keep(remaining)


def _sample(
    rows: list[_Row], rows_to_sample: list[int], logits_BV: torch.Tensor, sampling: SamplingParams
) -> None:
    """Appends a token to each of these rows; rows with equal parameters are sampled together."""
    by_params: dict[SamplingParams, list[int]] = {}
    for index in rows_to_sample:
        by_params.setdefault(sampling.after(rows[index].new_tokens), []).append(index)
    for params, indexes in by_params.items():
        generators = [rows[index].generator for index in indexes]
        tokens = choose(logits_BV[indexes], params, generators)
        for index, token in zip(indexes, tokens, strict=True):
            rows[index].ids.append(token)
