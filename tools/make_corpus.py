"""Makes a corpus of the text that every Python brings: its standard library and documentation.

One JSON object per line, its text under the key "text": a source file of the library, or a topic
of the language reference that `help()` shows. The same Python gives the same file.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import sysconfig
import tokenize
from collections.abc import Iterator
from pathlib import Path

from rich.progress import track

LEFT_OUT = {
    "site-packages",
    "dist-packages",
    "__pycache__",
    "test",
    "tests",
    "idle_test",
    "encodings",
    "pydoc_data",
}
"""Folders of the library that are not its own, or hold tests and tables rather than text."""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, help="the jsonl file to write")
    parser.add_argument("--megabytes", type=float, default=8.0, help="stop at this much text")
    arguments = parser.parse_args(argv)
    library = Path(sysconfig.get_path("stdlib"))
    texts = [*topics(), *sources(library)]
    # Documents of a folder resemble each other, and a validation split is cut off the end.
    random.Random(0).shuffle(texts)
    chosen = list(up_to(texts, int(arguments.megabytes * 1e6)))
    with arguments.output.open("w", encoding="utf-8") as output:
        for text in track(chosen, description="corpus"):
            output.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
    size = arguments.output.stat().st_size / 1e6
    print(
        f"{len(chosen)} documents, {size:.1f} MB, of Python {sys.version.split()[0]} in {library}"
    )
    return 0


def topics() -> Iterator[str]:
    """The language reference, a topic at a time; nothing where a distribution leaves it out."""
    try:
        from pydoc_data.topics import topics as texts
    except ImportError:
        return
    for name in sorted(texts):
        yield texts[name].strip() + "\n"


def sources(library: Path) -> Iterator[str]:
    """The .py files of a library in the order of their names, decoded as they declare."""
    for path in sorted(library.rglob("*.py")):
        if LEFT_OUT.isdisjoint(path.relative_to(library).parts):
            try:
                with tokenize.open(path) as file:
                    text = file.read()
            except (OSError, SyntaxError, UnicodeDecodeError):
                continue  # unreadable, or broken on purpose
            if text.strip():
                yield text


def up_to(texts: list[str], size: int) -> Iterator[str]:
    """The first texts, until one would pass a size in bytes."""
    for text in texts:
        size -= len(text.encode("utf-8"))
        if size < 0:
            return
        yield text


if __name__ == "__main__":
    sys.exit(main())
