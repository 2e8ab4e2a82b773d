#!/usr/bin/env python
"""Predicts the memory, communication and time of a run, for any number of processes."""

from __future__ import annotations

if __name__ == "__main__":
    import start_tool

from megatron_ds.planning.command import main

if __name__ == "__main__":
    start_tool.run(main)
