"""List documents that are almost the same, with the flags of Megatron's find_duplicates.py.

The command line of `megatron_ds.cleaning.find_duplicates`.
"""

from __future__ import annotations

if __name__ == "__main__":
    import start_tool

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
    start_tool.run(main)
