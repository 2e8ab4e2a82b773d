"""Show which documents the steps of a run have read, and which steps have read a document."""

from __future__ import annotations

if __name__ == "__main__":
    import start_tool

from megatron_ds.usage.command import main

if __name__ == "__main__":
    start_tool.run(main)
