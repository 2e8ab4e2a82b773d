"""Train a tokenizer on text: byte-level BPE, WordPiece, or Unigram."""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from megatron_ds import cli
from megatron_ds.config.checks import folder_problems
from megatron_ds.config.fields import option_field, option_group, when
from megatron_ds.config.problems import Problem, counted, user_error, warn_of
from megatron_ds.launch import output
from megatron_ds.preprocess.documents.document_readers import DocumentReader
from megatron_ds.preprocess.documents.inputs import InputSpec
from megatron_ds.preprocess.documents.parsing import RejectedDocument, TextFields, texts_of
from megatron_ds.tokenizer import train

FLAGS = {
    "bpe": "--tokenizer-type GPT2BPETokenizer --vocab-file {0}/vocab.json --merge-file "
    "{0}/merges.txt",
    "wordpiece": "--tokenizer-type {1} --vocab-file {0}/vocab.txt",
    "unigram": "--tokenizer-type GPTSentencePieceTokenizer --tokenizer-model {0}/tokenizer.model",
}
"""The flags that use a trained tokenizer, given its folder and kind of WordPiece."""
REPORT_SECONDS = 5.0


@dataclass(frozen=True)
class Options:
    """Trains a tokenizer on text: byte-level BPE, WordPiece, or Unigram.

    bpe writes GPT-2's vocab.json and merges.txt and a tokenizer.json; wordpiece writes BERT's
    vocab.txt; unigram writes a SentencePiece model, tokenizer.model. The same text gives the same
    files.
    """

    PROGRAM: ClassVar[str] = "train_tokenizer.py"

    json_keys: tuple[str, ...] = option_field(
        ("text",), nargs="*", aliases=("json-key", "columns"), metavar="KEY"
    )
    """Keys or columns of the texts."""
    type: str = option_field("bpe", choices=train.KINDS)
    """Type of tokenizer."""
    vocab_size: int = option_field(4096)
    """Number of tokens."""
    keep_case: bool = option_field(False, only_with=when(type="wordpiece"))
    """Train a vocabulary of BertWordPieceCase instead of BertWordPieceLowerCase."""
    fail_on_bad_document: bool = option_field(False)
    """Stop at the first rejected document instead of skipping it."""
    output_dir: str = option_field("", metavar="FOLDER", required=True)
    """Output folder."""
    inputs: InputSpec = option_group(InputSpec())

    def problems(self) -> Iterator[Problem]:
        yield from self.inputs.problems()
        yield from train.vocab_size_problems(self.type, self.vocab_size)
        yield from folder_problems("output_dir", self.output_dir or ".")


class TextIterator:
    """The texts of the inputs, with progress lines; counts documents without a text.

    Iterating raises UserError if there is no text at all, or, if `strict`, at the first document
    without one.
    """

    def __init__(self, inputs: InputSpec, keys: tuple[str, ...], *, strict: bool = False) -> None:
        self._inputs = inputs
        self._wanted = TextFields(keys, inputs.max_document_bytes)
        self._strict = strict
        self._documents = 0
        self._bytes = 0
        self._rejected = 0
        self._first_rejected: RejectedDocument | None = None

    def __iter__(self) -> Iterator[str]:
        start = time.perf_counter()
        reported = start
        for item in DocumentReader(self._inputs, self._wanted.keys):
            texts = texts_of(item, self._wanted)
            if isinstance(texts, RejectedDocument):
                if self._strict:
                    raise user_error("document-without-text", found=str(texts))
                self._rejected += 1
                self._first_rejected = self._first_rejected or texts
                continue
            yield from texts
            self._documents += 1
            self._bytes += sum(len(text.encode()) for text in texts)
            now = time.perf_counter()
            if now - reported > REPORT_SECONDS:
                reported = now
                speed = self._bytes / (now - start) / 1e6
                print(f"read {self.summary} ({speed:.1f} MB/s)", file=sys.stderr, flush=True)
        if not self._documents:
            first = f"; the first document without one: {self._first_rejected}"
            first = first if self._first_rejected else ""
            raise user_error("input-without-text", name=self._inputs.name, first_rejected=first)

    @property
    def summary(self) -> str:
        left_out = f", {self._rejected} left out, the first {self._first_rejected}"
        left_out = left_out if self._rejected else ""
        return f"{counted(self._documents, 'document')}, {self._bytes / 1e6:.1f} MB{left_out}"


def work(options: Options) -> None:
    texts = TextIterator(options.inputs, options.json_keys, strict=options.fail_on_bad_document)
    trainers: dict[str, Callable[..., int]] = {
        "bpe": train.train_bpe,
        "wordpiece": functools.partial(train.train_wordpiece, lower_case=not options.keep_case),
        "unigram": train.train_unigram,
    }
    folder = Path(options.output_dir)
    show = sys.stderr.isatty()
    size = trainers[options.type](texts, options.vocab_size, folder, show=show)
    if size < options.vocab_size:
        smaller = Problem("vocabulary-smaller", asked=options.vocab_size, size=size)
        warn_of(smaller, 1)
    name = "BertWordPieceCase" if options.keep_case else "BertWordPieceLowerCase"
    with output.ignore_broken_pipe():
        print(f"{counted(size, 'token')} from {texts.summary}")
        print(f"use it with {FLAGS[options.type].format(options.output_dir, name)}")


main = cli.program(Options, work)
