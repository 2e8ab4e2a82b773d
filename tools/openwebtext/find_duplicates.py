"""List documents that are almost the same, with the flags of Megatron's find_duplicates.py.

The command line of `megatron_ds.cleaning.find_duplicates`.
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    sys.path.insert(0, os.path.abspath(f"{__file__}/../../.."))
    from megatron_ds.launch import program_start

    program_start.begin()


from megatron_ds import cli
from megatron_ds.cleaning.find_duplicates import DuplicateOptions as Options
from megatron_ds.cleaning.find_duplicates import find_duplicates
from megatron_ds.config.problems import counted


def work(options: Options) -> None:
    counts = find_duplicates(options)
    print(f"{counts['duplicates']:,} of {counts['documents']:,} documents are duplicates")
    if counts["rejected"]:
        print(f"rejected: {counted(counts['rejected'], 'line', ',')}")
    print(f"wrote {options.output}")


main = cli.program(Options, work)

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
