#!/usr/bin/env python
"""Continue prompts with a trained GPT, or sample texts without a prompt.

The command line of `megatron_ds.inference`: options, prompts, output. Runs with python, or as
several processes (torchrun, deepspeed), which share the model by tensor parallelism; the first one
reads and prints.
"""

from __future__ import annotations

if __name__ == "__main__":
    import start_tool

import collections
import contextlib
import io
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_ds import cli
from megatron_ds.cli.command import table_of
from megatron_ds.config import ModelConfig
from megatron_ds.config.checks import file_problems, output_problems
from megatron_ds.config.fields import (
    ANY_VALUE,
    exclusive_problem,
    no_effect_problem,
    option_field,
    option_group,
    when,
)
from megatron_ds.config.problems import Problem, UserError, option
from megatron_ds.inference.cli import (
    GenerationOptions,
    broadcast_from_rank0,
    loaded_model,
    log_rank0,
    open_checkpoint,
    run_program,
)
from megatron_ds.inference.generation.sampling_params import SamplingParams
from megatron_ds.inference.prompts import (
    Prompt,
    encode_prompts,
    read_prompt_file,
    replace_text_file,
)
from megatron_ds.launch import environment

if TYPE_CHECKING:
    from megatron_ds.inference.generation.sequences import GenerationConfig
    from megatron_ds.tokenizer import Tokenizer

DEFAULT_NEW_TOKENS = 1024


@dataclass(frozen=True)
class Continuation:
    """The continuation of a prompt."""

    prompt: Prompt
    ids: list[int]
    """New tokens."""
    logprobs: list[float] | None
    """Log-probability of every token of prompt and continuation but the first, if requested."""


@dataclass(frozen=True)
class Options(GenerationOptions):
    """Continues prompts with a trained GPT, or samples texts without a prompt.

    Without --prompt, --sample-input-file and --num-samples, prompts are read from the terminal,
    until the end of the input or the prompt "stop".

    Flags of pretrain_gpt.py are accepted, too: tokenizer flags (--tokenizer-type, --vocab-file,
    --merge-file, --tokenizer-model) override the checkpoint's, model flags must agree with the
    checkpoint, other flags have no effect.
    """

    prompt: tuple[str, ...] = option_field(
        (), "prompts; repeatable", nargs="*", aliases=("prompts",), repeatable=True
    )
    sample_input_file: str | None = option_field(
        None,
        "file with one prompt per line, or JSON lines (.jsonl): strings, or objects with the key "
        "prompt or text",
        metavar="FILE",
    )
    sample_output_file: str | None = option_field(
        None,
        "output file for prompts and continuations as text (default: the terminal, or "
        "SAMPLE_INPUT_FILE.out)",
        metavar="FILE",
    )
    num_samples: int = option_field(
        0,
        "number of samples to generate without a prompt (starting from the end-of-document token)",
        minimum=0,
    )
    genfile: str | None = option_field(
        None,
        "output file for JSON lines with prompt (if there is one), text, length in tokens, "
        "finished",
        metavar="FILE",
    )
    logprobs: bool = option_field(
        False,
        "add to each line of --genfile the tokens of prompt and text, and the log-probabilities "
        "of all but the first",
        only_with=when(genfile=ANY_VALUE),
    )
    out_seq_length: int | None = option_field(
        None,
        f"new tokens per prompt (default: up to {DEFAULT_NEW_TOKENS}, within the training run's "
        "sequence length; with rope, alibi or no positions N may exceed it)",
        aliases=("tokens-to-generate",),
        minimum=1,
    )
    micro_batch_size: int = option_field(
        8, "prompts per batch; does not affect the output", minimum=1
    )
    kv_cache: bool = option_field(
        True,
        "disable the KV cache and recompute the entire sequence for each token",
        aliases=("recompute",),
    )
    sampling: SamplingParams = option_group(SamplingParams())

    def generation_config(
        self, model: ModelConfig, eod: int, further_ends: frozenset[int] = frozenset()
    ) -> GenerationConfig:
        """Returns the generation settings; the training run's length without --out-seq-length."""
        from megatron_ds.inference.generation.sequences import GenerationConfig

        max_length = model.seq_length if self.out_seq_length is None else None
        new_tokens = self.out_seq_length or DEFAULT_NEW_TOKENS
        return GenerationConfig(
            new_tokens,
            self.sampling,
            eod,
            max_length,
            use_cache=self.kv_cache,
            logprobs=self.scores_texts,
            prompt_logprobs=self.scores_texts,
            further_ends=further_ends,
        )

    @property
    def output_file(self) -> tuple[str, str] | None:
        """Option field and path of the output; None for the terminal."""
        for name in ("genfile", "sample_output_file"):
            if (path := getattr(self, name)) is not None:
                return name, path
        source = self.sample_input_file
        return None if source is None else ("sample_input_file", f"{source}.out")

    @property
    def scores_texts(self) -> bool:
        return self.logprobs and self.genfile is not None

    @property
    def is_interactive(self) -> bool:
        return not (self.prompt or self.sample_input_file or self.num_samples)

    def problems(self) -> Iterator[Problem]:
        yield from self.checkpoint.problems()
        yield from self.sampling.problems()
        sources = ("prompt", "sample_input_file", "num_samples")
        if sum(bool(getattr(self, name)) for name in sources) > 1:
            flags = ", ".join(map(option, sources))
            yield Problem("several-prompt-sources", *sources, flags=flags)
        if self.sample_input_file is not None:
            yield from file_problems("sample_input_file", self.sample_input_file)
        if self.genfile is not None and self.sample_output_file is not None:
            yield exclusive_problem("genfile", "sample_output_file")
        if (output_file := self.output_file) is not None:
            name, path = output_file
            yield from output_problems(name, path)
            source = self.sample_input_file
            if source is not None and os.path.realpath(path) == os.path.realpath(source):
                yield Problem("output-is-prompt-file", name, path=path)

    def warnings(self) -> Iterator[Problem]:
        names = [name for name in ("temperature", "top_k", "top_p") if name in self.given]
        if self.sampling.greedy and names:
            yield no_effect_problem(*names, reason=f"with {option('greedy')}")


