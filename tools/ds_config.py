#!/usr/bin/env python
"""DeepSpeed's JSON: generate, explain, validate and migrate it, without starting a run."""

from __future__ import annotations

if __name__ == "__main__":
    import start_tool

from megatron_ds.engine.ds_config.command import main

if __name__ == "__main__":
    start_tool.run(main)
