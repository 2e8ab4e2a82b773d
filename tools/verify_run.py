"""Check a run: replay recorded steps as one process on a CPU, and compare them with its records."""

from __future__ import annotations

if __name__ == "__main__":
    import start_tool

from megatron_ds.training.replay.command import main

if __name__ == "__main__":
    start_tool.run(main)
