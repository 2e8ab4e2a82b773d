"""Show what a pair of token files (.bin and .idx) holds, check it, and compare it with another.

The command line over `megatron_ds.data.token_file_stats`. Exit code 0: all is well; 1: the
files are damaged, tokens are outside of the vocabulary, or the pairs that were compared differ.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import signal
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

from megatron_ds.cli import flags
from megatron_ds.config import DataConfig, TokenizerConfig
from megatron_ds.data.blend_spec import NAMES
from megatron_ds.data.build_datasets import build_datasets
from megatron_ds.data.indexed_dataset import IndexedDataset
from megatron_ds.data.token_file_stats import check, compare, document, summarize, summary_lines
from megatron_ds.data.tokenizer_metadata import read_sentence_splitter
from megatron_ds.launch import output
from megatron_ds.tokenizer import Tokenizer, build_tokenizer


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0], allow_abbrev=False)
    parser.add_argument("prefix", help="path of the pair without .bin and .idx")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--check", action="store_true", help="read every token; add the hashes")
    parser.add_argument("--compare", metavar="PREFIX", help="find where another pair differs")
    parser.add_argument(
        "--documents",
        nargs="+",
        type=_numbers,
        default=[],
        metavar="N",
        help="show these documents, from 0 on; 3-7 is a range",
    )
    parser.add_argument(
        "--max-tokens", type=int, help="cut what is shown of a document or sample after so many"
    )
    samples = parser.add_argument_group(
        "training samples", "As a run reads them that has the same flags and this data alone."
    )
    samples.add_argument(
        "--samples",
        nargs="+",
        type=_numbers,
        default=[],
        metavar="N",
        help="show these positions of the run's order, from 0 on; 3-7 is a range",
    )
    samples.add_argument("--seq-length", type=int, help="tokens of a sample")
    samples.add_argument(
        "--num-samples",
        type=int,
        help="samples that the run takes: --train-iters x --global-batch-size (default: as many "
        "as are shown); the order depends on it where it takes more than one pass",
    )
    samples.add_argument("--seed", type=int, default=1234, help="default: %(default)s")
    samples.add_argument("--split", help="shares of training, validation, test")
    samples.add_argument("--part", choices=NAMES, default="train", help="default: %(default)s")
    samples.add_argument("--data-cache-path", help="folder of index caches (default: none is kept)")
    tokenizer = parser.add_argument_group(
        "tokenizer", "With one, tokens are shown as text and checked against its vocabulary."
    )
    for flag in _tokenizer_flags():
        tokenizer.add_argument(
            *(form for name in flag.names for form in flags.spellings(name)),
            dest=flag.field,
            help=flag.explanation.replace("%", "%%"),
            **_taking(flag),
        )
    tokenizer.add_argument(
        "--vocab-size", type=int, help="number of ids of NullTokenizer or TikTokenizer"
    )
    args = parser.parse_args(argv)
    named = any(getattr(args, flag.field) is not None for flag in _tokenizer_flags())
    if args.vocab_size is not None and not named:
        parser.error("--vocab-size needs --tokenizer-type NullTokenizer or TikTokenizer")
    if args.samples and args.seq_length is None:
        parser.error("--samples needs --seq-length")
    for name in ("seq_length", "num_samples", "max_tokens"):
        if (value := getattr(args, name)) is not None and value < 1:
            parser.error(f"{flags.spellings(name)[1]} {value}: must be at least 1")
    return args


def _numbers(text: str) -> range:
    first, dash, last = text.partition("-")
    if not first.isdecimal() or (dash and not last.isdecimal()):
        raise argparse.ArgumentTypeError(f"{text}: must be a number, or a range such as 3-7")
    numbers = range(int(first), int(last if dash else first) + 1)
    if not numbers:
        raise argparse.ArgumentTypeError(f"{text}: ends before it begins; {last}-{first} is meant?")
    return numbers


def _tokenizer_flags() -> list[flags.Flag]:
    fields = {item.name for item in dataclasses.fields(TokenizerConfig)}
    return [flag for group in flags.groups().values() for flag in group if flag.field in fields]


def _taking(flag: flags.Flag) -> dict[str, Any]:
    """How argparse reads what a flag of the configuration takes."""
    if flag.takes == 0:
        return {"action": "store_const", "const": flag.const}
    how: dict[str, Any] = {"type": lambda text: flag.kind(flag.synonyms.get(text, text))}
    if flag.choices:
        how["choices"] = flag.choices
    else:
        how["metavar"] = flag.metavar
    return how | ({"nargs": "*"} if flag.takes == "*" else {})


def tokenizer_of(args: argparse.Namespace) -> Tokenizer | None:
    """None if no flag names one."""
    given = {
        flag.field: value
        for flag in _tokenizer_flags()
        if (value := getattr(args, flag.field)) is not None
    }
    return build_tokenizer(TokenizerConfig(**given), args.vocab_size) if given else None


class Inspection:
    """One run: what was found goes to `found` for --json, or line by line to the output."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._tokenizer = tokenizer_of(args)
        self._data = IndexedDataset(args.prefix)
        self.found: dict[str, Any] = {}
        self.good = True

    def run(self) -> None:
        summary = summarize(self._data)
        self.found["summary"] = dataclasses.asdict(summary)
        self._say(*summary_lines(summary))
        if (cut := read_sentence_splitter(self._data.prefix)) is not None:
            self.found["sentences"] = cut
            self._say(f"  sentences cut by: {', '.join(f'{k} {v}' for k, v in cut.items())}")
        if self._args.check:
            self._check()
        if self._args.compare:
            self._compare(IndexedDataset(self._args.compare))
        self._show("document", self._args.documents, lambda at: document(self._data, at))
        if self._args.samples:
            with tempfile.TemporaryDirectory() as folder:
                samples = self._samples(self._args.data_cache_path or folder)
                self._show("sample", self._args.samples, lambda at: samples[at], samples.sample_id)

    def _check(self) -> None:
        tokenizer = self._tokenizer
        size, eod = (tokenizer.vocab_size, tokenizer.eod) if tokenizer else (None, None)
        done = check(self._data, size, eod)
        self.found["check"] = dataclasses.asdict(done)
        self.good &= not done.problems
        self._say(
            "  every offset fits; tokens "
            + ("none" if done.lowest is None else f"{done.lowest} to {done.highest}"),
            f"  sha256 .bin {done.sha256_bin}",
            f"  sha256 .idx {done.sha256_idx}",
        )
        if done.documents_ending_with_eod is not None:
            self._say(f"  documents that end with the EOD token: {done.documents_ending_with_eod}")
        for problem in done.problems:
            print(f"inspect_dataset.py: {problem}", file=sys.stderr)

    def _compare(self, other: IndexedDataset) -> None:
        difference = compare(self._data, other)
        kinds = [str(pair.dtype) for pair in (self._data, other)]
        self.found["difference"] = dataclasses.asdict(difference) | {"dtypes": kinds}
        self.good &= not difference.description
        if kinds[0] != kinds[1]:
            self._say(f"  tokens are {kinds[0]} here and {kinds[1]} in {other.prefix}")
        self._say(f"  difference: {difference.description or 'none'}")
        at, token = difference.document, difference.token
        if at is None or token is None:
            return
        sides = {}
        for pair in (self._data, other):
            if at < len(pair.document_index) - 1:
                part = document(pair, at)[max(0, token - 8) : token + 8]
                sides[pair.prefix] = self._shown(part.tolist())
                self._say(f"  {pair.prefix}, around it: {sides[pair.prefix]!r}")
        self.found["difference"]["around"] = sides

    def _samples(self, cache: str) -> Any:
        args, data = self._args, self._data
        last = max(at for numbers in args.samples for at in numbers)
        if args.num_samples is not None and last >= args.num_samples:
            raise ValueError(f"--samples {last}: the run takes {args.num_samples}, from 0 on")
        wanted = [0, 0, 0]
        wanted[NAMES.index(args.part)] = args.num_samples or last + 1
        tokenizer = self._tokenizer
        built = build_datasets(
            DataConfig(data_path=(data.prefix,), split=args.split, data_cache_path=cache),
            seq_length=args.seq_length,
            seed=args.seed,
            num_samples=(wanted[0], wanted[1], wanted[2]),
            tokenizer_fingerprint=tokenizer.fingerprint.digest if tokenizer else "",
            vocab_size=tokenizer.vocab_size if tokenizer else (check(data).highest or 0) + 1,
        )
        samples = built.train if args.part == "train" else getattr(built, args.part).get("")
        if samples is None:
            raise ValueError(f"--split {args.split}: gives {args.part} no documents")
        return samples

    def _show(self, kind: str, wanted: Sequence[range], get: Any, name: Any = None) -> None:
        for number in (at for numbers in wanted for at in numbers):
            tokens = get(number)
            ids = tokens[: self._args.max_tokens].tolist()
            entry: dict[str, Any] = {"number": number, "tokens": len(tokens), "ids": ids}
            title = f"{kind} {number}, {len(tokens)} tokens"
            if name is not None:
                entry["id"] = name(number)
                title += f", {entry['id']}"
            if self._tokenizer:
                entry["text"] = self._tokenizer.decode(ids)
            self.found.setdefault(f"{kind}s", []).append(entry)
            self._say(f"--- {title}", self._shown(ids))

    def _shown(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids) if self._tokenizer else " ".join(map(str, ids))

    def _say(self, *lines: str) -> None:
        if not self._args.json:
            print(*lines, sep="\n")


@output.plain_warnings()
def main(argv: Sequence[str]) -> int:
    args = parse(argv)
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    try:
        inspection = Inspection(args)
        inspection.run()
        if args.json:
            print(json.dumps(inspection.found))
        sys.stdout.flush()
    except BrokenPipeError:  # who reads has seen enough, as `head`
        output.redirect_stdout_to_null()
        return 128 + signal.SIGPIPE
    except (ValueError, OSError) as error:
        print(f"inspect_dataset.py: error:\n{error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 0 if inspection.good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
