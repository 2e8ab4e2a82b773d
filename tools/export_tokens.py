"""Write a pair of token files (.bin and .idx) as files of another trainer."""

from __future__ import annotations

if __name__ == "__main__":
    import start_tool

from megatron_ds.data.foreign_tokens.export_program import main

if __name__ == "__main__":
    start_tool.run(main)
