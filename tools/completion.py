"""Print the completion of programs and flags for a shell: bash, zsh or fish."""

from __future__ import annotations

if __name__ == "__main__":
    import start_tool

from megatron_ds.cli.completion import main

if __name__ == "__main__":
    start_tool.run(main)
