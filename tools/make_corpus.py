"""Make a corpus of text that comes with every Python: its standard library and documentation."""

from __future__ import annotations

if __name__ == "__main__":
    import start_tool

from megatron_ds.demo.corpus import main

if __name__ == "__main__":
    start_tool.run(main)
