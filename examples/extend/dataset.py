"""Fine-tunes on pairs of a prompt and an answer; tokens of prompts have no loss.

torchrun --nproc_per_node 8 examples/extend/dataset.py PAIRS.jsonl FLAGS OF pretrain_gpt.py
"""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path

from megatron_ds.extend import DatasetRequest, Extensions, pretrain


class Pairs:
    """Items are pairs of seq_length + 1 ids and a loss mask."""

    def __init__(self, path: Path, request: DatasetRequest) -> None:
        self.pairs = [json.loads(line) for line in path.open(encoding="utf-8")]
        self.size = request.seq_length + 1
        self.tokenizer = request.tokenizer

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> tuple[list[int], list[int]]:
        encode = self.tokenizer.encode
        eod = self.tokenizer.eod
        prompt = encode(self.pairs[index]["prompt"])
        answer = [*encode(self.pairs[index]["answer"]), eod]
        padding = [eod] * self.size
        mask = [0] * len(prompt) + [1] * len(answer) + [0] * self.size
        return [*prompt, *answer, *padding][: self.size], mask[: self.size]


def dataset(path: Path, request: DatasetRequest) -> Pairs | None:
    """The pairs for training; no validation and no test."""
    return Pairs(path, request) if request.split == "train" else None


if __name__ == "__main__":
    own = functools.partial(dataset, Path(sys.argv[1]))
    pretrain(Extensions(dataset=own), sys.argv[2:])
