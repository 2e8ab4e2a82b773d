#!/usr/bin/env python
"""Continue prompts with a trained GPT, or sample texts without a prompt."""

from __future__ import annotations

if __name__ == "__main__":
    import start_tool

from megatron_ds.inference.samples.command import main

if __name__ == "__main__":
    start_tool.run(main)
