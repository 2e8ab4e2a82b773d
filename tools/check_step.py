"""Check the steps between two checkpoints of any trainer, by computing them again."""

from __future__ import annotations

if __name__ == "__main__":
    import start_tool

from megatron_ds.training.replay.step_command import main

if __name__ == "__main__":
    start_tool.run(main)
