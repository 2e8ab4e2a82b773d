"""From a query to its answer: tokens in between. Knows no HTTP and no process group.

A `Job` is what all tensor-parallel ranks need to compute the same; the first rank alone makes it
of a query, and an answer of its outcome.
"""

from __future__ import annotations

import functools
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from megatron_ds.config import ModelConfig
from megatron_ds.inference.api_schema import GenerationRequest
from megatron_ds.inference.beam import beam_search
from megatron_ds.inference.generate import StopRules, generate
from megatron_ds.inference.logprobs import Scores, score
from megatron_ds.inference.sampling_params import SamplingParams
from megatron_ds.inference.stop_rules import NewlineStopRules, NewlineTokens
from megatron_ds.model.gpt import GPTModel
from megatron_ds.tokenizer import Tokenizer


@dataclass(frozen=True)
class GenerationJob:
    """A query in tokens, complete."""

    query: GenerationRequest
    prompts: list[list[int]]
    new_tokens: int
    """How many are wanted at most; 0: the prompts are scored."""
    sampling: SamplingParams


@dataclass(frozen=True)
class GenerationResult:
    """Tokens of every text, its prompt's first."""

    texts: list[list[int]]
    scores: list[Scores] | None
    """If log-probabilities are wanted."""
    beam_scores: list[float] | None
    """If it was a beam search."""


