"""Text generation service: requests in, responses out. Must not know HTTP or process groups.

A job contains what all tensor-parallel ranks need to compute the same result. Only the first rank
converts requests into jobs, and results into responses.
"""

from __future__ import annotations

import functools
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_ds.config import ModelConfig
from megatron_ds.config.problems import Problem, raise_if_any, user_error
from megatron_ds.inference.api_schema import GenerationRequest
from megatron_ds.inference.beam import BeamSearchConfig, beam_search
from megatron_ds.inference.generate import GenerationConfig, ShouldContinue, generate
from megatron_ds.inference.logprobs import Scores, score
from megatron_ds.inference.sampling_params import SamplingParams
from megatron_ds.inference.stop_rules import NewlineTokens, StopRules, token_texts
from megatron_ds.model.gpt import GPTModel
from megatron_ds.tokenizer import Tokenizer

MIN_CHARS_PER_TOKEN = 16
"""For vocabularies of short tokens, whose texts also have white space."""


@dataclass(frozen=True)
class GenerationJob:
    """A request in tokens, with all defaults."""

    request: GenerationRequest
    prompts: list[list[int]]
    new_tokens: int
    """Maximal number; 0 only scores the prompts."""
    sampling: SamplingParams


@dataclass(frozen=True)
class GenerationResult:
    """Texts in tokens, prompts included."""

    texts: list[list[int]]
    scores: list[Scores] | None
    """If log-probabilities are requested."""
    beam_scores: list[float] | None
    """For a beam search."""


