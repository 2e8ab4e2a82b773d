#!/usr/bin/env python
"""Shows how a training script, command or configuration file of another program starts here."""

from __future__ import annotations

if __name__ == "__main__":
    import start_tool

from megatron_ds.doctor.command import main

if __name__ == "__main__":
    start_tool.run(main)
