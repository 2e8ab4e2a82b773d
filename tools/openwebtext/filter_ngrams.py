"""Take texts of evaluation tasks out of documents, with the flags of Megatron's filter_ngrams.py.

The stage decontaminate of clean.py, whose other flags may follow. Tasks are read from files:
nothing is fetched.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tools.openwebtext import clean

LAMBADA = "lambada"
RENAMED = {
    "max_ngram_size": "--ngram-size",
    "min_ngram_size": "--min-ngram-size",
    "filter_text_char_len": "--min-piece-chars",
    "splits_count": "--max-pieces",
    "remove_char_each_side": "--cut-margin",
    "num_threads": "--workers",
}


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "--dedup-dataset",
        nargs=2,
        required=True,
        metavar=("FILE", "KEY"),
        help="the documents, and the key of their text",
    )
    parser.add_argument("--output", required=True, help="the documents without the tasks")
    parser.add_argument(
        "--task-files", nargs="+", default=[], metavar="FILE", help="the tasks, as in clean.py"
    )
    parser.add_argument("--tasks", nargs="*", default=[], help=f"only {LAMBADA}")
    parser.add_argument("--lambada-path", metavar="FILE", help="the same as --task-files")
    for name, flag in RENAMED.items():
        shown = f"{flag} of clean.py"
        parser.add_argument("--" + name.replace("_", "-"), type=int, metavar="N", help=shown)
    parser.add_argument("--key-threshold", type=int, help="without effect: every match counts")
    parser.add_argument("--save-dictionary", help=argparse.SUPPRESS)
    parser.add_argument("--load-dictionary", help=argparse.SUPPRESS)
    args, rest = parser.parse_known_args(argv)
    problems = [
        f"--tasks {task}: nothing is fetched; write its texts to a file, and give it with "
        "--task-files"
        for task in args.tasks
        if task != LAMBADA
    ]
    if LAMBADA in args.tasks and args.lambada_path is None:
        problems.append(f"--tasks {LAMBADA}: needs --lambada-path")
    for flag in ("save_dictionary", "load_dictionary"):
        if getattr(args, flag) is not None:
            dashed = flag.replace("_", "-")
            problems.append(f"--{dashed}: pickled files are not used; give --task-files")
    if not args.task_files and args.lambada_path is None:
        problems.append("--task-files is needed")
    if problems:
        parser.error("\n".join(problems))
    if args.key_threshold is not None:
        print(
            "WARNING: --key-threshold: has no effect: runs of words that are frequent in the "
            "documents are taken out, too",
            file=sys.stderr,
        )
    return args, rest


def main(argv: Sequence[str]) -> int:
    args, rest = parse(argv)
    file, key = args.dedup_dataset
    tasks = [*args.task_files, *([args.lambada_path] if args.lambada_path else [])]
    flags = ["--input", file, "--json-key", key, "--output", args.output]
    for name, flag in RENAMED.items():
        if getattr(args, name) is not None:
            flags += [flag, str(getattr(args, name))]
    stage = ["--stages", "decontaminate", "--task-files", *tasks]
    return clean.main([*flags, *stage, *rest], "filter_ngrams.py")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
