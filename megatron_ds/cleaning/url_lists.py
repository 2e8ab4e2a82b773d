"""Filters lists of addresses by the rules of the stage `url`, and removes repeated ones."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import ClassVar

from megatron_ds.cleaning.deduplication import HASH_BYTES
from megatron_ds.cleaning.options import RESUME
from megatron_ds.cleaning.pipeline import OUTPUT
from megatron_ds.cleaning.url_filter import UrlFilter
from megatron_ds.config.checks import replaced_file_problems
from megatron_ds.config.fields import option_field
from megatron_ds.config.problems import Problem
from megatron_ds.fileio.resumable import ResumableOutput
from megatron_ds.preprocess.documents.formats import INVALID_TEXT
from megatron_ds.preprocess.documents.inputs import InputSpec

KEPT = "kept"
COMMIT_URLS = 100_000
"""Kept addresses between commits."""
Position = tuple[int, int]
"""Number of a file, and a byte of it."""


@dataclass(frozen=True)
class UrlListOptions:
    """Drops unwanted and repeated addresses from lists.

    The rules are the same as in the stage url of clean.py.
    """

    PROGRAM: ClassVar[str] = "blacklist_urls.py"

    path: str = option_field("", metavar="PATH", positional=True, required=True)
    """Folder of .txt files, or a file, with one URL per line."""
    output: str = option_field("", metavar="OUTPUT", positional=True, required=True)
    """Output file for the kept URLs."""
    url_blacklist: tuple[str, ...] = option_field((), nargs="*", metavar="FILE")
    """Files with one entry per line: a host (example.com), a name (reddit), a file suffix (.pdf) or
    regex:PATTERN; by default only URLs of non-text files are dropped."""
    resume: bool = option_field(False, help=RESUME)

    @property
    def files(self) -> list[Path]:
        path = Path(self.path)
        files = sorted(path.glob("*.txt")) if path.is_dir() else [path]
        return [file for file in files if file.resolve() != Path(self.output).resolve()]

    def problems(self) -> Iterator[Problem]:
        if not self.files:
            yield Problem("no-url-lists", settings=self)
        yield from replaced_file_problems("output", self.output)
        if os.path.realpath(self.output) in map(os.path.realpath, self.url_blacklist):
            yield Problem("url-list-is-blacklist", settings=self)

    def run(self) -> None:
        """Filters the lists, and prints the results."""
        counts = filter_urls(self)
        kept = counts.pop(KEPT, 0)
        print(f"kept {kept:,} of {kept + counts.total():,} addresses")
        if counts:
            print("dropped " + ", ".join(f"{count:,} {why}" for why, count in counts.most_common()))
        print(f"wrote {self.output}")


def filter_urls(options: UrlListOptions) -> Counter[str]:
    """Write the kept addresses.

    Returns:
        Counts of `KEPT` addresses and, by reason, of dropped ones.
    """
    files = options.files
    urls = UrlFilter(options.url_blacklist)
    settings = {**urls.settings, **InputSpec(paths=tuple(map(str, files))).describe_files()}
    with ResumableOutput(options.output, settings, {OUTPUT: ""}, options.resume) as work:
        counts = Counter({} if work.progress is None else work.progress["counts"])
        if not work.finished:
            position: Position = (0, 0)
            for url, position in _kept(files, urls, work, counts):
                counts[KEPT] += 1
                work.files[OUTPUT].write(f"{url}\n".encode())
                if counts[KEPT] % COMMIT_URLS == 0:
                    work.commit({"place": position, "counts": counts})
            work.commit({"place": position, "counts": counts}, finished=True)
        work.publish({OUTPUT: options.output})
    return counts


def _kept(
    files: Sequence[Path], urls: UrlFilter, work: ResumableOutput, counts: Counter[str]
) -> Iterator[tuple[str, Position]]:
    """Yields the remaining kept addresses, each with its end in the input, and counts the dropped
    ones. Keeps a hash of each address in memory."""
    first, offset = (0, 0) if work.progress is None else work.progress["place"]
    with (work.folder / OUTPUT).open("rb") as lines:
        seen = {_hash(line.rstrip(b"\n")) for line in lines}
    for index, file in enumerate(files[first:], first):
        with file.open("rb") as lines:
            lines.seek(offset if index == first else 0)
            while line := lines.readline():
                try:
                    url = line.decode("utf-8-sig").strip()
                except UnicodeDecodeError:
                    counts[INVALID_TEXT] += 1
                    continue
                if not url:
                    continue
                key = _hash(url.encode())
                reason = urls.judge(url) or ("duplicate" if key in seen else None)
                if reason is not None:
                    counts[reason] += 1
                    continue
                seen.add(key)
                yield url, (index, lines.tell())


def _hash(url: bytes) -> bytes:
    return blake2b(url, digest_size=HASH_BYTES).digest()
