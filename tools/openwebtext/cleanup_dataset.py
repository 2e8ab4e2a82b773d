"""Fix Unicode, keep English, drop short documents: cleanup_dataset.py INPUT OUTPUT, as in Megatron.

The stages fix, language and length of clean.py, whose other flags may follow.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tools.openwebtext import clean


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("input", help="JSON lines, or what else clean.py reads")
    parser.add_argument("output", help="the cleaned JSON lines")
    args, rest = parser.parse_known_args(argv)
    flags = ["--input", args.input, "--output", args.output]
    return clean.main(
        [*flags, "--stages", "fix", "language", "length", *rest], "cleanup_dataset.py"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
