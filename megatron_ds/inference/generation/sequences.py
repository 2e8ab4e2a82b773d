"""Sequences in progress: their ids, how they are continued, and when they are complete."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from megatron_ds.config import ModelConfig
from megatron_ds.config.problems import Problem, UserError
from megatron_ds.inference.generation.sampling import noise_key
from megatron_ds.inference.generation.sampling_params import SamplingParams
from megatron_ds.inference.generation.stop_rules import StopRules


@dataclass(frozen=True)
class GenerationConfig:
    """Settings for continuing prompts."""

    max_new_tokens: int
    """0 only scores the prompts, with `prompt_logprobs`."""
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
    logprobs: bool = False
    """Return the log-probabilities of the new tokens."""
    prompt_logprobs: bool = False
    """Also return the log-probabilities of the prompt tokens, except the first."""
    top_n: int = 0
    """Number of most probable tokens to return at each of these positions."""
    further_ends: frozenset[int] = frozenset()
    """Tokens that end a text as `eod` does."""

    def final_length(self, prompt_length: int) -> int:
        """Maximal number of tokens of a prompt and its continuation."""
        length = prompt_length + self.max_new_tokens
        return length if self.max_length is None else min(length, self.max_length)


@dataclass(frozen=True)
class Scores:
    """Natural logarithms of probabilities, before temperature and stop rules, for the last tokens
    of a text."""

    logprobs: list[float] = field(default_factory=list)
    top: list[list[tuple[int, float]]] = field(default_factory=list)
    """The most probable ids at each position and their log-probabilities, in descending order."""


@dataclass(eq=False)
class TextSequence:
    """A prompt and the tokens chosen so far."""

    ids: list[int]
    config: GenerationConfig
    index: int
    """Number of the prompt, which with the seed and the position determines its random numbers."""
    prompt_length: int
    scores: Scores = field(default_factory=Scores)
    ended_itself: bool = False
    """Whether a token ended the text, not its maximal length."""
    error: UserError | None = None
    """Reason that the sequence ended early."""

    @classmethod
    def of(cls, prompt: Sequence[int], config: GenerationConfig, index: int) -> TextSequence:
        """A sequence with no new tokens."""
        return cls(list(prompt), config, index, len(prompt))

    @property
    def noise_key(self) -> int:
        """The key of the random numbers of the next token."""
        return noise_key(self.config.sampling.seed, self.index, len(self.ids))

    @property
    def new_ids(self) -> list[int]:
        return self.ids[self.prompt_length :]

    @property
    def is_done(self) -> bool:
        has_room = len(self.ids) < self.config.final_length(self.prompt_length)
        return self.ended_itself or self.error is not None or not has_room

    def append(self, token: int) -> None:
        """Adds a new token, which may end the text."""
        config = self.config
        previous = self.ids[-1]
        self.ids.append(token)
        self.ended_itself = (
            token == config.eod
            or token in config.further_ends
            or (config.rules is not None and config.rules.ends(previous, token))
            or (config.is_complete is not None and config.is_complete(self.new_ids))
        )


def prompt_problems(
    model: ModelConfig, prompts: Sequence[Sequence[int]], config: GenerationConfig
) -> Iterator[Problem]:
    """Checks that a model can continue prompts."""
    if config.max_new_tokens < (not config.prompt_logprobs):
        yield Problem("no-new-tokens", max_new_tokens=config.max_new_tokens)
        return
    has_learned_positions = model.position_embedding_type == "learned_absolute"
    vocab = model.vocab_size
    positions = model.num_positions
    for index, prompt in enumerate(prompts, start=1):
        length = len(prompt)
        if not prompt:
            yield Problem("prompt-without-tokens", number=index)
            continue
        invalid = next((token for token in prompt if not 0 <= token < vocab), None)
        if invalid is not None:
            yield Problem("prompt-id-out-of-range", number=index, invalid=invalid, vocab_size=vocab)
        new = config.final_length(length) - length
        if new <= 0 < config.max_new_tokens:
            limit = config.max_length
            yield Problem("prompt-fills-sequence", number=index, length=length, max_length=limit)
        elif has_learned_positions and length + new > positions:
            yield Problem(
                "prompt-exceeds-learned-positions",
                number=index,
                num_prompt=length,
                new=new,
                num_positions=positions,
            )
