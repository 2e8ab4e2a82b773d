"""Train a tokenizer on text: byte-level BPE, WordPiece, or Unigram."""

from __future__ import annotations

if __name__ == "__main__":
    import start_tool

from megatron_ds.preprocess.train_tokenizer import main

if __name__ == "__main__":
    start_tool.run(main)
