"""Turn documents of any kind into Megatron's token files, <prefix>_<key>_document.bin and .idx, or
<prefix>_<key>_sentence.bin and .idx with --split-sentences.

The command line over `megatron_ds.preprocess.pipeline`: flags, progress and exit code.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from megatron_ds.cli import arguments, flags
from megatron_ds.cli.megatron_flags import REFUSED_VALUES
from megatron_ds.config import TOKENIZERS, TokenizerConfig
from megatron_ds.launch import environment, output
from megatron_ds.preprocess.input_flags import add_input_flags, inputs_of
from megatron_ds.preprocess.pipeline import PreprocessOptions, Progress, dropped, preprocess
from megatron_ds.preprocess.sentence_splitter import SPLITTERS, Splitter, choose_splitter
from megatron_ds.tokenizer import build_tokenizer
from megatron_ds.tokenizer.fast_backend import BACKENDS, select_backend

KINDS = {
    **{kind: kind for kind in TOKENIZERS},
    "HuggingFaceTokenizer": "HFTokenizer",
    "PretrainedFromHF": "HFTokenizer",
}
Report = Callable[[Progress], None]


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    data = parser.add_argument_group("input and output")
    add_input_flags(data)
    data.add_argument(
        "--json-keys",
        "--json-key",
        "--columns",
        nargs="+",
        default=["text"],
        metavar="KEY",
        help="keys or columns whose texts are taken, a.b for b inside of a; each makes files of "
        "its own (default: text)",
    )
    data.add_argument(
        "--output-prefix", required=True, help="beginning of the output files' names, with path"
    )
    data.add_argument(
        "--append-eod", action="store_true", help="end every document with the EOD token"
    )
    data.add_argument(
        "--strict",
        action="store_true",
        help="stop at a line that gives no document (default: leave it out, and list it in "
        "<prefix>.quarantine)",
    )
    data.add_argument(
        "--dataset-impl",
        default="mmap",
        type=_taken_elsewhere("data_impl"),
        choices=["mmap"],
        help="output format; the old lazy and cached formats are not written",
    )
    sentences = parser.add_argument_group("sentences, for models such as BERT and T5")
    sentences.add_argument(
        "--split-sentences",
        action="store_true",
        help="make a sequence of each sentence; the files are <prefix>_<key>_sentence.bin and .idx",
    )
    sentences.add_argument(
        "--keep-newlines",
        action="store_true",
        help="keep the space and the line breaks after a sentence as its end",
    )
    sentences.add_argument(
        "--lang", metavar="NAME", help="language, under nltk's name for it (default: english)"
    )
    sentences.add_argument(
        "--sentence-splitter",
        choices=SPLITTERS,
        default=SPLITTERS[0],
        help="nltk's punkt, or built-in rules; auto takes punkt if nltk and its model of the "
        "language are there (default: %(default)s)",
    )
    tokenizer = parser.add_argument_group("tokenizer")
    tokenizer.add_argument(
        "--tokenizer-type",
        required=True,
        type=_taken_elsewhere("tokenizer_type"),
        choices=list(KINDS),
        help="HuggingFaceTokenizer and PretrainedFromHF are other names of HFTokenizer",
    )
    tokenizer.add_argument(
        "--vocab-file",
        "--vocab",
        help="vocab.json of GPT2BPETokenizer, vocab.txt of the BertWordPiece kinds",
    )
    tokenizer.add_argument("--merge-file", help="merges.txt of GPT2BPETokenizer")
    tokenizer.add_argument(
        "--tokenizer-model",
        "--tokenizer-name-or-path",
        help="folder, tokenizer.json or name on the Hugging Face Hub of HFTokenizer; model file of "
        "the SentencePiece kinds, Llama2Tokenizer and TikTokenizer",
    )
    tokenizer.add_argument(
        "--vocab-size", type=int, help="number of ids of NullTokenizer or TikTokenizer"
    )
    tokenizer.add_argument(
        "--vocab-extra-ids",
        type=int,
        default=TokenizerConfig.vocab_extra_ids,
        help="sentinel tokens <extra_id_N> to add (BertWordPiece kinds, SentencePieceTokenizer)",
    )
    tokenizer.add_argument(
        "--trust-remote-code",
        action="store_true",
        help="run the Python code that an HFTokenizer's folder brings; never do so for strangers",
    )
    tokenizer.add_argument(
        "--tiktoken-pattern", choices=["v1", "v2"], help="how TikTokenizer cuts text into words"
    )
    tokenizer.add_argument(
        "--tiktoken-num-special-tokens",
        type=int,
        default=TokenizerConfig.tiktoken_num_special_tokens,
        help="ids of TikTokenizer before the tokens of its file (default: %(default)s)",
    )
    tokenizer.add_argument(
        "--tiktoken-special-tokens",
        "--tokenizer-special-tokens",
        nargs="+",
        metavar="TOKEN",
        help="names of the first of these ids (default: <unk> <s> </s>)",
    )
    tokenizer.add_argument(
        "--tokenizer-backend",
        choices=BACKENDS,
        default=BACKENDS[0],
        help="library that encodes for GPT2BPETokenizer and an HFTokenizer with a tokenizer.json: "
        "auto takes fastokens where it is installed and proves to give the ids of tokenizers; the "
        "ids are the same with any (default: %(default)s)",
    )
    work = parser.add_argument_group(
        "work", "The output is the same for any values. Texts without tokens are left out."
    )
    work.add_argument(
        "--workers",
        type=int,
        default=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1,
        help="processes that encode (default: as many as there are cores)",
    )
    work.add_argument(
        "--chunk-size",
        type=int,
        default=PreprocessOptions.chunk_size,
        help="documents that a worker gets at once (default: %(default)s)",
    )
    work.add_argument(
        "--resume",
        action="store_true",
        help="go on where an interrupted run with the same --output-prefix stopped; the output is "
        "that of a run without interruption. Inputs and settings must be the same (default: begin "
        "anew)",
    )
    work.add_argument(
        "--log-interval",
        type=int,
        default=1000,
        help="documents between progress lines when stderr is no terminal (default: %(default)s)",
    )
    args, rest = parser.parse_known_args([_dashed(argument) for argument in argv])
    said = arguments.scan(
        rest, among=flags.preprocess_flags(), also=list(parser._option_string_actions)
    )
    for line in said.warnings:
        print(f"WARNING: {line}", file=sys.stderr)
    if said.problems:
        parser.error("; ".join(said.problems))
    if not args.split_sentences:
        idle = [
            name
            for name, value in (
                ("--keep-newlines", args.keep_newlines),
                ("--lang", args.lang),
                ("--sentence-splitter", args.sentence_splitter != SPLITTERS[0]),
            )
            if value
        ]
        for name in idle:
            print(
                f"WARNING: {name} has no effect: only read with --split-sentences", file=sys.stderr
            )
    return args


def build_splitter(args: argparse.Namespace) -> tuple[Splitter | None, list[str]]:
    """What cuts documents into sentences, which a line on stderr says, and what is wrong."""
    if not args.split_sentences:
        return None, []
    try:
        lang = args.lang or "english"
        splitter = choose_splitter(lang, args.keep_newlines, args.sentence_splitter)
    except ValueError as error:
        return None, [str(error)]
    print(f"sentences are split by {splitter}", file=sys.stderr)
    return splitter, []


def _taken_elsewhere(field: str) -> Callable[[str], str]:
    """A value's type that refuses, in words, what other Megatrons take for the field."""

    def check(value: str) -> str:
        if value in REFUSED_VALUES[field]:
            raise argparse.ArgumentTypeError(
                f"{value} is not supported: {REFUSED_VALUES[field][value]}"
            )
        return value

    return check


