"""Show what a checkpoint of any format contains, verify it, compare it with another."""

from __future__ import annotations

if __name__ == "__main__":
    import start_tool

from megatron_ds.conversion.inspect.command import main

if __name__ == "__main__":
    start_tool.run(main)
