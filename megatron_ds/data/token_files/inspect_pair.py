"""Show the content of a pair of token files (.bin and .idx), check it, compare it with another."""

from __future__ import annotations

import dataclasses
import itertools
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from megatron_ds import cli
from megatron_ds.cli.inspection import Inspection
from megatron_ds.config import DataConfig, TokenizerConfig
from megatron_ds.config.fields import option_field, option_group
from megatron_ds.config.problems import Problem, counted, user_error
from megatron_ds.data.blend.blend_spec import SPLITS
from megatron_ds.data.build_datasets import build_datasets
from megatron_ds.data.remote.token_cache import TokenCache
from megatron_ds.data.token_files.indexed_dataset import IndexedDataset
from megatron_ds.data.token_files.token_file_stats import (
    check,
    compare,
    document,
    summarize,
    summary_lines,
)
from megatron_ds.data.token_files.tokenizer_metadata import read_sentence_splitter
from megatron_ds.data.validation import DataFiles
from megatron_ds.tokenizer import Tokenizer, build_tokenizer


@dataclass(frozen=True)
class SampleOptions:
    """Training samples as a run reads them that has the same flags and this data alone."""

    samples: tuple[range, ...] = option_field((), nargs="*")
    """Samples to show, by position in the training order, from 0; 3-7 is a range."""
    seq_length: int | None = option_field(None, minimum=1)
    """Tokens per sample."""
    num_samples: int | None = option_field(None, minimum=1)
    """Samples of the run: --train-iters x --global-batch-size (default: as many as needed to show
    --samples); affects the order if the run needs several epochs."""
    seed: int = option_field(1234)
    """Seed of the run."""
    split: str | None = option_field(None, metavar="A,B,C")
    """Proportions of training, validation and test data."""
    part: str = option_field("train", choices=SPLITS)
    """Dataset split to show."""
    data_cache_path: str | None = option_field(None, metavar="FOLDER")
    """Folder of the index cache (default: no cache)."""


@dataclass(frozen=True)
class Options:
    """Shows the content of a pair of token files (.bin and .idx), checks it, and compares it with
    another.

    The exit status is 1 if the files are damaged, tokens are outside the vocabulary, or the
    compared pairs differ. With a tokenizer, tokens are shown as text and checked against its
    vocabulary.
    """

    PROGRAM: ClassVar[str] = "inspect_dataset.py"

    prefix: str = option_field("", metavar="PREFIX", positional=True, required=True)
    """Path or URL of the pair without .bin and .idx."""
    json: bool = option_field(False)
    """Print one JSON object."""
    check: bool = option_field(False)
    """Read and validate all tokens, and add hashes."""
    compare: str | None = option_field(None, metavar="PREFIX")
    """Report the first difference from another pair."""
    documents: tuple[range, ...] = option_field((), nargs="*")
    """Documents to show, from 0; 3-7 is a range."""
    max_tokens: int | None = option_field(None, minimum=1)
    """Truncate the shown documents and samples to this length."""
    object_storage_cache_path: str | None = option_field(None, metavar="FOLDER")
    """Folder for the parts that are read of pairs by URL (default: below the folder for temporary
    files)."""
    vocab_size: int | None = option_field(None, minimum=1)
    """Number of ids of NullTokenizer or TikTokenizer."""
    sample: SampleOptions = option_group(SampleOptions())
    tokenizer: TokenizerConfig = option_group(TokenizerConfig())
    given: frozenset[str] = frozenset()

    @property
    def has_tokenizer(self) -> bool:
        return not self.given.isdisjoint(vars(self.tokenizer))

    def problems(self) -> Iterator[Problem]:
        if self.has_tokenizer:
            yield from self.tokenizer.problems(self.vocab_size)
        elif self.vocab_size is not None:
            yield Problem("vocab-size-without-tokenizer")
        if self.sample.samples and self.sample.seq_length is None:
            yield Problem("samples-without-length")


