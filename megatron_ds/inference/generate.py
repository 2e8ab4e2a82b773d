"""Generation of texts for given prompts. Ids in, ids out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from megatron_ds.config.problems import raise_if_any
from megatron_ds.inference.generation.engine import GenerationEngine
from megatron_ds.inference.generation.sequences import (
    GenerationConfig,
    TextSequence,
    prompt_problems,
)
from megatron_ds.model.gpt import GPTModel

ShouldContinue = Callable[[], bool]
"""Called before each step; False cancels the generation. All tensor-parallel ranks must get the
same results."""


class Cancelled(Exception):
    """The result is no longer wanted."""


def continue_prompts(
    model: GPTModel,
    prompts: Sequence[Sequence[int]],
    config: GenerationConfig,
    *,
    indexes: Sequence[int] | None = None,
    should_continue: ShouldContinue | None = None,
) -> list[TextSequence]:
    """Continues every prompt. Collective on tensor-parallel ranks, with equal arguments.

    Learned positions limit the length of a text; rope, alibi and no positions can exceed the
    training's sequence length.

    Args:
        model: This rank's shard of the model, in evaluation mode.
        prompts: Ids of each prompt.
        config: Options of generation.
        indexes: Number of each prompt (default: from 0). With the seed it determines the random
            stream, so that a prompt's sample does not depend on the other prompts in the batch.
        should_continue: See `ShouldContinue`.

    Returns:
        A sequence for each prompt. A text ends with `eod`, where the stop rules end it, or at its
        maximal length.

    Raises:
        UserError: Before any computation, if a prompt is empty, has ids outside the vocabulary or
            does not fit, or if the sampling parameters are invalid. Later, if the model's logits
            are not finite.
        Cancelled: If `should_continue` returned False.
    """
    raise_if_any([*prompt_problems(model.config, prompts, config), *config.sampling.problems()])
    sequences = [
        TextSequence.of(prompt, config, index)
        for index, prompt in zip(indexes or range(len(prompts)), prompts, strict=True)
    ]
    # The last token of a sequence is never fed to the model.
    capacity = max((config.final_length(len(prompt)) for prompt in prompts), default=1) - 1
    engine = GenerationEngine(
        model, slots=len(prompts), capacity=capacity, use_cache=config.use_cache
    )
    for sequence in sequences:
        engine.add(sequence)
    while engine.is_busy:
        if should_continue is not None and not should_continue():
            raise Cancelled
        for sequence in engine.step():
            if sequence.error is not None:
                raise sequence.error
    return sequences


def stream_tokens(
    model: GPTModel, prompt: Sequence[int], config: GenerationConfig
) -> Iterator[int]:
    """Yields the new tokens of a prompt as they are chosen; they are those of `continue_prompts`.

    Args:
        model: The model, in evaluation mode.
        prompt: Ids of the prompt.
        config: Options of generation.

    Raises:
        UserError: As `continue_prompts`: before the first token, if the prompt or the options are
            invalid.
    """
    raise_if_any([*prompt_problems(model.config, [prompt], config), *config.sampling.problems()])
    sequence = TextSequence.of(prompt, config, 0)
    capacity = config.final_length(len(prompt)) - 1
    engine = GenerationEngine(model, slots=1, capacity=capacity, use_cache=config.use_cache)
    engine.add(sequence)
    return _tokens_of(engine, sequence)


def _tokens_of(engine: GenerationEngine, sequence: TextSequence) -> Iterator[int]:
    shown = sequence.prompt_length
    while engine.is_busy:
        engine.step()
        if sequence.error is not None:
            raise sequence.error
        new = sequence.ids[shown:]
        shown += len(new)
        yield from new


def generate(
    model: GPTModel,
    prompts: Sequence[Sequence[int]],
    config: GenerationConfig,
    *,
    indexes: Sequence[int] | None = None,
    should_continue: ShouldContinue | None = None,
) -> list[list[int]]:
    """The new tokens of each prompt, see `continue_prompts`."""
    sequences = continue_prompts(
        model, prompts, config, indexes=indexes, should_continue=should_continue
    )
    return [sequence.new_ids for sequence in sequences]
