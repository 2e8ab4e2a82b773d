"""Fork a run: start one of its own from a checkpoint, with another schedule, as for a decay."""

from __future__ import annotations

if __name__ == "__main__":
    import start_tool

from megatron_ds.loading.programs.fork import main

if __name__ == "__main__":
    start_tool.run(main)