class PairInspection(Inspection):
    """The inspection of a pair."""

    def __init__(self, options: Options) -> None:
        super().__init__(as_json=options.json)
        self._options = options
        self._tokenizer: Tokenizer | None = None
        if options.has_tokenizer:
            self._tokenizer = build_tokenizer(options.tokenizer, options.vocab_size)
        self._cache = TokenCache(options.object_storage_cache_path)
        self._data = IndexedDataset(options.prefix, self._cache)

    def run(self) -> int:
        """Inspects, and returns the exit status."""
        summary = summarize(self._data)
        self.found["summary"] = dataclasses.asdict(summary)
        self.show(*summary_lines(summary))
        if (spans := self._data.loss_spans) is not None:
            counted_tokens = int((spans[:, 1] - spans[:, 0]).sum())
            self.found["tokens_with_loss"] = counted_tokens
            self.show(f"  loss on {counted_tokens:,} of the tokens, in {len(spans):,} spans")
        splitter = read_sentence_splitter(self._data.prefix, self._data.tokenizer_path)
        if splitter is not None:
            self.found["sentences"] = splitter
            shown = ", ".join(f"{name} {value}" for name, value in splitter.items())
            self.show(f"  sentences split by: {shown}")
        if self._options.check:
            self._check()
        if self._options.compare:
            self._compare(IndexedDataset(self._options.compare, self._cache))
        self._show("document", self._options.documents, lambda at: document(self._data, at))
        if wanted := self._options.sample.samples:
            with tempfile.TemporaryDirectory() as folder:
                samples = self._samples(self._options.sample.data_cache_path or folder)
                self._show("sample", wanted, samples.__getitem__, samples.sample_id)
        return self.finish()

    def _check(self) -> None:
        tokenizer = self._tokenizer
        size, eod = (tokenizer.vocab_size, tokenizer.eod) if tokenizer else (None, None)
        done = check(self._data, size, eod)
        self.found["check"] = dataclasses.asdict(done)
        self.good &= not done.problems
        tokens = "none" if done.lowest is None else f"{done.lowest} to {done.highest}"
        self.show(f"  every offset fits; tokens {tokens}")
        self.show(f"  sha256 .bin {done.sha256_bin}", f"  sha256 .idx {done.sha256_idx}")
        if (ending := done.documents_ending_with_eod) is not None:
            self.show(f"  documents that end with the EOD token: {ending}")
        for problem in done.problems:
            print(f"inspect_dataset.py: {problem}", file=sys.stderr)

    def _compare(self, other: IndexedDataset) -> None:
        difference = compare(self._data, other)
        kinds = [str(pair.dtype) for pair in (self._data, other)]
        self.found["difference"] = dataclasses.asdict(difference) | {"dtypes": kinds}
        self.good &= not difference.description
        if kinds[0] != kinds[1]:
            self.show(f"  tokens are {kinds[0]} here and {kinds[1]} in {other.prefix}")
        self.show(f"  difference: {difference.description or 'none'}")
        at = difference.document
        token = difference.token
        if at is None or token is None:
            return
        sides: dict[str, Any] = {}
        self.found["difference"]["around"] = sides
        for pair in (self._data, other):
            if at < len(pair.document_index) - 1:
                part = document(pair, at)[max(0, token - 8) : token + 8]
                sides[pair.prefix] = self._shown(part.tolist())
                self.show(f"  {pair.prefix}, around it: {sides[pair.prefix]!r}")

    def _samples(self, cache: str) -> Any:
        args = self._options.sample
        data = self._data
        assert args.seq_length is not None
        last = max(at for numbers in args.samples for at in numbers)
        if args.num_samples is not None and last >= args.num_samples:
            raise user_error("sample-beyond-run", last=last, last_of_run=args.num_samples - 1)
        sample_counts = [0, 0, 0]
        sample_counts[SPLITS.index(args.part)] = args.num_samples or last + 1
        tokenizer = self._tokenizer
        config = DataConfig(data_path=(data.prefix,), split=args.split, data_cache_path=cache)
        built = build_datasets(
            DataFiles(config, self._cache),
            seq_length=args.seq_length,
            seed=args.seed,
            num_samples=(sample_counts[0], sample_counts[1], sample_counts[2]),
            tokenizer_fingerprint=tokenizer.fingerprint.digest if tokenizer else "",
            vocab_size=tokenizer.vocab_size if tokenizer else (check(data).highest or 0) + 1,
        )
        samples = built.train if args.part == "train" else getattr(built, args.part).get("")
        if samples is None:
            raise user_error("split-without-documents", split=args.split, part=args.part)
        return samples

    def _show(self, noun: str, numbers: Sequence[range], get: Any, name: Any = None) -> None:
        for index in itertools.chain(*numbers):
            tokens = get(index)
            ids = tokens[: self._options.max_tokens].tolist()
            entry: dict[str, Any] = {"number": index, "tokens": len(tokens), "ids": ids}
            title = f"{noun} {index}, {counted(len(tokens), 'token')}"
            if name is not None:
                entry["id"] = name(index)
                title += f", {entry['id']}"
            if self._tokenizer:
                entry["text"] = self._tokenizer.decode(ids)
            self.found.setdefault(f"{noun}s", []).append(entry)
            self.show(f"--- {title}", self._shown(ids))

    def _shown(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids) if self._tokenizer else " ".join(map(str, ids))


main = cli.program(Options, lambda options: PairInspection(options).run())
