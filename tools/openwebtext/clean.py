"""Clean documents of any kind: fix Unicode, filter, drop duplicates, take task texts out.

The command line over `megatron_ds.cleaning`: flags, progress and exit code.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from megatron_ds.cleaning.decontamination import HANDLINGS, TaskOptions
from megatron_ds.cleaning.deduplication import UNITS, NearOptions
from megatron_ds.cleaning.options import STAGES, CleaningOptions
from megatron_ds.cleaning.pipeline import Progress, clean
from megatron_ds.cleaning.stats import Counts
from megatron_ds.config import TOKENIZERS, TokenizerConfig
from megatron_ds.config.problems import UserError, default_flag
from megatron_ds.fileio.resumable import WORK_SUFFIX
from megatron_ds.launch import environment
from megatron_ds.preprocess.input_flags import add_input_flags, inputs_of

NONE = "none"
Report = Callable[[Progress], None]


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    _add_data(parser)
    _add_filters(parser)
    _add_duplicates(parser)
    _add_tasks(parser)
    work = parser.add_argument_group("work", "The output is the same for any values.")
    work.add_argument(
        "--workers",
        type=int,
        default=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1,
        help="processes that work (default: as many as there are cores)",
    )
    work.add_argument(
        "--log-interval",
        type=int,
        default=10_000,
        help="documents between progress lines when stderr is no terminal (default: %(default)s)",
    )
    return parser


def _add_data(parser: argparse.ArgumentParser) -> None:
    data = parser.add_argument_group("input and output")
    add_input_flags(data)
    data.add_argument(
        "--json-key",
        default=CleaningOptions.key,
        metavar="KEY",
        help="key or column of the text, a.b for b inside of a (default: %(default)s)",
    )
    data.add_argument(
        "--output",
        required=True,
        metavar="FILE",
        help="JSON lines with all fields of the documents, in their order; .gz .xz .bz2 by name",
    )
    data.add_argument(
        "--stages",
        nargs="+",
        metavar="STAGE",
        help=f"what is done, in this order: {' '.join(STAGES)}, or {NONE} (default: all, url and "
        "decontaminate if they have their files)",
    )
    data.add_argument(
        "--dropped", metavar="FILE", help="write what a stage dropped here, with stage and reason"
    )
    data.add_argument(
        "--report",
        metavar="FILE",
        help="draw what became of the documents: a .png, and a .json of its numbers beside it; or "
        "the .json alone",
    )
    data.add_argument(
        "--resume",
        action="store_true",
        help=f"continue an interrupted run, whose work is in OUTPUT{WORK_SUFFIX}; the output is "
        "the same, byte for byte",
    )


def _add_filters(parser: argparse.ArgumentParser) -> None:
    url = parser.add_argument_group("stage url")
    url.add_argument(
        "--url-blacklist",
        nargs="+",
        default=[],
        metavar="FILE",
        help="files with a host (example.com), a name (reddit), an end of a file's name (.pdf) or "
        "a regex:PATTERN per line",
    )
    url.add_argument(
        "--url-key",
        default=CleaningOptions.url_key,
        metavar="KEY",
        help="key or column of the address; documents without one go on (default: %(default)s)",
    )
    length = parser.add_argument_group("stage length")
    for unit, default in (
        ("chars", CleaningOptions.min_chars),
        ("words", CleaningOptions.min_words),
        ("tokens", CleaningOptions.min_tokens),
    ):
        length.add_argument(
            f"--min-{unit}",
            type=int,
            default=default,
            metavar="N",
            help=f"drop documents with fewer {unit} (default: %(default)s)",
        )
    length.add_argument(
        "--tokenizer-type", choices=TOKENIZERS, help="what --min-tokens counts with"
    )
    length.add_argument("--vocab-file", help="vocab.json or vocab.txt of the tokenizer")
    length.add_argument("--merge-file", help="merges.txt of GPT2BPETokenizer")
    length.add_argument(
        "--tokenizer-model", help="folder, file or name of the tokenizers of one file"
    )
    language = parser.add_argument_group("stage language")
    language.add_argument(
        "--languages",
        nargs="+",
        default=list(CleaningOptions.languages),
        metavar="CODE",
        help="keep documents of these languages, ISO 639 (default: en)",
    )
    language.add_argument(
        "--min-language-score",
        type=float,
        default=CleaningOptions.min_language_score,
        metavar="P",
        help="drop documents whose language is less probable, 0 to 1 (default: %(default)s)",
    )


def _add_duplicates(parser: argparse.ArgumentParser) -> None:
    near = parser.add_argument_group("stage near")
    near.add_argument(
        "--near-duplicate-threshold",
        type=float,
        default=NearOptions.threshold,
        metavar="J",
        help="drop documents whose runs of words are those of an earlier one to this share, "
        "0 to 1: the Jaccard similarity as MinHash estimates it (default: %(default)s)",
    )
    near.add_argument(
        "--num-perm",
        type=int,
        default=NearOptions.num_perm,
        metavar="N",
        help="values of a signature: more are more exact, and need more memory "
        "(default: %(default)s)",
    )
    near.add_argument(
        "--near-ngram-size",
        type=int,
        default=NearOptions.ngram,
        metavar="N",
        help="words, or characters, of a run (default: %(default)s)",
    )
    near.add_argument(
        "--near-ngram-unit",
        choices=UNITS,
        default=NearOptions.unit,
        help="take characters for text without spaces between its words (default: %(default)s)",
    )
    near.add_argument(
        "--seed",
        type=int,
        default=NearOptions.seed,
        help="of the hash functions (default: %(default)s)",
    )


def _add_tasks(parser: argparse.ArgumentParser) -> None:
    tasks = parser.add_argument_group("stage decontaminate")
    tasks.add_argument(
        "--task-files",
        nargs="+",
        default=[],
        metavar="FILE",
        help="texts of evaluation tasks: JSON lines, tables, or plain text, a task per block "
        "between blank lines",
    )
    tasks.add_argument(
        "--task-keys",
        nargs="+",
        default=[],
        metavar="KEY",
        help="keys or columns of the task files' texts (default: all texts in them)",
    )
    tasks.add_argument(
        "--ngram-size",
        type=int,
        default=TaskOptions.ngram,
        metavar="N",
        help="words in a row that no document may share with a task (default: %(default)s)",
    )
    tasks.add_argument(
        "--min-ngram-size",
        type=int,
        default=TaskOptions.min_ngram,
        metavar="N",
        help="shorter task texts count as a whole, from so many words on (default: %(default)s)",
    )
    tasks.add_argument(
        "--contaminated",
        choices=HANDLINGS,
        default=TaskOptions.handling,
        help="cut matches out, which may make several documents of one, or drop the document "
        "(default: %(default)s)",
    )
    tasks.add_argument(
        "--cut-margin",
        type=int,
        default=TaskOptions.margin,
        metavar="N",
        help="characters that go with a match on each side, and what their sentences have more "
        "(default: %(default)s)",
    )
    tasks.add_argument(
        "--min-piece-chars",
        type=int,
        default=TaskOptions.min_piece,
        metavar="N",
        help="shorter pieces are dropped (default: %(default)s)",
    )
    tasks.add_argument(
        "--max-pieces",
        type=int,
        default=TaskOptions.max_pieces,
        metavar="N",
        help="a document that falls into more is dropped (default: %(default)s)",
    )


def options_from_args(args: argparse.Namespace) -> CleaningOptions:
    tokenizer = None
    if args.tokenizer_type is not None:
        tokenizer = TokenizerConfig(
            tokenizer_type=args.tokenizer_type,
            vocab_file=args.vocab_file,
            merge_file=args.merge_file,
            tokenizer_model=args.tokenizer_model,
        )
    stages = None
    if args.stages is not None:
        named = [name for word in args.stages for name in word.split(",") if name]
        stages = () if named == [NONE] else tuple(named)
    return CleaningOptions(
        inputs=inputs_of(args),
        output=args.output,
        stages=stages,
        key=args.json_key,
        url_key=args.url_key,
        dropped=args.dropped,
        report=args.report,
        resume=args.resume,
        languages=tuple(args.languages),
        min_language_score=args.min_language_score,
        min_chars=args.min_chars,
        min_words=args.min_words,
        min_tokens=args.min_tokens,
        tokenizer=tokenizer,
        url_lists=tuple(args.url_blacklist),
        near=NearOptions(
            threshold=args.near_duplicate_threshold,
            num_perm=args.num_perm,
            ngram=args.near_ngram_size,
            unit=args.near_ngram_unit,
            seed=args.seed,
        ),
        tasks=TaskOptions(
            files=tuple(args.task_files),
            keys=tuple(args.task_keys),
            ngram=args.ngram_size,
            min_ngram=args.min_ngram_size,
            handling=args.contaminated,
            margin=args.cut_margin,
            min_piece=args.min_piece_chars,
            max_pieces=args.max_pieces,
        ),
        workers=args.workers,
    )


@contextmanager
def progress_reporter(total_bytes: int | None, log_interval: int) -> Iterator[Report]:
    """A bar at a terminal, lines elsewhere. total_bytes: of the input; None: not known."""
    if not sys.stderr.isatty():
        yield _lines(log_interval)
        return
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
        task = shown.add_task("cleaning", total=total_bytes)

        def report(progress: Progress) -> None:
            shown.update(task, completed=progress.input_bytes, description=_so_far(progress.counts))

        yield report


def _lines(interval: int) -> Report:
    """A plain line every `interval` documents, for logs."""
    said = 0

    def report(progress: Progress) -> None:
        nonlocal said
        documents = progress.counts.before.documents
        if documents // max(1, interval) > said:
            said = documents // max(1, interval)
            print(_so_far(progress.counts), file=sys.stderr, flush=True)

    return report


def _so_far(counts: Counts) -> str:
    return f"{counts.after.documents:,} of {counts.before.documents:,} documents kept"


def closing(counts: Counts, options: CleaningOptions, seconds: float) -> Iterator[str]:
    """What was done, stage by stage, and what was dropped."""
    before, after = counts.before, counts.after
    yield (
        f"kept {after.documents:,} of {before.documents:,} documents, {after.characters:,} of "
        f"{before.characters:,} characters, in {seconds:.1f} s "
        f"({before.characters / max(seconds, 1e-9) / 1e6:.2f} million characters/s)"
    )
    if counts.bad:
        listed = ", ".join(f"{count:,} {reason}" for reason, count in sorted(counts.bad.items()))
        yield f"no documents: {listed}; listed in {options.quarantine}"
    for name, stage in counts.stages.items():
        said = f"{name}: {stage.entered:,} in, {stage.left:,} out"
        if stage.changed:
            said += f", {stage.changed:,} changed"
        if stage.added > 0:
            said += f", {stage.added:,} more by cutting"
        ranked = sorted(stage.dropped.items(), key=lambda pair: (-pair[1], pair[0]))
        if ranked:
            said += "; dropped " + ", ".join(f"{count:,} {reason}" for reason, count in ranked)
        yield said
    if counts.without_url:
        yield f"{counts.without_url:,} documents have no {options.url_key!r} to judge"
    files = [options.output, options.dropped, options.report_picture, options.report_numbers]
    yield "wrote " + ", ".join(file for file in files if file is not None)


FLAGS = {"paths": "--input", "format": "--input-format", "json_keys": "--json-key"}


def render_error(error: BaseException) -> str:
    """The message of an error, with the flags of this tool and the codes of its problems."""
    if not isinstance(error, UserError):
        return str(error)
    return "\n".join(
        problem.render(lambda field: FLAGS.get(field, default_flag(field)))
        for problem in error.problems
    )


def exit_code_for(error: BaseException, name: str, output: str) -> int:
    """Says what ended a run, and how it can go on; the exit status."""
    folder = output + WORK_SUFFIX
    there = os.path.isdir(folder)
    if isinstance(error, KeyboardInterrupt):
        goes_on = f"; --resume goes on from {folder}" if there else ""
        print(f"interrupted{goes_on}", file=sys.stderr)
        return 130
    print(f"{name}: error:\n{render_error(error)}", file=sys.stderr)
    if isinstance(error, OSError) and there:
        print(*getattr(error, "__notes__", []), sep="\n", file=sys.stderr)
    return 1


def main(argv: Sequence[str], name: str = "clean.py") -> int:
    """name: of the tool, for messages."""
    args = build_parser().parse_args(argv)
    options = options_from_args(args)
    start = time.perf_counter()
    environment.limit_tokenizer_threads()  # the workers are the parallelism
    try:
        total = None if any(options.inputs.problems()) else options.inputs.total_bytes()
        with progress_reporter(total, args.log_interval) as report:
            counts = clean(options, report)
    except (ValueError, OSError, KeyboardInterrupt) as error:
        return exit_code_for(error, name, options.output)
    print(*closing(counts, options, time.perf_counter() - start), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
