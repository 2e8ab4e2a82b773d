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

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron_ds.cleaning.deduplication import HASH_BYTES
from megatron_ds.cleaning.options import file_hashes, file_stamps
from megatron_ds.cleaning.pipeline import OUTPUT
from megatron_ds.cleaning.url_filter import UrlFilter
from megatron_ds.fileio.resumable import ResumableOutput
from megatron_ds.preprocess.inputs import InputSpec
from tools.openwebtext import clean

KEPT = "kept"
NO_TEXT = "no UTF-8"
DUPLICATE = "duplicate"
PART = 100_000
"""Addresses that are kept between two records of how far the work came."""
Place = tuple[int, int]
"""The number of a file, and a byte of it."""


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
    parser.add_argument(
        "--resume", action="store_true", help="go on with a run that was interrupted"
    )
    return parser.parse_args(argv)


def kept(
    files: Sequence[Path], urls: UrlFilter, work: ResumableOutput, counts: Counter[str]
) -> Iterator[tuple[str, Place]]:
    """The addresses that are left, after those that the work has, each with its end in the input;
    counts what is dropped. Keeps a hash of each in memory."""
    file_number, offset = (0, 0) if work.progress is None else work.progress["place"]
    seen: set[bytes] = set()
    if work.files[OUTPUT].committed:
        with (work.folder / OUTPUT).open("rb") as lines:
            seen.update(_hash(line.rstrip(b"\n")) for line in lines)
    for number, file in enumerate(files[file_number:], file_number):
        with file.open("rb") as lines:
            lines.seek(offset if number == file_number else 0)
            while line := lines.readline():
                try:
                    url = line.decode("utf-8-sig").strip()
                except UnicodeDecodeError:
                    counts[NO_TEXT] += 1
                    continue
                if not url:
                    continue
                reason = urls.judge(url)
                key = _hash(url.encode())
                if reason is None and key in seen:
                    reason = DUPLICATE
                if reason is not None:
                    counts[reason] += 1
                    continue
                seen.add(key)
                yield url, (number, lines.tell())


def _hash(url: bytes) -> bytes:
    return blake2b(url, digest_size=HASH_BYTES).digest()


def filtered(args: argparse.Namespace) -> Counter[str]:
    """Does the work; counts what was kept and what was dropped, by reason."""
    path = Path(args.path)
    files = sorted(path.glob("*.txt")) if path.is_dir() else [path]
    files = [file for file in files if file.resolve() != Path(args.output).resolve()]
    if not files:
        raise ValueError(f"{path}: has no .txt files")
    if os.path.realpath(args.output) in map(os.path.realpath, args.url_blacklist):
        raise ValueError(f"{args.output}: is a file of --url-blacklist, too")
    urls = UrlFilter(args.url_blacklist)
    settings: dict[str, object] = {"--url-blacklist": file_hashes(args.url_blacklist)}
    settings |= file_stamps(InputSpec(paths=tuple(map(str, files))))
    with ResumableOutput(args.output, settings, {OUTPUT: ""}, args.resume) as work:
        counts = Counter({} if work.progress is None else work.progress["counts"])
        if not work.finished:
            place: Place = (0, 0)
            for url, place in kept(files, urls, work, counts):
                counts[KEPT] += 1
                work.files[OUTPUT].write(f"{url}\n".encode())
                if counts[KEPT] % PART == 0:
                    work.commit({"place": place, "counts": counts})
            work.commit({"place": place, "counts": counts}, finished=True)
        work.publish({OUTPUT: args.output})
    return counts


def main(argv: Sequence[str]) -> int:
    args = parse(argv)
    try:
        counts = filtered(args)
    except (ValueError, OSError, KeyboardInterrupt) as error:
        return clean.exit_code_for(error, "blacklist_urls.py", args.output)
    written = counts.pop(KEPT, 0)
    print(f"kept {written:,} of {written + counts.total():,} addresses")
    if counts:
        print("dropped " + ", ".join(f"{count:,} {why}" for why, count in counts.most_common()))
    print(f"wrote {args.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
