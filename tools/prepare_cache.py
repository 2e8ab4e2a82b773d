#!/usr/bin/env python
"""Build the index caches of a run ahead, on one node without devices."""

from __future__ import annotations

if __name__ == "__main__":
    import start_tool

from megatron_ds.training.start.prepare_cache import main

if __name__ == "__main__":
    start_tool.run(main)
