"""Loss of a unigram model, which knows only token frequencies: a baseline for every run.

Counts the tokens of the training documents, with add-one smoothing, and scores the validation
documents with these frequencies.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from megatron_ds import cli
from megatron_ds.config.fields import option_field
from megatron_ds.config.problems import user_error
from megatron_ds.data.sample_index import parse_split, split_bounds
from megatron_ds.data.token_files.kinds import open_token_file

Tokens = npt.NDArray[np.integer]


@dataclass(frozen=True)
class Options:
    """Computes the loss of a unigram model, which knows only token frequencies."""

    PROGRAM: ClassVar[str] = "unigram_loss.py"

    data_path: str = option_field("", metavar="PREFIX", required=True)
    """Prefix of the .bin/.idx pair."""
    split: str = option_field("969,30,1", metavar="A,B,C")
    """Proportions of training, validation and test data, as in training."""
    vocab_size: int | None = option_field(None, required=True, minimum=1)
    """Vocabulary size."""
    output: str | None = option_field(None, metavar="FILE")
    """Output file (JSON)."""


def train_and_validation(prefix: str, split: str) -> tuple[Tokens, Tokens]:
    """The tokens of the training and of the validation documents of a split."""
    data = open_token_file(prefix)
    train, valid, _ = (
        np.concatenate([np.zeros(0, data.dtype), *(data.get(i) for i in range(first, end))])
        for first, end in split_bounds(parse_split(split), len(data))
    )
    return train, valid


def unigram_loss(train: Tokens, valid: Tokens, vocab_size: int) -> float:
    """Mean over the validation tokens of -log((count + 1) / (train tokens + vocab_size)), in nats.

    Raises:
        UserError: If there are no validation tokens, or a token is outside the vocabulary.
    """
    if valid.size == 0:
        raise user_error("no-validation-tokens")
    highest = max(int(part.max(initial=0)) for part in (train, valid))
    if highest >= vocab_size:
        raise user_error("token-outside-vocabulary", vocab_size=vocab_size, highest=highest)
    counts = np.bincount(train, minlength=vocab_size) + 1
    costs = np.log(counts.sum()) - np.log(counts)
    return float(costs[valid].mean())


def work(options: Options) -> None:
    assert options.vocab_size is not None
    train, valid = train_and_validation(options.data_path, options.split)
    loss = unigram_loss(train, valid, options.vocab_size)
    print(f"unigram loss: {loss:.4f} nats per token on {valid.size} validation tokens")
    if options.output is not None:
        result = {"loss": loss, "train_tokens": train.size, "validation_tokens": valid.size}
        Path(options.output).write_text(json.dumps(result) + "\n")


main = cli.program(Options, work)
