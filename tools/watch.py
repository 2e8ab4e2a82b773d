"""Watch a run in a terminal."""

from __future__ import annotations

if __name__ == "__main__":
    import start_tool

from megatron_ds.reports.watch import main

if __name__ == "__main__":
    start_tool.run(main)
