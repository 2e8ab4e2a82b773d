"""Merge many files of JSON lines into one, as merge_data.py and merge_jsons.py of the tutorials do.

The command line of `megatron_ds.cleaning.command`.
"""

from __future__ import annotations

if __name__ == "__main__":
    import start_tool

from megatron_ds import cli
from megatron_ds.cleaning.command import MergeOptions as Options
from megatron_ds.cleaning.command import merge_files

main = cli.program(Options, merge_files)

if __name__ == "__main__":
    start_tool.run(main)
