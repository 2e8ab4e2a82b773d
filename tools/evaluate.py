#!/usr/bin/env python
"""Evaluate a trained GPT: perplexity of texts, WikiText-103 and LAMBADA."""

from __future__ import annotations

if __name__ == "__main__":
    import start_tool

from megatron_ds.evaluation.evaluate import main

if __name__ == "__main__":
    start_tool.run(main)
