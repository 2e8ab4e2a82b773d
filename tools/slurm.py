#!/usr/bin/env python
"""Runs of pretrain_gpt.py as jobs of Slurm: submits one, shows its state, follows its output."""

from __future__ import annotations

if __name__ == "__main__":
    import start_tool

from megatron_ds.slurm.command import main

if __name__ == "__main__":
    start_tool.run(main)
