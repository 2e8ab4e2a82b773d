"""The complete path on this machine, from text to a trained model and what it generates."""

from __future__ import annotations

if __name__ == "__main__":
    import start_tool

from megatron_ds.demo.command import main

if __name__ == "__main__":
    start_tool.run(main)