def _dashed(argument: str) -> str:
    """`--json_keys` as `--json-keys`; values stay as they are."""
    if not argument.startswith("--"):
        return argument
    flag, equals, value = argument.partition("=")
    return flag.replace("_", "-") + equals + value


class LineReport:
    """A plain line every `interval` documents, for logs."""

    def __init__(self, interval: int) -> None:
        self._interval = max(1, interval)
        self._due = self._interval
        self._start = time.perf_counter()

    def __call__(self, progress: Progress) -> None:
        if progress.documents < self._due:
            return
        self._due = (progress.documents // self._interval + 1) * self._interval
        print(summary(progress, time.perf_counter() - self._start), file=sys.stderr, flush=True)


@contextmanager
def bar(total_bytes: int | None) -> Iterator[Report]:
    """A progress bar over the bytes of the input, for people at a terminal. None: not known."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        TaskProgressColumn,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )
    from rich.progress import Progress as Bar

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Bar(*columns, console=Console(stderr=True)) as shown:
        task = shown.add_task("tokenizing", total=total_bytes)

        def report(progress: Progress) -> None:
            shown.update(
                task,
                completed=progress.input_bytes,
                description=f"{progress.documents:,} documents",
            )

        yield report


@contextmanager
def progress_reporter(options: PreprocessOptions, log_interval: int) -> Iterator[Report]:
    """A bar at a terminal, lines elsewhere."""
    if not sys.stderr.isatty():
        yield LineReport(log_interval)
        return
    with bar(options.inputs.total_bytes()) as report:
        yield report


def summary(progress: Progress, seconds: float) -> str:
    """MB/s are those of the texts, without what surrounds them in their files; speeds are those of
    this run, without what an interrupted one had done."""
    seconds = max(seconds, 1e-9)
    before = progress.before or Progress()
    documents, size = progress.documents - before.documents, progress.text_bytes - before.text_bytes
    return (
        f"Processed {progress.documents} documents ({documents / seconds:.0f} docs/s, "
        f"{size / seconds / 1e6:.2f} MB/s)."
    )


def closing(
    progress: Progress, options: PreprocessOptions, seconds: float, library: str
) -> Iterator[str]:
    """What was done, what the time went to, and what was left out."""
    before = progress.before or Progress()
    if progress.seconds:
        yield summary(progress, seconds)
        if before.documents:
            yield f"{before.documents} of them before the interruption"
        tokens = (progress.tokens - before.tokens) / max(seconds, 1e-9)
        yield f"{progress.tokens} tokens ({tokens:.0f} tokens/s)"
        yield time_line(progress.seconds, seconds, library)
    else:  # nothing was left to do
        yield f"{progress.documents} documents, {progress.tokens} tokens"
    if progress.dropped:
        yield f"left out: {dropped(progress)}; listed in {options.quarantine}"
    for key in options.keys:
        yield f"{'wrote' if progress.seconds else 'in'} {options.prefix(key)}.bin and .idx"


def time_line(parts: Mapping[str, float], seconds: float, library: str) -> str:
    """What the time went to, by stage. library: that which encoded.

    What this process did, one after the other, adds up to `seconds`; what its workers did meanwhile
    is added up over them.
    """
    read, waited, wrote = (parts.get(stage, 0.0) for stage in ("reading", "waiting", "writing"))
    parsed, encoded = (parts.get(stage, 0.0) for stage in ("parsing", "encoding"))
    start = max(0.0, seconds - read - waited - wrote)
    split = f", cutting sentences {parts['splitting']:.2f} s" if "splitting" in parts else ""
    return (
        f"time: start {start:.2f} s, reading {read:.2f} s, waiting for workers {waited:.2f} s, "
        f"writing {wrote:.2f} s; all workers together: parsing {parsed:.2f} s{split}, encoding "
        f"by {library} {encoded:.2f} s"
    )


def notes(error: BaseException) -> list[str]:
    """What is left of the run that an error ended."""
    return list(getattr(error, "__notes__", []))


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


@output.plain_warnings()
def main(argv: Sequence[str]) -> int:
    args = parse(argv)
    splitter, wrong = build_splitter(args)
    options = PreprocessOptions(
        inputs=inputs_of(args),
        output_prefix=args.output_prefix,
        keys=tuple(args.json_keys),
        append_eod=args.append_eod,
        strict=args.strict,
        workers=args.workers,
        chunk_size=args.chunk_size,
        splitter=splitter,
        resume=args.resume,
    )
    config = TokenizerConfig(
        tokenizer_type=KINDS[args.tokenizer_type],
        vocab_file=args.vocab_file,
        merge_file=args.merge_file,
        tokenizer_model=args.tokenizer_model,
        trust_remote_code=args.trust_remote_code,
        vocab_extra_ids=args.vocab_extra_ids,
        tiktoken_pattern=args.tiktoken_pattern,
        tiktoken_num_special_tokens=args.tiktoken_num_special_tokens,
        tiktoken_special_tokens=args.tiktoken_special_tokens,
    )
    if not args.append_eod:
        print(
            "WARNING: without --append-eod nothing marks where a document ends: a model trained on "
            "these files takes neighbours for one text, and does not learn to stop",
            file=sys.stderr,
        )
    start = time.perf_counter()
    try:
        problems = [*options.problems(), *wrong, *config.problems(args.vocab_size)]
        if problems:
            raise ValueError("\n".join(problems))
        environment.limit_tokenizer_threads()  # the workers are the parallelism
        chosen = select_backend(build_tokenizer(config, args.vocab_size), args.tokenizer_backend)
        if chosen.reason:
            print(f"encoding is slower than it could be: {chosen.reason}", file=sys.stderr)
        with progress_reporter(options, args.log_interval) as report:
            done = preprocess(options, chosen.tokenizer, report, say)
    except (ValueError, OSError) as error:
        print(f"preprocess_data.py: error:\n{error}", *notes(error), sep="\n", file=sys.stderr)
        return 1
    except KeyboardInterrupt as error:
        print("interrupted;", *(notes(error) or ["nothing was written"]), file=sys.stderr)
        return 130
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a path may be no text
    with output.ignore_broken_pipe():
        print(*closing(done, options, time.perf_counter() - start, chosen.library), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
