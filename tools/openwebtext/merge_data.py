"""Merge many files of JSON lines into one, as merge_data.py and merge_jsons.py of the tutorials do.

The command line over `megatron_ds.cleaning` without any stage: lines are copied as they are, those
that are no JSON object are left out, listed in a file of their own and counted.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron_ds.fileio.resumable import WORK_SUFFIX
from megatron_ds.preprocess.inputs import COMPRESSIONS, QUARANTINE
from tools.openwebtext import clean

SUFFIXES = (".json", ".jsonl", ".ndjson")


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0], allow_abbrev=False)
    parser.add_argument(
        "--json_path",
        "--json-path",
        nargs="+",
        default=["."],
        metavar="PATH",
        help="folders, whose files of JSON lines are taken by name, those of folders in them too, "
        "and files (default: the folder you are in)",
    )
    parser.add_argument(
        "--output_file",
        "--output-file",
        default="merged_output.json",
        metavar="FILE",
        help="the one file; .gz .xz .bz2 by name (default: %(default)s)",
    )
    parser.add_argument("--workers", type=int, default=1, help="processes that check lines")
    parser.add_argument(
        "--resume", action="store_true", help="go on with a run that was interrupted"
    )
    return parser.parse_args(argv)


def files_of(path: str, output: str) -> Iterator[str]:
    """The files that are merged of a path, by name; not what this or an earlier run writes."""
    if not os.path.isdir(path):
        yield path
        return
    written = {os.path.realpath(output), os.path.realpath(output + QUARANTINE)}
    for folder, folders, names in os.walk(path):
        folders[:] = sorted(
            name
            for name in folders
            if not name.startswith((".", "_")) and not name.endswith(WORK_SUFFIX)
        )
        for name in sorted(names):
            stem, suffix = os.path.splitext(name.lower())
            if suffix in COMPRESSIONS:
                suffix = os.path.splitext(stem)[1]
            file = os.path.join(folder, name)
            shown = suffix in SUFFIXES and not name.startswith((".", "_"))
            if shown and os.path.realpath(file) not in written:
                yield file


def main(argv: Sequence[str]) -> int:
    args = parse(argv)
    files: list[str] = []
    for path in args.json_path:
        found = list(files_of(path, args.output_file))
        if not found:
            ends = " ".join(SUFFIXES)
            print(
                f"merge_data.py: error:\n--json_path {path}: the folder has no files of JSON lines "
                f"({ends}, compressed or not); others are merged if they are named: --json_path "
                f"{path}/*",
                file=sys.stderr,
            )
            return 1
        files += found
    flags = ["--output", args.output_file, "--workers", str(args.workers)]
    flags += ["--resume"] if args.resume else []
    asked = [*flags, "--input-format", "jsonl", "--stages", clean.NONE, "--input", *files]
    return clean.main(asked, "merge_data.py")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
