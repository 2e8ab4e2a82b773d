"""The name that Megatron gives to merge_data.py."""

from __future__ import annotations

import sys

from megatron_ds import cli
from megatron_ds.cleaning.merge_files import MergeOptions, merge_files


class MergeJsonsOptions(MergeOptions):
    PROGRAM = "merge_jsons.py"


if __name__ == "__main__":
    sys.exit(cli.run(MergeJsonsOptions, merge_files, sys.argv[1:]))
