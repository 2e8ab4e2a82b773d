"""Train a tokenizer on text: byte-level BPE, WordPiece, or Unigram.

bpe writes GPT-2's vocab.json and merges.txt and a tokenizer.json; wordpiece writes BERT's
vocab.txt; unigram writes a SentencePiece model, tokenizer.model. The same text gives the same
files.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron_ds.launch import output
from megatron_ds.preprocess.document_readers import DocumentReader, InputSpec
from megatron_ds.preprocess.input_flags import add_input_flags, inputs_of
from megatron_ds.preprocess.parsing import RejectedDocument, TextFields, texts_of
from megatron_ds.tokenizer.train import (
    KINDS,
    train_bpe,
    train_unigram,
    train_wordpiece,
    vocab_size_problems,
)

USES = {
    "bpe": "--tokenizer-type GPT2BPETokenizer --vocab-file {0}/vocab.json --merge-file "
    "{0}/merges.txt",
    "wordpiece": "--tokenizer-type {1} --vocab-file {0}/vocab.txt",
    "unigram": "--tokenizer-type GPTSentencePieceTokenizer --tokenizer-model {0}/tokenizer.model",
}
BETWEEN_LINES = 5.0
"""Seconds between progress lines."""


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    add_input_flags(parser)
    parser.add_argument(
        "--json-keys",
        "--json-key",
        "--columns",
        nargs="+",
        default=["text"],
        metavar="KEY",
        help="keys or columns of the texts (default: text)",
    )
    parser.add_argument("--type", default="bpe", choices=KINDS, help="what to train (default: bpe)")
    parser.add_argument("--vocab-size", type=int, default=4096, help="tokens (default: 4096)")
    parser.add_argument(
        "--keep-case",
        action="store_true",
        help="wordpiece: a vocabulary of BertWordPieceCase, not of BertWordPieceLowerCase",
    )
    parser.add_argument(
        "--strict", action="store_true", help="stop at a line without a text, do not pass over it"
    )
    parser.add_argument("--output-dir", type=Path, required=True, help="where the files go")
    arguments = parser.parse_args(argv)
    if arguments.keep_case and arguments.type != "wordpiece":
        parser.error("--keep-case is for --type wordpiece")
    return arguments


@output.plain_warnings()
def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    inputs = inputs_of(arguments)
    reading = TextIterator(inputs, tuple(arguments.json_keys), strict=arguments.strict)
    try:
        found = [
            *inputs.problems(),
            *vocab_size_problems(arguments.type, arguments.vocab_size),
            *_output_problems(arguments.output_dir),
        ]
        if found:
            raise ValueError("\n".join(found))
        size = train(arguments, reading)
    except (ValueError, OSError) as error:
        print(f"train_tokenizer.py: error:\n{error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    kind = "BertWordPieceCase" if arguments.keep_case else "BertWordPieceLowerCase"
    with output.ignore_broken_pipe():
        print(f"{size} tokens from {reading.summary}")
        print(f"use it with {USES[arguments.type].format(arguments.output_dir, kind)}")
    return 0


def _output_problems(folder: Path) -> Iterator[str]:
    """Why a folder cannot be written, before hours of training."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not there.is_dir():
        yield f"--output-dir {folder}: {there} is no folder"
    elif not os.access(there, os.W_OK | os.X_OK):
        yield f"--output-dir {folder}: the folder {there} cannot be written"


def train(arguments: argparse.Namespace, texts: TextIterator) -> int:
    """Number of tokens."""
    folder, size, show = arguments.output_dir, arguments.vocab_size, sys.stderr.isatty()
    if arguments.type == "wordpiece":
        lower_case = not arguments.keep_case
        return train_wordpiece(texts, size, folder, lower_case=lower_case, show=show)
    if arguments.type == "unigram":
        return train_unigram(texts, size, folder, show=show)
    return train_bpe(texts, size, folder, show=show)


class TextIterator:
    """The texts of the inputs, with a progress line now and then; what has none is counted.

    Iterating raises ValueError if there is no text at all, or at the first line without one if
    `strict`.
    """

    def __init__(self, inputs: InputSpec, keys: tuple[str, ...], *, strict: bool = False) -> None:
        self._inputs = inputs
        self._wanted = TextFields(keys, inputs.max_document_bytes)
        self._strict = strict
        self._documents = 0
        self._bytes = 0
        self._left_out = 0
        self._first_bad: RejectedDocument | None = None

    def __iter__(self) -> Iterator[str]:
        start = said = time.perf_counter()
        for item in DocumentReader(self._inputs, self._wanted.keys):
            found = texts_of(item, self._wanted)
            if isinstance(found, RejectedDocument):
                if self._strict:
                    raise ValueError(str(found))
                self._left_out += 1
                self._first_bad = self._first_bad or found
                continue
            yield from found
            self._documents += 1
            self._bytes += sum(len(text.encode()) for text in found)
            now = time.perf_counter()
            if now - said > BETWEEN_LINES:
                said = now
                speed = self._bytes / (now - start) / 1e6
                print(f"read {self.summary} ({speed:.1f} MB/s)", file=sys.stderr, flush=True)
        if not self._documents:
            why = f"; the first line without one: {self._first_bad}" if self._first_bad else ""
            raise ValueError(f"{self._inputs.name}: has no text{why}")

    @property
    def summary(self) -> str:
        left_out = f", {self._left_out} left out, the first {self._first_bad}"
        left_out = left_out if self._left_out else ""
        return f"{self._documents} documents, {self._bytes / 1e6:.1f} MB{left_out}"


if __name__ == "__main__":
    sys.exit(main())
