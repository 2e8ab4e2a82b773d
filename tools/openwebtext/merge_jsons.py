"""The name that Megatron gives to merge_data.py."""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    sys.path.insert(0, os.path.abspath(f"{__file__}/../../.."))
    from megatron_ds.launch import program_start

    program_start.begin()


from megatron_ds import cli
from megatron_ds.cleaning.command import MergeOptions, merge_files


class MergeJsonsOptions(MergeOptions):
    PROGRAM = "merge_jsons.py"


if __name__ == "__main__":
    sys.exit(cli.run(MergeJsonsOptions, merge_files, sys.argv[1:]))
