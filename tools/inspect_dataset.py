"""Show the content of a pair of token files (.bin and .idx), check it, compare it with another."""

from __future__ import annotations

if __name__ == "__main__":
    import start_tool

from megatron_ds.data.token_files.inspect_pair import main

if __name__ == "__main__":
    start_tool.run(main)
