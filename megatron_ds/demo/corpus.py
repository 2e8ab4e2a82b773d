"""Make a corpus of text that comes with every Python: its standard library and documentation.

One JSON object per line, its text under the key "text": a source file of the library, or a topic
of the language reference that `help()` shows. The same Python gives the same file.
"""

from __future__ import annotations

import itertools
import json
import random
import sys
import sysconfig
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from rich.progress import track

from megatron_ds import cli
from megatron_ds.config.fields import option_field

EXCLUDED = {
    "site-packages",
    "dist-packages",
    "__pycache__",
    "test",
    "tests",
    "idle_test",
    "encodings",
    "pydoc_data",
}
"""Folders of installed packages, tests and tables."""


@dataclass(frozen=True)
class Options:
    """Makes a corpus of text that comes with every Python: its standard library and documentation.

    The output has one JSON object per line with the key "text": a source file of the library, or a
    topic of the language reference that help() shows. The same Python gives the same file.
    """

    PROGRAM: ClassVar[str] = "make_corpus.py"

    output: str = option_field("", metavar="FILE", required=True)
    """Output file (JSON lines)."""
    megabytes: float = option_field(8.0, above=0)
    """Maximum size of the text in MB."""


def topics() -> Iterator[str]:
    """The topics of the language reference; none if the distribution lacks it."""
    try:
        from pydoc_data.topics import topics as texts
    except ImportError:
        return
    for name in sorted(texts):
        yield texts[name].strip() + "\n"


def sources(library: Path) -> Iterator[str]:
    """The .py files of a library by name, decoded as they declare."""
    for path in sorted(library.rglob("*.py")):
        if EXCLUDED.isdisjoint(path.relative_to(library).parts):
            try:
                with tokenize.open(path) as file:
                    text = file.read()
            except (OSError, SyntaxError, UnicodeDecodeError):
                continue  # unreadable, or invalid on purpose
            if text.strip():
                yield text


def work(options: Options) -> None:
    library = Path(sysconfig.get_path("stdlib"))
    texts = [*topics(), *sources(library)]
    # Documents of a folder resemble each other, and the validation split is the end of the file.
    random.Random(0).shuffle(texts)
    ends = itertools.accumulate(len(text.encode("utf-8")) for text in texts)
    limit = int(options.megabytes * 1e6)
    chosen = [text for text, end in zip(texts, ends, strict=True) if end <= limit]
    path = Path(options.output)
    with path.open("w", encoding="utf-8") as output:
        for text in track(chosen, description="corpus"):
            output.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
    size = path.stat().st_size / 1e6
    version = sys.version.split()[0]
    print(f"{len(chosen)} documents, {size:.1f} MB, of Python {version} in {library}")


main = cli.program(Options, work)
