"""Turn documents into Megatron's token files, <prefix>_<key>_document.bin and .idx, or
<prefix>_<key>_sentence.bin and .idx with --split-sentences."""

from __future__ import annotations

if __name__ == "__main__":
    import start_tool

from megatron_ds.preprocess.command import main

if __name__ == "__main__":
    start_tool.run(main)