def run(options: Options) -> None:
    """Load the model and generate.

    Raises:
        UserError: If options and checkpoint do not fit.
    """
    from megatron_ds.inference.generate import continue_prompts
    from megatron_ds.inference.generation.sequences import prompt_problems

    source, model_config, tokenizer = open_checkpoint(options)
    config = options.generation_config(model_config, tokenizer.eod, tokenizer.further_ends)

    def problems_with(prompts: Sequence[Prompt]) -> list[Problem]:
        return list(prompt_problems(model_config, [prompt.ids for prompt in prompts], config))

    batches: Iterator[list[Prompt]] = iter(())
    if environment.rank() == 0:
        batches = batches_of(options, tokenizer, problems_with)
    with loaded_model(options, source, endless=options.is_interactive) as (model, _):
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
            prompts, problems = [], list(error.problems)
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


def write_texts(options: Options, tokenizer: Tokenizer, results: Iterable[Continuation]) -> None:
    """Writes each prompt's text, from the new tokens, as soon as it is generated."""
    path = None if options.output_file is None else options.output_file[1]
    file = contextlib.nullcontext(sys.stdout) if path is None else replace_text_file(path)
    count = 0
    with file as stream:
        for count, result in enumerate(results, start=1):
            stream.write(_shown(result, count, tokenizer, as_json=options.genfile is not None))
            stream.flush()
    if path is not None:
        log_rank0(f"wrote {count} texts to {path}")


def _shown(result: Continuation, index: int, tokenizer: Tokenizer, *, as_json: bool) -> str:
    """A continuation as text or as a JSON line."""
    ids, prompt = result.ids, result.prompt.text
    finished = ids[-1] in tokenizer.ends
    text = tokenizer.decode(ids[:-1] if finished else ids)
    if as_json:
        record: dict[str, Any] = {} if prompt is None else {"prompt": prompt}
        record |= {"text": text, "length": len(ids), "finished": finished}
        if result.logprobs is not None:
            record |= {"tokens": [*result.prompt.ids, *ids], "logprobs": result.logprobs}
        return json.dumps(record, ensure_ascii=False) + "\n"
    if prompt is None:
        return f"Sample {index}: {text}\n\n"
    return f"Context: {prompt}\nGenerated: {text}\n\n"


if __name__ == "__main__":
    start_tool.run(partial(run_program, Options, run))
