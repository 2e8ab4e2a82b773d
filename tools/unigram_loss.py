"""The loss of a model that knows only how frequent each token is: what any training must beat.

Counts the tokens of the training documents, one added to each count, and prices the validation
documents with these frequencies.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt

from megatron_ds.data.indexed_dataset import IndexedDataset
from megatron_ds.data.sample_index import parse_split, split_bounds

Tokens = npt.NDArray[np.integer]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--data-path", required=True, help="prefix of the .bin/.idx pair")
    parser.add_argument("--split", default="969,30,1", help="as for training")
    parser.add_argument("--vocab-size", type=int, required=True, help="number of tokens")
    parser.add_argument("--output", type=Path, help="a JSON file for the result")
    arguments = parser.parse_args(argv)
    try:
        train, valid = train_and_validation(arguments.data_path, arguments.split)
        loss = unigram_loss(train, valid, arguments.vocab_size)
    except ValueError as error:
        parser.error(str(error))
    print(f"unigram loss: {loss:.4f} nats per token on {valid.size} validation tokens")
    if arguments.output is not None:
        result = {"loss": loss, "train_tokens": train.size, "validation_tokens": valid.size}
        arguments.output.write_text(json.dumps(result) + "\n")
    return 0


def train_and_validation(prefix: str, split: str) -> tuple[Tokens, Tokens]:
    """The tokens of the documents that --split gives to training and to validation."""
    data = IndexedDataset(prefix)
    train, valid, _ = (
        np.concatenate([np.zeros(0, data.dtype), *(data.get(i) for i in range(first, end))])
        for first, end in split_bounds(parse_split(split), len(data))
    )
    return train, valid


def unigram_loss(train: Tokens, valid: Tokens, vocab_size: int) -> float:
    """Mean over the validation tokens of -log((count + 1) / (train tokens + vocab_size)), in nats.

    Raises ValueError if there is nothing to price, or a token outside the vocabulary.
    """
    if valid.size == 0:
        raise ValueError("--split leaves validation no tokens")
    highest = max(int(part.max(initial=0)) for part in (train, valid))
    if highest >= vocab_size:
        raise ValueError(f"--vocab-size {vocab_size}: the data has the token {highest}")
    counts = np.bincount(train, minlength=vocab_size) + 1
    costs = np.log(counts.sum()) - np.log(counts)
    return float(costs[valid].mean())


if __name__ == "__main__":
    sys.exit(main())