class TextGenerationService:
    """A model and its tokenizer, at the service of queries."""

    def __init__(
        self,
        model: GPTModel,
        tokenizer: Tokenizer,
        *,
        max_length: int,
        usual_new_tokens: int,
        micro_batch_size: int,
    ) -> None:
        """max_length: of a text in tokens, prompt included. usual_new_tokens: where a query does
        not say how many. micro_batch_size: prompts that are continued together."""
        self._model = model
        self._tokenizer = tokenizer
        self._max_length = max_length
        self._usual_new_tokens = usual_new_tokens
        self._micro_batch_size = micro_batch_size

    def job(self, query: GenerationRequest) -> GenerationJob:
        """Raises ValueError that names what does not fit the tokenizer or the model."""
        prompts = [
            self._encode(text, query, number) for number, text in enumerate(query.prompts, start=1)
        ]
        problems = [
            problem
            for number, ids in enumerate(prompts, start=1)
            for problem in self._length_problems(number, len(ids), query.tokens_to_generate)
        ]
        stop_token = query.stop_token
        if stop_token is not None and stop_token >= self._model.config.vocab:
            problems.append(
                f"stop_token {stop_token} is outside the vocabulary of {self._model.config.vocab}"
            )
        if problems:
            raise ValueError("; ".join(problems))
        seed = secrets.randbits(63) if query.random_seed is None else query.random_seed
        sampling = SamplingParams(
            temperature=query.temperature,
            top_k=query.top_k,
            top_p=query.top_p,
            seed=seed,
            top_p_decay=query.top_p_decay,
            top_p_bound=query.top_p_bound,
        )
        new_tokens = query.tokens_to_generate
        return GenerationJob(
            query, prompts, self._usual_new_tokens if new_tokens is None else new_tokens, sampling
        )

    def run(self, job: GenerationJob, go_on: Callable[[], bool]) -> GenerationResult:
        """Computes; collective on tensor-parallel ranks. Raises Cancelled where go_on says no."""
        query = job.query
        if query.beam_width is not None:
            found = beam_search(
                self._model,
                job.prompts[0],
                max_new_tokens=min(job.new_tokens, self._max_length - len(job.prompts[0])),
                width=query.beam_width,
                stop_token=self._tokenizer.eod if query.stop_token is None else query.stop_token,
                length_penalty=query.length_penalty,
                rules=self._rules(query),
                go_on=go_on,
            )
            texts = [[*job.prompts[0], *each.ids] for each in found]
            return GenerationResult(texts, None, [each.score for each in found])
        texts = self._continued(job, go_on) if job.new_tokens else job.prompts
        if not query.logprobs:
            return GenerationResult(texts, None, None)
        scores = [score(self._model, ids, top_n=query.top_n_logprobs, go_on=go_on) for ids in texts]
        return GenerationResult(texts, scores, None)

    def answer(self, job: GenerationJob, outcome: GenerationResult) -> dict[str, Any]:
        """The JSON object of Megatron's servers."""
        decode = self._tokenizer.decode
        answer: dict[str, Any] = {
            "text": [decode(ids) for ids in outcome.texts],
            "segments": [[decode([number]) for number in ids] for ids in outcome.texts],
            "tokens": outcome.texts,
        }
        if outcome.beam_scores is not None:
            return {**answer, "scores": outcome.beam_scores}
        scores = outcome.scores
        answer["logprobs"] = None if scores is None else [each.logprobs for each in scores]
        if scores is not None and job.query.top_n_logprobs:
            # Of two ids with the same text, parts of characters, the more probable one stays.
            answer["top_n_logprobs"] = [
                [{decode([number]): value for number, value in reversed(top)} for top in each.top]
                for each in scores
            ]
        return answer

    def _continued(self, job: GenerationJob, go_on: Callable[[], bool]) -> list[list[int]]:
        """A few prompts together; their texts do not depend on that."""
        texts: list[list[int]] = []
        size = self._micro_batch_size
        for start in range(0, len(job.prompts), size):
            batch = job.prompts[start : start + size]
            continuations = generate(
                self._model,
                batch,
                max_new_tokens=job.new_tokens,
                max_length=self._max_length,
                sampling=job.sampling,
                eod=self._tokenizer.eod,
                first_index=start,
                rules=self._rules(job.query),
                go_on=go_on,
            )
            texts += [[*ids, *more] for ids, more in zip(batch, continuations, strict=True)]
        return texts

    def _encode(self, text: str, query: GenerationRequest, number: int) -> list[int]:
        try:
            ids = self._tokenizer.encode(text)
        except ValueError as error:
            raise ValueError(f"prompt {number}: {error}") from None
        if query.add_BOS:
            # As in Megatron, a text begins after the end of another.
            ids = [self._tokenizer.eod, *ids]
        if not ids:
            raise ValueError(f"prompt {number} has no tokens, which needs add_BOS: true")
        return ids

    def _length_problems(self, number: int, length: int, wanted: int | None) -> Iterator[str]:
        if wanted is not None and length + wanted > self._max_length:
            yield (
                f"prompt {number}: its {length} tokens and the {wanted} to generate are more than "
                f"the {self._max_length} that fit"
            )
        elif wanted is None and length >= self._max_length:
            yield (
                f"prompt {number}: its {length} tokens leave no room for new ones among the "
                f"{self._max_length} that fit"
            )

    def _rules(self, query: GenerationRequest) -> StopRules | None:
        if not (query.stop_on_eol or query.stop_on_double_eol or query.prevent_newline_after_colon):
            return None
        return NewlineStopRules(
            self._line_tokens,
            stop_on_eol=query.stop_on_eol,
            stop_on_double_eol=query.stop_on_double_eol,
            no_eol_after_colon=query.prevent_newline_after_colon,
        )

    @functools.cached_property
    def _line_tokens(self) -> NewlineTokens:
        return NewlineTokens(self._tokenizer)


def max_sequence_length(model: ModelConfig, wanted: int | None) -> int:
    """Tokens that a text may have, prompt included. wanted: None for as many as in the training.

    Raises ValueError where learned positions end before.
    """
    learned = model.position_embedding_type == "learned_absolute"
    if wanted is None:
        return model.positions if learned else model.sequence
    if wanted < 2:
        raise ValueError(f"--inference-max-seq-length {wanted}: must be 2 or more")
    if learned and wanted > model.positions:
        raise ValueError(
            f"--inference-max-seq-length {wanted}: the model has {model.positions} positions"
        )
    return wanted
