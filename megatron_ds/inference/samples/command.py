"""Continue prompts with a trained GPT, or sample texts without a prompt.

Runs with python, or as several processes (torchrun, deepspeed), which share the model by tensor
parallelism; the first one reads and prints.
"""

from __future__ import annotations

import collections
import io
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_ds import cli
from megatron_ds.cli.command import table_of
from megatron_ds.config.problems import Problem, UserError
from megatron_ds.inference.cli import (
    broadcast_from_rank0,
    loaded_model,
    log_rank0,
    open_checkpoint,
    run_program,
)
from megatron_ds.inference.prompts import Prompt, encode_prompts, read_prompt_file
from megatron_ds.inference.samples.options import Options
from megatron_ds.inference.samples.output import Continuation, write_texts
from megatron_ds.launch import environment

if TYPE_CHECKING:
    from megatron_ds.tokenizer import Tokenizer


def run(options: Options) -> None:
    """Load the model and generate.

    Raises:
        UserError: If options and checkpoint do not fit.
    """
    from megatron_ds.inference.generate import continue_prompts
    from megatron_ds.inference.generation.direct_calls import call_directly
    from megatron_ds.inference.generation.sequences import prompt_problems

    source, model_config, tokenizer = open_checkpoint(options)
    config = options.generation_config(model_config, tokenizer.eod, tokenizer.further_ends)

    def problems_with(prompts: Sequence[Prompt]) -> list[Problem]:
        return list(prompt_problems(model_config, [prompt.ids for prompt in prompts], config))

    batches: Iterator[list[Prompt]] = iter(())
    if environment.rank() == 0:
        batches = batches_of(options, tokenizer, problems_with)
    with loaded_model(options, source, endless=options.is_interactive) as (model, _):
        call_directly(model)
        is_over = False

        def results() -> Iterator[Continuation]:
            nonlocal is_over
            done = 0
            while batch := broadcast_from_rank0(next(batches, None)):
                prompts = [prompt.ids for prompt in batch]
                sequences = continue_prompts(
                    model, prompts, config, indexes=range(done, done + len(batch))
                )
                for prompt, sequence in zip(batch, sequences, strict=True):
                    logprobs = sequence.scores.logprobs if options.scores_texts else None
                    yield Continuation(prompt, sequence.new_ids, logprobs)
                done += len(batch)
            is_over = True

        if environment.rank() != 0:
            collections.deque(results(), maxlen=0)
            return
        try:
            write_texts(options, tokenizer, results())
        except OSError:  # of the output, between two batches
            if not is_over:
                broadcast_from_rank0(None)  # ends the other ranks
            raise


def batches_of(
    options: Options,
    tokenizer: Tokenizer,
    problems_with: Callable[[Sequence[Prompt]], list[Problem]],
) -> Iterator[list[Prompt]]:
    """The prompts in batches. Prompts on the command line are checked immediately, and a problem
    ends the program; typed prompts are checked when they are read."""
    if options.is_interactive:
        return _typed(tokenizer, problems_with)
    problems: list[Problem] = []
    if options.num_samples:
        prompts = [Prompt(None, [tokenizer.prefix])] * options.num_samples
    else:
        texts: Sequence[str] = options.prompt
        if options.sample_input_file is not None:
            texts = read_prompt_file(Path(options.sample_input_file))
        try:
            prompts = encode_prompts(texts, tokenizer)
        except UserError as error:
            prompts = []
            problems = list(error.problems)
    if problems := problems or problems_with(prompts):
        cli.fail(problems, table_of(Options), rank=environment.rank())
    size = options.micro_batch_size
    return iter([prompts[start : start + size] for start in range(0, len(prompts), size)])


def _typed(
    tokenizer: Tokenizer, problems_with: Callable[[Sequence[Prompt]], list[Problem]]
) -> Iterator[list[Prompt]]:
    """The prompts that are typed, until "stop", the end of the input or an interrupt."""
    at_terminal = sys.stdin.isatty()
    if isinstance(sys.stdin, io.TextIOWrapper):
        # A line that is not UTF-8 is reported, and the next one is read.
        sys.stdin.reconfigure(encoding="utf-8", errors="surrogateescape", newline="\n")
    while True:
        if at_terminal:
            print("Context prompt (stop to exit) >>> ", end="", file=sys.stderr, flush=True)
        try:
            line = sys.stdin.readline()
        except KeyboardInterrupt:
            log_rank0("")
            return
        text = line.removeprefix("\ufeff").removesuffix("\n").removesuffix("\r")
        if not line or text == "stop":
            return
        try:
            prompts = encode_prompts([text], tokenizer)
            problems = problems_with(prompts)
        except UserError as error:
            problems = list(error.problems)
        if problems:
            log_rank0("\n".join(map(str, problems)))
        else:
            yield prompts


main = partial(run_program, Options, run)
