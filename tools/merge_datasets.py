"""Merge token files (.bin and .idx) into one pair."""

from __future__ import annotations

if __name__ == "__main__":
    import start_tool

from megatron_ds.data.token_files.merge_program import main

if __name__ == "__main__":
    start_tool.run(main)
