"""Text generation service: jobs of tokens, for requests of any interface. Must not know HTTP or
process groups.

A job contains what all tensor-parallel ranks need to compute the same result. Only the first rank
converts requests into jobs, and results into responses.
"""

from __future__ import annotations

import dataclasses
import functools
import secrets
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass

from megatron_ds.config import ModelConfig
from megatron_ds.config.problems import Problem, counted, raise_if_any, user_error
from megatron_ds.inference.generation.beam import BeamSearchConfig, Hypothesis, beam_search
from megatron_ds.inference.generation.sampling_params import SamplingParams
from megatron_ds.inference.generation.sequences import GenerationConfig, TextSequence
from megatron_ds.inference.generation.stop_rules import (
    NewlineTokens,
    StopRules,
    StopStrings,
    token_texts,
)
from megatron_ds.model.gpt import GPTModel
from megatron_ds.tokenizer import Tokenizer

Search = Generator[None, None, list[Hypothesis]]
"""A computation in steps that is not one of the engine."""
MIN_CHARS_PER_TOKEN = 16
"""Characters per token that the limit of a prompt's length allows at least, for vocabularies of
short tokens."""


@dataclass(frozen=True)
class GenerationJob:
    """A request in tokens, with all defaults."""

    prompts: list[list[int]]
    new_tokens: int
    """Maximal number; 0 only scores the prompts."""
    sampling: SamplingParams
    samples: int = 1
    """Texts of each prompt."""
    logprobs: bool = False
    prompt_logprobs: bool = False
    top_n: int = 0
    newline_rules: tuple[bool, bool, bool] = (False, False, False)
    """Rules for newlines, in the order of `StopRules`."""
    stops: tuple[str, ...] = ()
    """Strings after which a text ends."""
    beam: BeamSearchConfig | None = None
    """Settings of a beam search, which takes one prompt; None to sample."""
    stream: bool = False
    """Report each token."""
    log: bool = True
    """Whether the server logs the numbers of tokens."""

    @property
    def repeated_prompts(self) -> list[list[int]]:
        """The prompt of each text."""
        return [prompt for prompt in self.prompts for _ in range(self.samples)]


def random_seed() -> int:
    """Random seed for a request without a seed."""
    return secrets.randbits(63)


@dataclass(frozen=True)
class TextGenerationService:
    """Converts requests and jobs with a model and its tokenizer."""

    model: GPTModel
    """This rank's shard."""
    tokenizer: Tokenizer
    """The model's tokenizer."""
    max_length: int
    """Tokens of a text, prompt included."""

    def start(self, job: GenerationJob) -> list[TextSequence] | Search:
        """The sequences of a job, `samples` of each prompt, or its search. Equal on all ranks."""
        if job.beam is not None:
            (prompt,) = job.prompts
            new_tokens = min(job.new_tokens, self.max_length - len(prompt))
            rules = self._rules(job.newline_rules)
            config = dataclasses.replace(job.beam, max_new_tokens=new_tokens, rules=rules)
            return beam_search(self.model, prompt, config)
        generation = GenerationConfig(
            job.new_tokens,
            job.sampling,
            self.tokenizer.eod,
            self.max_length,
            self._rules(job.newline_rules),
            StopStrings(self.tokenizer.decode, job.stops) if job.stops else None,
            logprobs=job.logprobs,
            prompt_logprobs=job.prompt_logprobs,
            top_n=job.top_n,
            further_ends=self.tokenizer.further_ends,
        )
        return [
            TextSequence.of(ids, generation, index)
            for index, ids in enumerate(job.repeated_prompts)
        ]

    def encode_prompts(
        self, prompts: Sequence[str | list[int]], new_tokens: int | None, *, add_bos: bool = False
    ) -> list[list[int]]:
        """The ids of prompts.

        Args:
            prompts: Texts or ids.
            new_tokens: New tokens that must fit, or None for at least one.
            add_bos: Start texts with the begin token or, without one, with the end of a document,
                as documents start in training.

        Raises:
            UserError: If a prompt does not fit the tokenizer or the model.
        """
        encoded = list[list[int]]()
        problems = list[Problem]()
        read_chars = 0
        vocab = self.model.config.vocab_size
        for index, prompt in enumerate(prompts, start=1):
            read_chars += len(prompt)
            if problems and self._are_too_many(read_chars):
                break  # an invalid request must not take long
            if isinstance(prompt, str) and self._are_too_many(len(prompt)):
                problems.append(self._too_many_chars(prompt, index))
                continue
            ids = self._encode(prompt, index, add_bos) if isinstance(prompt, str) else prompt
            if (invalid := max(ids)) >= vocab:
                names = {"invalid": invalid, "vocab_size": vocab}
                problems.append(Problem("prompt-id-out-of-range", number=index, **names))
            problems.extend(self._length_problems(new_tokens, len(ids), index))
            encoded.append(ids)
        raise_if_any(problems)
        return encoded

    def _encode(self, text: str, index: int, add_bos: bool) -> list[int]:
        try:
            ids = self.tokenizer.begin(self.tokenizer.encode(text))
        except ValueError as error:
            raise user_error("prompt-not-encodable", number=index, error=error) from None
        if add_bos and ids[:1] != [self.tokenizer.bos]:
            ids = [self.tokenizer.prefix, *ids]
        if not ids:
            raise user_error("prompt-needs-bos", number=index)
        return ids

    def _are_too_many(self, chars: int) -> bool:
        is_short = chars <= self.max_length * MIN_CHARS_PER_TOKEN  # without reading the vocabulary
        return not is_short and chars > self._max_chars

    def _too_many_chars(self, text: str, index: int) -> Problem:
        return Problem(
            "prompt-has-too-many-characters",
            number=index,
            chars=len(text),
            max_chars=self._max_chars,
            max_length=self.max_length,
        )

    def _length_problems(
        self, new_tokens: int | None, length: int, index: int
    ) -> Iterator[Problem]:
        """Check that a prompt of this many tokens and its continuation fit."""
        limit = self.max_length
        if new_tokens is not None and length + new_tokens > limit:
            # Only what helps: a prompt keeps a token, and a request for some tokens asks for one.
            excess = length + new_tokens - limit
            advice = list[str]()
            if excess < length:
                advice.append(f"shorten the prompt by {counted(excess, 'token')}")
            if length < limit:
                advice.append(f"ask for at most {counted(limit - length, 'new token')}")
            yield Problem(
                "prompt-and-new-tokens-exceed-length",
                number=index,
                num_ids=length,
                new_tokens=new_tokens,
                max_length=limit,
                advice=", or ".join(advice) or "shorten the prompt, and ask for fewer new tokens",
            )
        elif new_tokens is None and length >= limit:
            yield Problem("prompt-fills-sequence", number=index, length=length, max_length=limit)

    def _rules(self, flags: tuple[bool, bool, bool]) -> StopRules | None:
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
        raise user_error("inference-length-exceeds-positions", requested=requested, model=model)
    return requested
