"""Merge the weights of several checkpoints of one model: mean, moving average, emulated decay."""

from __future__ import annotations

if __name__ == "__main__":
    import start_tool

from megatron_ds.loading.programs.merge import main

if __name__ == "__main__":
    start_tool.run(main)
