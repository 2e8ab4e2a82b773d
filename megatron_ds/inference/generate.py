"""Generation: ids in, ids out. Knows no tokenizer, no checkpoint and no process group.

Prompts of different lengths share a batch without padding: the batch starts with as many tokens as
the shortest prompt has, and a longer prompt's next token is given instead of chosen. So every row
has the same number of tokens at any time, and no position or mask differs from those of a prompt
that is alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch

from megatron_ds.config import ModelConfig
from megatron_ds.inference.kv_cache import PreallocatedCache
from megatron_ds.inference.sampling import choose, generator_of
from megatron_ds.inference.sampling_params import SamplingParams
from megatron_ds.model.gpt import GPTModel


class Cancelled(Exception):
    """Nobody wants the texts any more."""


class StopRules(Protocol):
    """What is asked of the tokens beside sampling."""

    def ends(self, previous: int, new: int) -> bool:
        """Whether a text ends with this new token."""

    def forbidden(self, previous: int) -> Sequence[int]:
        """Tokens that must not follow this one."""


@dataclass
class _Row:
    """One prompt on its way."""

    ids: list[int]
    """The prompt, and what was chosen after it."""
    prompt_length: int
    end: int
    """Length at which it ends at the latest."""
    generator: torch.Generator

    @property
    def new_tokens(self) -> int:
        return len(self.ids) - self.prompt_length

    def is_done(self, eod: int | None, rules: StopRules | None) -> bool:
        """An end of document inside the prompt ends nothing."""
        if len(self.ids) == self.end:
            return True
        if self.new_tokens == 0:
            return False
        previous, new = self.ids[-2:]
        return new == eod or (rules is not None and rules.ends(previous, new))


def generate(
    model: GPTModel,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    sampling: SamplingParams,
    eod: int | None,
    max_length: int | None = None,
    first_index: int = 0,
    cache: bool = True,
    rules: StopRules | None = None,
    go_on: Callable[[], bool] | None = None,
) -> list[list[int]]:
    """The continuation of every prompt, without the prompt; it ends with `eod` if the model ended
    it, where the rules end it, else at max_new_tokens or at max_length tokens (prompt included).

    first_index: number of the first prompt, which with the seed decides what is drawn: a prompt's
    sample does not depend on the others of the batch. cache: keep keys and values; otherwise all
    tokens are computed anew for each new one. go_on: asked before each token; where it says no,
    Cancelled is raised. On tensor-parallel ranks it is collective, with the same arguments on all
    and the same answers of go_on. Raises ValueError, before anything is computed, for prompts that
    are empty, outside the vocabulary, or do not fit: learned positions end, while rope, alibi and
    no positions go on beyond the training's sequence length (how well is the model's affair).
    """
    problems = list(prompt_problems(model.config, prompts, max_new_tokens, max_length))
    problems += sampling.problems()
    if problems:
        raise ValueError("\n".join(problems))
    rows = [
        _Row(
            ids=list(prompt),
            prompt_length=len(prompt),
            end=_end(len(prompt), max_new_tokens, max_length),
            generator=generator_of(sampling.seed, first_index + index),
        )
        for index, prompt in enumerate(prompts)
    ]
    with torch.no_grad(), eval_mode(model):
        _extend(model, rows, sampling, eod, cache, rules, go_on)
    return [row.ids[row.prompt_length :] for row in rows]


def prompt_problems(
    config: ModelConfig,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    max_length: int | None,
) -> Iterator[str]:
    """Why a model cannot continue these prompts; nothing if it can. Arguments as of `generate`."""
    if max_new_tokens < 1:
        yield f"{max_new_tokens} new tokens: must be positive"
        return
    learned = config.position_embedding_type == "learned_absolute"
    for number, prompt in enumerate(prompts, start=1):
        if not prompt:
            yield f"prompt {number} has no tokens"
            continue
        wrong = [token for token in prompt if not 0 <= token < config.vocab]
        if wrong:
            yield f"prompt {number}: id {wrong[0]} is outside the vocabulary of {config.vocab}"
        if max_length is not None and len(prompt) >= max_length:
            yield (
                f"prompt {number}: its {len(prompt)} tokens leave no room for new ones in the "
                f"sequence of {max_length}"
            )
            continue
        end = _end(len(prompt), max_new_tokens, max_length)
        if learned and end > config.positions:
            yield (
                f"prompt {number}: {len(prompt)} tokens and {end - len(prompt)} new ones exceed "
                f"the model's {config.positions} learned positions"
            )


def _extend(
    model: GPTModel,
    rows: list[_Row],
    sampling: SamplingParams,
    eod: int | None,
    cache: bool,
    rules: StopRules | None,
    go_on: Callable[[], bool] | None,
) -> None:
    """Appends to the rows' ids until every row is done."""
    device = next(model.parameters()).device
    store = None
    if cache and rows:
        # The last token of a row is never fed.
        store = PreallocatedCache(model.config.layers, max(row.end for row in rows) - 1)
    while rows:
        if go_on is not None and not go_on():
            raise Cancelled
        start = 0 if store is None else store.length
        length = min(len(row.ids) for row in rows)
        tokens_BS = torch.tensor([row.ids[start:length] for row in rows], device=device)
        logits_BV = model(tokens_BS, cache=store, last_only=True)[:, 0]
        open_ends = [index for index, row in enumerate(rows) if len(row.ids) == length]
        if rules is not None:
            for index in open_ends:
                logits_BV[index, list(rules.forbidden(rows[index].ids[-1]))] = -torch.inf
        _choose(rows, open_ends, logits_BV, sampling)
        staying = [index for index, row in enumerate(rows) if not row.is_done(eod, rules)]
        if len(staying) < len(rows):
            rows = [rows[index] for index in staying]
            if store is not None:
                store.keep(staying)


def _choose(
    rows: list[_Row], open_ends: list[int], logits_BV: torch.Tensor, sampling: SamplingParams
) -> None:
    """Appends a token to the rows at these indexes; together where they are drawn alike."""
    alike: dict[SamplingParams, list[int]] = {}
    for index in open_ends:
        alike.setdefault(sampling.after(rows[index].new_tokens), []).append(index)
    for settings, indexes in alike.items():
        generators = [rows[index].generator for index in indexes]
        chosen = choose(logits_BV[indexes], settings, generators)
        for index, token in zip(indexes, chosen, strict=True):
            rows[index].ids.append(token)


def _end(prompt_length: int, max_new_tokens: int, max_length: int | None) -> int:
    end = prompt_length + max_new_tokens
    return end if max_length is None else min(end, max_length)


@contextmanager
def eval_mode(model: GPTModel) -> Iterator[None]:
    """Without dropout; afterwards the model is in the mode in which it was."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)
