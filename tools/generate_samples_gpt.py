#!/usr/bin/env python
"""Continue prompts with a trained GPT, or sample texts without a prompt.

The command line of `megatron_ds.inference`: options, prompts, output. Runs with python, or as
several processes (torchrun, deepspeed), which share the model by tensor parallelism; the first one
reads and prints.
"""

from __future__ import annotations

import collections
import contextlib
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_ds import cli
from megatron_ds.cli.command import table_of
from megatron_ds.config import ModelConfig
from megatron_ds.config.checks import file_problems
from megatron_ds.config.fields import option_field, option_group
from megatron_ds.config.problems import Problem, option
from megatron_ds.inference.cli import (
    GenerationOptions,
    broadcast_from_rank0,
    loaded_model,
    log_rank0,
    open_checkpoint,
)
from megatron_ds.inference.sampling_params import SamplingParams
from megatron_ds.launch import environment, output

if TYPE_CHECKING:
    from megatron_ds.inference.generate import GenerationConfig
    from megatron_ds.tokenizer import Tokenizer

DEFAULT_NEW_TOKENS = 1024


@dataclass(frozen=True)
class Prompt:
    """A text to continue; None for a sample without a prompt."""

    text: str | None
    ids: list[int]


@dataclass(frozen=True)
class Options(GenerationOptions):
    """Continues prompts with a trained GPT, or samples texts without a prompt.

    Without --prompt, --sample-input-file and --num-samples, prompts are read from the terminal,
    until the end of the input or the prompt "stop".

    Flags of pretrain_gpt.py are accepted, too: those of the tokenizer (--tokenizer-type,
    --vocab-file, --merge-file, --tokenizer-model) override the checkpoint's, those of the model
    must agree with the checkpoint, the others have no effect.
    """

    prompt: tuple[str, ...] = option_field(
        (), "prompts; repeatable", nargs="*", aliases=("prompts",), repeatable=True
    )
    sample_input_file: str | None = option_field(
        None, "text file with one prompt per line", metavar="FILE"
    )
    sample_output_file: str | None = option_field(
        None,
        "output file for prompts and continuations (default: the terminal, or "
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
        "output file for --num-samples: JSON lines with text, length in tokens, finished "
        "(default: the terminal)",
        metavar="FILE",
    )
    out_seq_length: int | None = option_field(
        None,
        f"new tokens per prompt (default: up to {DEFAULT_NEW_TOKENS}, within the training's "
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

    def generation_config(self, model: ModelConfig, eod: int) -> GenerationConfig:
        """How prompts are continued: up to the training's length without --out-seq-length."""
        from megatron_ds.inference.generate import GenerationConfig

        max_length = model.seq_length if self.out_seq_length is None else None
        new_tokens = self.out_seq_length or DEFAULT_NEW_TOKENS
        return GenerationConfig(new_tokens, self.sampling, eod, max_length, use_cache=self.kv_cache)

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
        if self.genfile is not None and not self.num_samples:
            yield Problem("genfile-without-samples")
        if self.sample_output_file is not None and self.num_samples:
            yield Problem("output-file-of-samples")
        for name in ("genfile", "sample_output_file"):
            path = getattr(self, name)
            if path is not None and not Path(path).parent.is_dir():
                yield Problem("samples-folder-missing", name, flag=option(name), path=path)


def run(options: Options) -> None:
    """Load the model and generate.

    Raises:
        UserError: If options and checkpoint do not fit.
    """
    from megatron_ds.inference.generate import generate, prompt_problems

    found, model_config, tokenizer = open_checkpoint(options)
    config = options.generation_config(model_config, tokenizer.eod)

    def problems_with(prompts: Sequence[Prompt]) -> list[str]:
        return list(prompt_problems(model_config, [prompt.ids for prompt in prompts], config))

    batches: Iterator[list[Prompt]] = iter(())
    if environment.rank() == 0:
        batches = batches_of(options, tokenizer, problems_with)
    with loaded_model(options, found, endless=options.is_interactive) as model:

        def results() -> Iterator[tuple[Prompt, list[int]]]:
            done = 0
            while batch := broadcast_from_rank0(next(batches, None)):
                ids = [prompt.ids for prompt in batch]
                yield from zip(batch, generate(model, ids, config, first_index=done), strict=True)
                done += len(batch)

        if environment.rank() == 0:
            write_texts(options, tokenizer, results())
        else:
            collections.deque(results(), maxlen=0)


def batches_of(
    options: Options, tokenizer: Tokenizer, problems_with: Callable[[Sequence[Prompt]], list[str]]
) -> Iterator[list[Prompt]]:
    """The prompts in batches. Prompts on the command line are checked immediately, and a problem
    ends the program; typed prompts are checked when they are read."""
    if options.is_interactive:
        return _typed(tokenizer, problems_with)
    if options.num_samples:
        prompts = [Prompt(None, [tokenizer.eod])] * options.num_samples
    else:
        texts = options.prompt
        if options.sample_input_file is not None:
            texts = tuple(Path(options.sample_input_file).read_text("utf-8").splitlines())
        prompts = [_encode(text, tokenizer) for text in texts]
    if problems := problems_with(prompts):
        cli.fail(problems, table_of(Options), rank=environment.rank())
    size = options.micro_batch_size
    return iter([prompts[start : start + size] for start in range(0, len(prompts), size)])


def _typed(
    tokenizer: Tokenizer, problems_with: Callable[[Sequence[Prompt]], list[str]]
) -> Iterator[list[Prompt]]:
    at_terminal = sys.stdin.isatty()
    while True:
        if at_terminal:
            print("Context prompt >>> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        text = line.rstrip("\n")
        if not line or text == "stop":
            return
        try:
            prompt = _encode(text, tokenizer)
            problems = problems_with([prompt])
        except ValueError as error:
            problems = [str(error)]
        if problems:
            log_rank0("\n".join(problems))
        else:
            yield [prompt]


def _encode(text: str, tokenizer: Tokenizer) -> Prompt:
    """The prompt of a text. One without tokens starts like a document, after the end of another."""
    return Prompt(text, tokenizer.encode(text) or [tokenizer.eod])


def write_texts(
    options: Options, tokenizer: Tokenizer, results: Iterable[tuple[Prompt, list[int]]]
) -> None:
    """Writes each prompt's text, from the new tokens, as soon as it is generated."""
    path = options.genfile or options.sample_output_file
    if path is None and options.sample_input_file is not None:
        path = f"{options.sample_input_file}.out"
    count = 0
    with contextlib.ExitStack() as stack:
        file = sys.stdout
        if path is not None:
            file = stack.enter_context(open(path, "w", encoding="utf-8"))
            stack.callback(lambda: log_rank0(f"wrote {count} texts to {path}"))
        for count, (prompt, ids) in enumerate(results, start=1):
            finished = ids[-1] == tokenizer.eod
            text = tokenizer.decode(ids[:-1] if finished else ids)
            if options.genfile is not None:
                record = {"text": text, "length": len(ids), "finished": finished}
                file.write(json.dumps(record, ensure_ascii=False) + "\n")
            elif prompt.text is None:
                file.write(f"Sample {count}: {text}\n\n")
            else:
                file.write(f"Context: {prompt.text}\nGenerated: {text}\n\n")
            file.flush()


def main(argv: Sequence[str]) -> None:
    options = cli.parse(Options, argv, rank=environment.rank())
    environment.prepare_environment()
    with output.exit_on_user_error():
        run(options)


if __name__ == "__main__":
    main(sys.argv[1:])
