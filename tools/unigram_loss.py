"""Loss of a unigram model, which knows only token frequencies: a baseline for every run."""

from __future__ import annotations

if __name__ == "__main__":
    import start_tool

from megatron_ds.evaluation.unigram_loss import main

if __name__ == "__main__":
    start_tool.run(main)