@dataclass(frozen=True)
class TextGenerationService:
    """Serves requests with a model and its tokenizer."""

    model: GPTModel
    """This rank's shard."""
    tokenizer: Tokenizer
    """The model's tokenizer."""
    max_length: int
    """Tokens of a text, prompt included."""
    default_new_tokens: int
    """New tokens for requests that do not set their number."""
    micro_batch_size: int
    """Prompts that are continued together."""

    def build_job(self, request: GenerationRequest) -> GenerationJob:
        """
        Raises:
            UserError: If the request does not fit the tokenizer or the model.
        """
        prompts, problems, read_chars = list[list[int]](), list[Problem](), 0
        for number, text in enumerate(request.prompts, start=1):
            read_chars += len(text)
            if problems and self._are_too_many(read_chars):
                break  # a bad request must not take long
            if self._are_too_many(len(text)):
                problems.append(self._too_many_chars(text, number))
                continue
            ids = self._encode(text, request, number)
            problems.extend(self._length_problems(request, len(ids), number))
            prompts.append(ids)
        vocab = self.model.config.vocab_size
        if request.stop_token is not None and request.stop_token >= vocab:
            stop_token = request.stop_token
            problems.append(Problem("stop-token-out-of-range", stop_token=stop_token, vocab=vocab))
        raise_if_any(problems)
        sampling = SamplingParams(
            temperature=request.temperature,
            top_k=request.top_k,
            top_p=request.top_p,
            seed=secrets.randbits(63) if request.random_seed is None else request.random_seed,
            top_p_decay=request.top_p_decay,
            top_p_bound=request.top_p_bound,
        )
        given = request.tokens_to_generate
        new_tokens = self.default_new_tokens if given is None else given
        return GenerationJob(request, prompts, new_tokens, sampling)

    def run(self, job: GenerationJob, should_continue: ShouldContinue) -> GenerationResult:
        """Runs a job. Collective on tensor-parallel ranks.

        Raises:
            Cancelled: If `should_continue` returned False.
        """
        request = job.request
        if request.beam_width is not None:
            return self._search(job, request.beam_width, should_continue)
        texts = self._continue(job, should_continue) if job.new_tokens else job.prompts
        if not request.logprobs:
            return GenerationResult(texts, None, None)
        top_n = request.top_n_logprobs
        scores = [
            score(self.model, ids, top_n=top_n, should_continue=should_continue) for ids in texts
        ]
        return GenerationResult(texts, scores, None)

    def build_response(self, job: GenerationJob, result: GenerationResult) -> dict[str, Any]:
        """The JSON object of Megatron's server."""
        decode = self.tokenizer.decode
        response: dict[str, Any] = {
            "text": [decode(ids) for ids in result.texts],
            "segments": [[decode([number]) for number in ids] for ids in result.texts],
            "tokens": result.texts,
        }
        if result.beam_scores is not None:
            return {**response, "scores": result.beam_scores}
        scores = result.scores
        response["logprobs"] = None if scores is None else [text.logprobs for text in scores]
        if scores is not None and job.request.top_n_logprobs:
            response["top_n_logprobs"] = [
                [_by_text(decode, top) for top in text.top] for text in scores
            ]
        return response

    def _search(
        self, job: GenerationJob, width: int, should_continue: ShouldContinue
    ) -> GenerationResult:
        request, (prompt,) = job.request, job.prompts
        new_tokens = min(job.new_tokens, self.max_length - len(prompt))
        stop_token = self.tokenizer.eod if request.stop_token is None else request.stop_token
        rules = self._rules(request)
        config = BeamSearchConfig(new_tokens, width, stop_token, request.length_penalty, rules)
        hypotheses = beam_search(self.model, prompt, config, should_continue=should_continue)
        texts = [[*prompt, *hypothesis.ids] for hypothesis in hypotheses]
        scores = [hypothesis.score for hypothesis in hypotheses]
        return GenerationResult(texts, None, scores)

    def _continue(self, job: GenerationJob, should_continue: ShouldContinue) -> list[list[int]]:
        """Continues the prompts in micro-batches, on which the texts do not depend."""
        texts: list[list[int]] = []
        size, eod, rules = self.micro_batch_size, self.tokenizer.eod, self._rules(job.request)
        config = GenerationConfig(job.new_tokens, job.sampling, eod, self.max_length, rules)
        for start in range(0, len(job.prompts), size):
            batch = job.prompts[start : start + size]
            numbers = range(start, start + len(batch))
            continuations = generate(
                self.model, batch, config, indexes=numbers, should_continue=should_continue
            )
            texts += [[*ids, *more] for ids, more in zip(batch, continuations, strict=True)]
        return texts

    def _encode(self, text: str, request: GenerationRequest, number: int) -> list[int]:
        try:
            ids = self.tokenizer.encode(text)
        except ValueError as error:
            raise user_error("prompt-not-encodable", number=number, error=error) from None
        if request.add_BOS:
            # As in Megatron, a text starts after the end of another.
            ids = [self.tokenizer.eod, *ids]
        if not ids:
            raise user_error("prompt-needs-bos", number=number)
        return ids

    def _are_too_many(self, chars: int) -> bool:
        is_short = chars <= self.max_length * MIN_CHARS_PER_TOKEN  # without reading the vocabulary
        return not is_short and chars > self._max_chars

    def _too_many_chars(self, text: str, number: int) -> Problem:
        return Problem(
            "prompt-has-too-many-characters",
            number=number,
            chars=len(text),
            max_chars=self._max_chars,
            max_length=self.max_length,
        )

    def _length_problems(
        self, request: GenerationRequest, length: int, number: int
    ) -> Iterator[Problem]:
        """Check that a prompt of this many tokens and its continuation fit."""
        new_tokens, limit = request.tokens_to_generate, self.max_length
        if new_tokens is not None and length + new_tokens > limit:
            yield Problem(
                "prompt-and-new-tokens-exceed-length",
                number=number,
                num_ids=length,
                new_tokens=new_tokens,
                max_length=limit,
                room=max(0, limit - length),
            )
        elif new_tokens is None and length >= limit:
            yield Problem("prompt-fills-sequence", number=number, length=length, max_length=limit)

    def _rules(self, request: GenerationRequest) -> StopRules | None:
        flags = request.stop_on_eol, request.stop_on_double_eol, request.prevent_newline_after_colon
        return StopRules(self._newline_tokens, *flags) if any(flags) else None

    @functools.cached_property
    def _max_chars(self) -> int:
        """Characters of a prompt; longer ones are rejected before they are tokenized.

        A sequence of tokens with the longest text has as many. So no prompt that fits is rejected,
        unless most of it is white space, which some tokenizers drop.
        """
        longest = max(map(len, token_texts(self.tokenizer)))
        return self.max_length * max(MIN_CHARS_PER_TOKEN, longest)

    @functools.cached_property
    def _newline_tokens(self) -> NewlineTokens:
        return NewlineTokens(self.tokenizer)


def _by_text(
    decode: Callable[[Sequence[int]], str], top: Sequence[tuple[int, float]]
) -> dict[str, float]:
    """Log-probabilities by the texts of their ids, in the same order.

    Ids that are parts of characters may share a text: the first, most probable one is kept.
    """
    by_text: dict[str, float] = {}
    for number, value in top:
        by_text.setdefault(decode([number]), value)
    return by_text


def max_sequence_length(model: ModelConfig, requested: int | None) -> int:
    """Tokens that a text may have, prompt included.

    Args:
        model: The model.
        requested: Length from the command line (default: the run's length).

    Raises:
        UserError: If there are fewer learned positions.
    """
    is_learned = model.position_embedding_type == "learned_absolute"
    if requested is None:
        return model.num_positions if is_learned else model.seq_length
    if requested < 2:
        raise user_error("inference-length-too-small", requested=requested)
    if is_learned and requested > model.num_positions:
        positions = model.num_positions
        raise user_error(
            "inference-length-exceeds-positions", requested=requested, num_positions=positions
        )
    return requested
