#!/usr/bin/env python
"""Query a text generation server interactively: text_generation_cli.py HOST:PORT."""

from __future__ import annotations

if __name__ == "__main__":
    import start_tool

from megatron_ds.inference.client import main

if __name__ == "__main__":
    start_tool.run(main)
