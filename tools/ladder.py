#!/usr/bin/env python
"""Ladders of small runs that predict the loss of a large one: plans, trains, fits and judges."""

from __future__ import annotations

if __name__ == "__main__":
    import start_tool

from megatron_ds.ladder.command import main

if __name__ == "__main__":
    start_tool.run(main)
