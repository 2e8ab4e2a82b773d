"""Turn documents into Megatron's token files, <prefix>_<key>_document.bin and .idx, or
<prefix>_<key>_sentence.bin and .idx with --split-sentences.

The command line of `megatron_ds.preprocess.pipeline`.
"""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar

from megatron_ds import cli
from megatron_ds.config import TokenizerConfig
from megatron_ds.config.fields import missing_problem, option_field, option_group, when
from megatron_ds.launch import environment, output
from megatron_ds.preprocess.input_flags import InputOptions
from megatron_ds.preprocess.options import PreprocessOptions
from megatron_ds.preprocess.pipeline import Progress, describe_rejects, preprocess
from megatron_ds.preprocess.sentence_splitter import SPLITTERS, Splitter, choose_splitter
from megatron_ds.tokenizer import build_tokenizer
from megatron_ds.tokenizer.fast_backend import BACKENDS, select_backend

Report = Callable[[Progress], None]


@dataclass(frozen=True)
class SentenceOptions:
    """Sentences, for models such as BERT and T5."""

    split_sentences: bool = option_field(
        False,
        "make a sequence of each sentence; the files are <prefix>_<key>_sentence.bin and .idx",
    )
    keep_newlines: bool = option_field(
        False,
        "keep the space and the line breaks after a sentence as part of it",
        only_with=when(split_sentences=True),
    )
    lang: str = option_field(
        "english", "language, by nltk's name", metavar="NAME", only_with=when(split_sentences=True)
    )
    sentence_splitter: str = option_field(
        SPLITTERS[0],
        "nltk's punkt, which needs nltk's model of the language, or built-in rules",
        choices=SPLITTERS,
        only_with=when(split_sentences=True),
    )

    def splitter(self) -> Splitter | None:
        """Raises UserError: If the splitter is not installed or does not know the language."""
        if not self.split_sentences:
            return None
        return choose_splitter(self.lang, self.keep_newlines, self.sentence_splitter)


@dataclass(frozen=True)
class Options:
    """Turns documents into Megatron's token files, <prefix>_<key>_document.bin and .idx.

    The output does not depend on --workers, --chunk-size and --tokenizer-backend. Texts without
    tokens are left out.
    """

    PROGRAM: ClassVar[str] = "preprocess_data.py"

    json_keys: tuple[str, ...] = option_field(
        ("text",),
        "keys or columns of the texts, a.b for b inside of a; each has files of its own",
        nargs="*",
        aliases=("json-key", "columns"),
        metavar="KEY",
    )
    output_prefix: str = option_field(
        "", "path and start of the output files' names", metavar="PREFIX", required=True
    )
    append_eod: bool = option_field(False, "end every document with the EOD token")
    fail_on_bad_document: bool = option_field(
        False,
        "stop at a line without a document (default: leave it out and list it in "
        "<prefix>.quarantine)",
    )
    workers: int = option_field(
        environment.available_cores(), "encoding processes (default: one per core)", minimum=1
    )
    chunk_size: int = option_field(
        PreprocessOptions.chunk_size, "documents that a worker receives at once", minimum=1
    )
    resume: bool = option_field(
        False,
        "continue an interrupted run with the same --output-prefix; the output is that of an "
        "uninterrupted run. Inputs and settings must be the same (default: start over)",
    )
    log_interval: int = option_field(
        1000, "documents between progress lines if stderr is not a terminal", minimum=1
    )
    dataset_impl: str = option_field(
        "mmap", "output format; the old formats lazy and cached are not written", choices=("mmap",)
    )
    vocab_size: int | None = option_field(
        None, "number of ids of NullTokenizer or TikTokenizer", minimum=1
    )
    tokenizer_backend: str = option_field(
        BACKENDS[0],
        "library that encodes for GPT2BPETokenizer and an HFTokenizer with a tokenizer.json: auto "
        "takes fastokens if it is installed and gives the ids of tokenizers",
        choices=BACKENDS,
    )
    inputs: InputOptions = option_group(InputOptions())
    sentences: SentenceOptions = option_group(SentenceOptions())
    tokenizer: TokenizerConfig = option_group(
        TokenizerConfig(), flags={"vocab_file": ("vocab-file", "vocab")}
    )
    given: frozenset[str] = frozenset()

    def problems(self) -> Iterator[str]:
        splitter = None
        try:
            splitter = self.sentences.splitter()
        except ValueError as error:
            yield from getattr(error, "problems", [str(error)])
        yield from self.settings(splitter).problems()
        if "tokenizer_type" in self.given:
            yield from self.tokenizer.problems(self.vocab_size)
        else:
            yield missing_problem("tokenizer_type")

    def settings(self, splitter: Splitter | None) -> PreprocessOptions:
        return PreprocessOptions(
            inputs=self.inputs,
            output_prefix=self.output_prefix,
            keys=self.json_keys,
            append_eod=self.append_eod,
            strict=self.fail_on_bad_document,
            workers=self.workers,
            chunk_size=self.chunk_size,
            splitter=splitter,
            resume=self.resume,
        )


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
        yield f"left out: {describe_rejects(progress)}; listed in {options.quarantine}"
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


def work(options: Options) -> None:
    start = time.perf_counter()
    splitter = options.sentences.splitter()
    if splitter is not None:
        log(f"sentences are split by {splitter}")
    if not options.append_eod:
        log(
            "WARNING: without --append-eod nothing marks the end of a document: a model trained on "
            "these files reads neighbors as one text, and does not learn to stop"
        )
    environment.limit_tokenizer_threads()  # the workers are the parallelism
    tokenizer = build_tokenizer(options.tokenizer, options.vocab_size)
    backend = select_backend(tokenizer, options.tokenizer_backend)
    if backend.reason:
        log(f"encoding is slower than it could be: {backend.reason}")
    settings = options.settings(splitter)
    with progress_reporter(settings, options.log_interval) as report:
        done = preprocess(settings, backend.tokenizer, report, log)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a path may not be text
    with output.ignore_broken_pipe():
        print(*closing(done, settings, time.perf_counter() - start, backend.library), sep="\n")


def log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main(argv: Sequence[str]) -> int:
    return cli.run(Options, work, argv, invalid=1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
