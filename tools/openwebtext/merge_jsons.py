"""The name that Megatron gives to merge_data.py."""

from __future__ import annotations

import sys

from megatron_ds import cli
from megatron_ds.cleaning.merge_files import MergeOptions, merge_files

if __name__ == "__main__":
    sys.exit(cli.run(MergeOptions, merge_files, sys.argv[1:], program="merge_jsons.py"))
