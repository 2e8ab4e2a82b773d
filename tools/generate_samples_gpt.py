#!/usr/bin/env python
"""Continue prompts with a trained GPT, or let it write from nothing.

The command line over `megatron_ds.inference`: flags, prompts, output. Runs with python, and on
several processes (torchrun, deepspeed), which then share the model by tensor parallelism; the first
reads and prints.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TextIO

from megatron_ds.config import ModelConfig, file_problems
from megatron_ds.inference import cli
from megatron_ds.inference.cli import (
    TrainingFlags,
    add_flag,
    add_model_flags,
    add_sampling_flags,
    broadcast_from_rank0,
    fail,
    requested_dtype,
    say,
)
from megatron_ds.inference.sampling_params import SamplingParams
from megatron_ds.launch import distributed, environment, output

if TYPE_CHECKING:
    from megatron_ds.tokenizer import Tokenizer

NAME = Path(__file__).name
DEFAULT_NEW_TOKENS = 1024
EPILOG = """
Also read are pretrain_gpt.py's flags of the tokenizer (--tokenizer-type, --vocab-file,
--merge-file, --tokenizer-model), which then stand in for those of the training, and of the model,
which must agree with the checkpoint. Its other flags have no effect.
Without --prompt, --sample-input-file and --num-samples prompts are read from the terminal, until
the end of the input or the prompt "stop".
"""


@dataclass(frozen=True)
class Prompt:
    """What is to be continued. text: None for a sample from nothing."""

    text: str | None
    ids: list[int]


class Limits(NamedTuple):
    """How long a text may become; see `generate`."""

    max_new_tokens: int
    max_length: int | None


@dataclass(frozen=True)
class Request:
    """A checked command line."""

    args: argparse.Namespace
    sampling: SamplingParams
    training: TrainingFlags

    @property
    def max_new_tokens(self) -> int:
        return int(self.args.out_seq_length or DEFAULT_NEW_TOKENS)

    def max_length(self, model: ModelConfig) -> int | None:
        """Where a sequence ends, unless --out-seq-length says how much is wanted."""
        return model.sequence if self.args.out_seq_length is None else None

    @property
    def is_interactive(self) -> bool:
        return not (self.args.prompt or self.args.sample_input_file or self.args.num_samples)

    @property
    def precision(self) -> str | None:
        return requested_dtype(self.args)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=NAME, description=__doc__, epilog=EPILOG, allow_abbrev=False, exit_on_error=False
    )

    model = parser.add_argument_group("model")
    add_model_flags(model)
    add_flag(
        model,
        "recompute",
        action="store_true",
        help="keep no keys and values: compute the whole text anew for each token",
    )
    prompts = parser.add_argument_group("prompts and output")
    add_flag(
        prompts,
        "prompt",
        "prompts",
        nargs="+",
        action="extend",
        metavar="TEXT",
        help="prompts; can be given often",
    )
    add_flag(prompts, "sample-input-file", metavar="FILE", help="text file with a prompt per line")
    add_flag(
        prompts,
        "sample-output-file",
        metavar="FILE",
        help="where prompts and continuations go (default: the terminal, or SAMPLE_INPUT_FILE.out)",
    )
    add_flag(
        prompts,
        "num-samples",
        type=int,
        default=0,
        metavar="N",
        help="this many samples from nothing (they start with the end-of-document token)",
    )
    add_flag(
        prompts,
        "genfile",
        metavar="FILE",
        help="JSON lines for --num-samples: text, length in tokens, finished (default: the "
        "terminal)",
    )
    add_flag(
        prompts,
        "out-seq-length",
        "tokens-to-generate",
        type=int,
        metavar="N",
        help=f"new tokens per prompt (default: up to {DEFAULT_NEW_TOKENS}, within the training's "
        "sequence length; with rope, alibi or no positions N may lead beyond it)",
    )
    add_flag(
        prompts,
        "micro-batch-size",
        type=int,
        default=8,
        metavar="N",
        help="prompts that are continued together (default: %(default)s); the text does not "
        "depend on it",
    )
    sampling = parser.add_argument_group("sampling")
    default = SamplingParams()
    add_flag(sampling, "greedy", action="store_true", help="take the most probable token")
    add_sampling_flags(sampling, default)
    add_flag(
        sampling,
        "seed",
        type=int,
        default=default.seed,
        metavar="N",
        help="decides all samples (default: %(default)s)",
    )
    return parser


def parse(argv: Sequence[str]) -> tuple[Request | None, list[str]]:
    """The command line and every problem that can be seen without the checkpoint."""
    parser = build_parser()
    try:
        args, rest = parser.parse_known_args(list(argv))
    except argparse.ArgumentError as error:
        return None, [str(error)]
    training, problems = cli.read(rest, vars(args))
    sampling = SamplingParams(args.greedy, args.temperature, args.top_k, args.top_p, args.seed)
    problems += [*sampling.problems(), *_problems(args)]
    return Request(args, sampling, training), problems


def _problems(args: argparse.Namespace) -> Iterator[str]:
    yield from cli.model_problems(args)
    if sum(map(bool, (args.prompt, args.sample_input_file, args.num_samples))) > 1:
        yield "--prompt, --sample-input-file and --num-samples exclude each other"
    if args.sample_input_file is not None:
        yield from file_problems("--sample-input-file", args.sample_input_file)
    if args.genfile is not None and not args.num_samples:
        yield "--genfile takes the samples of --num-samples, which is missing"
    if args.sample_output_file is not None and args.num_samples:
        yield "--sample-output-file takes continued prompts; --num-samples has --genfile"
    for flag, path in (
        ("--genfile", args.genfile),
        ("--sample-output-file", args.sample_output_file),
    ):
        if path is not None and not Path(path).parent.is_dir():
            yield f"{flag} {path}: there is no folder {Path(path).parent}"
    if args.num_samples < 0:
        yield f"--num-samples {args.num_samples}: must not be negative"
    for flag, value in (
        ("--out-seq-length", args.out_seq_length),
        ("--micro-batch-size", args.micro_batch_size),
    ):
        if value is not None and value < 1:
            yield f"{flag} {value}: must be positive"


def run(request: Request) -> None:
    """Loads and generates. Raises ValueError for what does not fit the checkpoint."""
    from megatron_ds.inference import load_checkpoint
    from megatron_ds.inference.generate import generate, prompt_problems
    from megatron_ds.parallel.mesh import Mesh

    found = load_checkpoint.find_checkpoint(Path(request.args.load), say)
    config = load_checkpoint.model_config(found)
    tokenizer = cli.tokenizer_for(request.training, found, NAME)
    limits = Limits(request.max_new_tokens, request.max_length(config))

    def problems_with(prompts: Sequence[Prompt]) -> list[str]:
        return list(prompt_problems(config, [prompt.ids for prompt in prompts], *limits))

    batches: Iterator[list[Prompt]] = iter(())
    if environment.rank() == 0:
        batches = batches_of(request, tokenizer, problems_with)
    with contextlib.redirect_stdout(sys.stderr):  # DeepSpeed prints which ops it loads
        here = distributed.init_distributed(
            request.training.runtime_config(endless=request.is_interactive)
        )
    try:
        mesh = Mesh.build(here.world_size)
        # A training may save while we start: all ranks take what the first one found.
        found = broadcast_from_rank0(found)
        say(f"loading the checkpoint {found.path}")
        model = load_checkpoint.load_model(found, mesh, here.device, precision=request.precision)
        done = 0
        with Output(request.args, tokenizer) as output:
            while batch := broadcast_from_rank0(next(batches, None)):
                continuations = generate(
                    model,
                    [prompt.ids for prompt in batch],
                    max_new_tokens=limits.max_new_tokens,
                    max_length=limits.max_length,
                    sampling=request.sampling,
                    eod=tokenizer.eod,
                    first_index=done,
                    cache=not request.args.recompute,
                )
                done += len(batch)
                if here.is_first:
                    output.write(batch, continuations)
    finally:
        distributed.destroy_process_group()


def batches_of(
    request: Request, tokenizer: Tokenizer, problems_with: Callable[[Sequence[Prompt]], list[str]]
) -> Iterator[list[Prompt]]:
    """The prompts in batches. What was given beforehand is checked at once, and a problem ends the
    program; what is typed is checked when it comes."""
    args = request.args
    if request.is_interactive:
        return _typed(tokenizer, problems_with)
    if args.num_samples:
        prompts = [Prompt(None, [tokenizer.eod])] * args.num_samples
    else:
        texts = args.prompt or Path(args.sample_input_file).read_text("utf-8").splitlines()
        prompts = [_encode(text, tokenizer) for text in texts]
    problems = problems_with(prompts)
    if problems:
        fail(NAME, problems)
    size = args.micro_batch_size
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
            say("\n".join(problems))
        else:
            yield [prompt]


def _encode(text: str, tokenizer: Tokenizer) -> Prompt:
    """A prompt without tokens starts, like a document, after the end of another."""
    return Prompt(text, tokenizer.encode(text) or [tokenizer.eod])


class Output:
    """Where the text goes, on the first rank."""

    def __init__(self, args: argparse.Namespace, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._as_json = args.genfile is not None
        self._path = args.genfile or args.sample_output_file
        if self._path is None and args.sample_input_file is not None:
            self._path = f"{args.sample_input_file}.out"
        self._stack = contextlib.ExitStack()
        self._file: TextIO = sys.stdout
        self._count = 0

    def __enter__(self) -> Output:
        if self._path is not None and environment.rank() == 0:
            self._file = self._stack.enter_context(open(self._path, "w", encoding="utf-8"))
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()
        if self._path is not None:
            say(f"wrote {self._count} texts to {self._path}")

    def write(self, prompts: Sequence[Prompt], continuations: Sequence[list[int]]) -> None:
        for prompt, ids in zip(prompts, continuations, strict=True):
            finished = ids[-1] == self._tokenizer.eod
            text = self._tokenizer.decode(ids[:-1] if finished else ids)
            self._count += 1
            self._file.write(self._line(prompt, text, len(ids), finished))
        self._file.flush()

    def _line(self, prompt: Prompt, text: str, length: int, finished: bool) -> str:
        if self._as_json:
            record = {"text": text, "length": length, "finished": finished}
            return json.dumps(record, ensure_ascii=False) + "\n"
        if prompt.text is None:
            return f"Sample {self._count}: {text}\n\n"
        return f"Context: {prompt.text}\nGenerated: {text}\n\n"


def main(argv: Sequence[str]) -> None:
    request, problems = parse(argv)
    if problems or request is None:
        fail(NAME, problems)
    environment.prepare_environment()
    with output.exit_on_user_error():
        run(request)


if __name__ == "__main__":
    main(sys.argv[1:])
