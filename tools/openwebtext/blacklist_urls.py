"""Drop unwanted addresses from lists of them: blacklist_urls.py FOLDER OUTPUT, as in Megatron.

What the stage url of clean.py drops of documents, and addresses that were there before.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from pathlib import Path

from megatron_ds.cleaning.duplicates import HASH_BYTES
from megatron_ds.cleaning.urls import Urls

NO_TEXT = "no UTF-8"
DUPLICATE = "duplicate"


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "path", help="a folder with .txt files, or one file, of an address per line"
    )
    parser.add_argument("output", help="the file of the addresses that are left, in their order")
    parser.add_argument(
        "--url-blacklist",
        nargs="+",
        default=[],
        metavar="FILE",
        help="files with a host (example.com), a name (reddit), an end of a file's name (.pdf) or "
        "a regex:PATTERN per line; without one only addresses of files without text are dropped",
    )
    return parser.parse_args(argv)


def kept(files: Sequence[Path], urls: Urls, counts: Counter[str]) -> Iterator[str]:
    """The addresses that are left; counts what is dropped. Keeps a hash of each in memory."""
    seen: set[bytes] = set()
    for file in files:
        with file.open("rb") as lines:
            for line in lines:
                try:
                    url = line.decode("utf-8-sig").strip()
                except UnicodeDecodeError:
                    counts[NO_TEXT] += 1
                    continue
                if not url:
                    continue
                reason = urls.judge(url)
                key = blake2b(url.encode(), digest_size=HASH_BYTES).digest()
                if reason is None and key in seen:
                    reason = DUPLICATE
                if reason is not None:
                    counts[reason] += 1
                    continue
                seen.add(key)
                yield url


def main(argv: Sequence[str]) -> int:
    args = parse(argv)
    path, output = Path(args.path), Path(args.output)
    partial = output.with_name(output.name + ".partial")
    counts: Counter[str] = Counter()
    written = 0
    try:
        files = sorted(path.glob("*.txt")) if path.is_dir() else [path]
        files = [file for file in files if file.resolve() != output.resolve()]
        if not files:
            raise ValueError(f"{path}: has no .txt files")
        urls = Urls(args.url_blacklist)
        with partial.open("w", encoding="utf-8") as out:
            for url in kept(files, urls, counts):
                out.write(url + "\n")
                written += 1
        os.replace(partial, output)
    except (ValueError, OSError) as error:
        partial.unlink(missing_ok=True)
        print(f"blacklist_urls.py: error:\n{error}", file=sys.stderr)
        return 1
    print(f"kept {written:,} of {written + counts.total():,} addresses")
    if counts:
        print("dropped " + ", ".join(f"{count:,} {why}" for why, count in counts.most_common()))
    print(f"wrote {output}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
