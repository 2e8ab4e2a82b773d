"""Convert the weights of a checkpoint to another format."""

from __future__ import annotations

if __name__ == "__main__":
    import start_tool

from megatron_ds.loading.programs.convert import main

if __name__ == "__main__":
    start_tool.run(main)
