"""Benchmark of indexing, blending and reading training data, against minimal implementations.

    python benchmarks/data.py [--only index|blend|reading] [--rounds 5] [--output data.json]
    python benchmarks/data.py [--only index|blend|reading] --against CHECKOUT [--rounds 5]

index: Builds the three indexes of a large file. The baseline builds the sample index in C++, as
    Megatron's compiled helper does (an independent implementation, compiled here if g++ exists).
blend: Builds a blend of thousands of files with a billion samples in total, and opens it again.
    The token files are sparse and use no disk space; their indexes use 1 GB.
reading: Samples per second in random order. The baseline is a loop over memory-mapped numpy arrays
    without any checks.

Contenders run in turn, each in its own process with one thread. Ratios are medians over rounds, so
that other load on the machine affects both sides. With --against, the benchmark of another checkout
of this project runs in turn with this one, and the ratio of each figure is printed.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import Contender, Work, in_turn, this_machine, versions, write_json
from megatron_ds.config import DataConfig
from megatron_ds.data.blend.blend_schedule import blend_order
from megatron_ds.data.build_datasets import build_datasets
from megatron_ds.data.gpt_dataset import GPTDataset
from megatron_ds.data.index_cache import ArrayCache
from megatron_ds.data.micro_batches import MicroBatchIterator
from megatron_ds.data.sample_index import SampleIndexes, build_indexes, total_samples
from megatron_ds.data.token_dataset import SampleReading, TokenDataset
from megatron_ds.data.token_files.file_formats import MAGIC
from megatron_ds.data.token_files.indexed_dataset import HEADER, IndexedDataset
from megatron_ds.data.token_files.indexed_writer import pair_writer
from megatron_ds.data.validation import DataFiles

HERE = Path(__file__).resolve().parents[1]
SEQUENCE = 1024
MEAN_TOKENS = 1024
VOCABULARY = 50304
MICRO_BATCH = 8
TARGETS = {"index": 1.2, "reading": 0.8, "cold": 45.0, "warm": 5.0}
COMPILED = """
#include <cstdint>
extern "C" void sample_starts(const int32_t *lengths, const int32_t *order, int64_t seq_length,
                              int64_t total, int32_t *starts) {
    int64_t at = 0, offset = 0;
    starts[0] = starts[1] = 0;
    for (int64_t sample = 1; sample <= total; ++sample) {
        int64_t ahead = seq_length;
        for (int64_t rest; ahead >= (rest = lengths[order[at]] - offset); ++at, offset = 0)
            ahead -= rest;
        offset += ahead;
        starts[2 * sample] = int32_t(at);
        starts[2 * sample + 1] = int32_t(offset);
    }
}
"""
Lengths = npt.NDArray[np.int32]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument(
        "--only", choices=("index", "blend", "reading"), help="run a single benchmark"
    )
    parser.add_argument("--rounds", type=int, default=5, help="number of rounds")
    parser.add_argument(
        "--documents", type=int, default=1_000_000, help="documents of the indexed file"
    )
    parser.add_argument("--epochs", type=int, default=20, help="epochs of the indexed file")
    parser.add_argument("--files", type=int, default=2500, help="files of the blend")
    parser.add_argument("--samples", type=int, default=1_000_000_000, help="samples of the blend")
    parser.add_argument("--read", type=int, default=50_000, help="samples to read per round")
    parser.add_argument("--folder", type=Path, help="folder for temporary files (needs 5 GB)")
    parser.add_argument("--against", type=Path, help="another checkout of this project")
    parser.add_argument("--output", type=Path, help="output file (JSON)")
    arguments = parser.parse_args(argv)
    if arguments.against is not None:
        compare_checkouts(arguments)
        return 0
    benchmarks = {"index": index, "blend": blend, "reading": reading}
    machine = this_machine()
    results = {}
    for name, benchmark in benchmarks.items():
        if arguments.only in (None, name):
            with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
                results[name] = benchmark(arguments, Path(folder))
            print(report(name, results[name]), flush=True)
    if arguments.output is not None:
        about = {"machine": asdict(machine), "versions": versions(["numpy", "torch"])}
        write_json(arguments.output, {**about, **results})
    return 0


def compare_checkouts(arguments: argparse.Namespace) -> None:
    """Run this benchmark of two checkouts in turn, a round at a time, and print the ratios."""
    checkouts = [HERE, arguments.against.resolve()]
    rounds: list[list[dict[str, Any]]] = [[], []]
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "figures.json"
        values = {**vars(arguments), "against": None, "rounds": 1, "output": output}
        flags = [f"--{name}={value}" for name, value in values.items() if value is not None]
        command = [sys.executable, "benchmarks/data.py", *flags]
        for number in range(arguments.rounds):
            # Which checkout is first alternates, so that a growing load affects both.
            for which in (0, 1) if number % 2 else (1, 0):
                subprocess.run(command, cwd=checkouts[which], check=True, capture_output=True)
                rounds[which].append(json.loads(output.read_text(encoding="utf-8")))
    print(f"{'':62}{'this':>12}{'other':>12}{'ratio':>8}")
    result = {}
    for name in ("index", "blend", "reading"):
        for figure in rounds[0][0].get(name, ()):
            ours, theirs = ([one[name].get(figure) for one in checkout] for checkout in rounds)
            if not all(isinstance(value, int | float) and value for value in (*ours, *theirs)):
                continue
            title = f"{name}: {figure}"
            result[title] = {
                "this": statistics.median(ours),
                "other": statistics.median(theirs),
                "ratio": statistics.median(a / b for a, b in zip(ours, theirs, strict=True)),
            }
            this, other, ratio = result[title].values()
            print(f"{title:62}{this:12,.4g}{other:12,.4g}{ratio:8.3f}")
    if arguments.output is not None:
        about = {"machine": asdict(this_machine()), "versions": versions(["numpy", "torch"])}
        write_json(arguments.output, {**about, "ratios": result})


def report(name: str, figures: dict[str, Any]) -> str:
    """Format the figures of a benchmark, one per line."""
    lines = [f"{name}:"]
    for key, value in figures.items():
        text = f"{value:,.2f}" if isinstance(value, float) else f"{value}"
        lines.append(f"  {key:60}{text:>16}")
    return "\n".join(lines) + "\n"


# Indexes of one file.


def index(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Measure the CPU time of all three indexes, ours and with the compiled baseline."""
    size = (arguments.documents, arguments.epochs)
    library = compiled(folder)
    contenders = [Contender("ours", our_indexes, *size)]
    if library is not None:
        contenders.append(Contender("compiled", compiled_indexes, *size, library))
    try:
        rounds = in_turn(contenders, arguments.rounds, 1)
    finally:
        close(contenders)
    ours = rounds[0]
    figures: dict[str, Any] = {
        "samples": ours[0]["samples"],
        "megatron_ds, CPU s": statistics.median(entry["seconds"] for entry in ours),
        "megatron_ds, peak memory beyond the arrays, MiB": max(entry["beyond"] for entry in ours),
    }
    if library is not None:
        theirs = rounds[1]
        assert {entry["sum"] for entry in ours} == {entry["sum"] for entry in theirs}
        pairs = [a["seconds"] / b["seconds"] for a, b in zip(ours, theirs, strict=True)]
        figures["sample index in C++, CPU s"] = statistics.median(
            entry["seconds"] for entry in theirs
        )
        figures["ratio of each round"] = " ".join(f"{pair:.2f}" for pair in pairs)
        figures[f"ratio (target {TARGETS['index']})"] = statistics.median(pairs)
    return figures


def compiled(folder: Path) -> str | None:
    """Compile COMPILED to a shared library; None if there is no compiler."""
    compiler = shutil.which("g++")
    if compiler is None:
        return None
    (folder / "starts.cpp").write_text(COMPILED)
    library = folder / "starts.so"
    flags = ("-O3", "-march=native", "-shared", "-fPIC")
    subprocess.run([compiler, *flags, "-o", library, folder / "starts.cpp"], check=True)
    return str(library)


def our_indexes(documents: int, epochs: int) -> Work:
    lengths = random_lengths(documents, 0)
    samples = epochs * int(lengths.sum(dtype=np.int64)) // SEQUENCE - 1
    every = np.arange(documents)
    return timed_indexes(lambda: build_indexes(lengths, every, samples, SEQUENCE, 1))


def compiled_indexes(documents: int, epochs: int, library: str) -> Work:
    lengths = random_lengths(documents, 0)
    function = ctypes.CDLL(library).sample_starts
    numbers = np.ctypeslib.ndpointer(dtype=np.int32, flags="C")
    function.argtypes = [numbers, numbers, ctypes.c_int64, ctypes.c_int64, numbers]
    total = total_samples(
        epochs * int(lengths.sum(dtype=np.int64)) // SEQUENCE - 1,
        int(lengths.sum(dtype=np.int64)),
        SEQUENCE,
    )

    def make() -> SampleIndexes:
        rng = np.random.RandomState(1)
        order = np.tile(np.arange(documents, dtype=np.int32), epochs)
        rng.shuffle(order)
        starts = np.empty((total + 1, 2), dtype=np.int32)
        function(lengths, order, SEQUENCE, total, starts)
        shuffle = np.arange(total, dtype=np.uint32)
        rng.shuffle(shuffle)
        return SampleIndexes(order, starts, shuffle)

    return timed_indexes(make)


def timed_indexes(make: Callable[[], SampleIndexes]) -> Work:
    def work(count: int) -> dict[str, Any]:
        before = peak_mib()
        begin = time.process_time()
        indexes = make()
        seconds = time.process_time() - begin
        arrays = (indexes.documents, indexes.samples, indexes.shuffle)
        return {
            "seconds": seconds,
            "samples": len(indexes),
            "beyond": peak_mib() - before - sum(array.nbytes for array in arrays) / 2**20,
            "sum": sum(int(array[:: len(array) // 999].sum(dtype=np.int64)) for array in arrays),
        }

    return work


# A blend of many files.


def blend(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Measure the blend order alone, then the complete setup of a run and its first samples."""
    files = arguments.files
    samples = arguments.samples
    figures: dict[str, Any] = {"files": files, "samples": samples}
    weights = np.random.RandomState(0).dirichlet(np.full(files, 0.7)).tolist()
    for state in ("cold", "warm"):
        report = run_once(measure_blend_order, weights, samples, str(folder / "order"))
        figures[f"order alone, {state}, s"] = report["seconds"]
        figures[f"order alone, {state}, CPU s"] = report["cpu"]
        figures[f"order alone, {state}, peak memory, MiB"] = report["mib"]
        figures[f"order alone, {state}, s per million samples read"] = report["reading"]
    figures["order alone, on disk, MiB"] = size_of(folder / "order") / 2**20
    prefixes = list(sparse_files(folder / "files", files, samples))
    for state in ("cold", "warm"):
        report = run_once(measure_blend, prefixes, samples, str(folder / "cache"))
        figures[f"blend, {state}, s (target {TARGETS[state]:.0f})"] = report["seconds"]
        figures[f"blend, {state}, CPU s"] = report["cpu"]
        figures[f"blend, {state}, anonymous memory, MiB"] = report["anonymous"]
        figures[f"blend, {state}, peak memory with file pages, MiB"] = report["mib"]
        figures[f"blend, {state}, s to the first sample"] = report["first"]
        figures[f"blend, {state}, ms for the first sample of a file"] = report["touch"]
        if state == "cold":
            figures["blend, indexes of a file, built when first read, MiB"] = report["index"]
    return figures


def run_once(build: Callable[..., Any], *arguments: object) -> Any:
    """Run work once in a new process and return its report."""
    contender = Contender(build.__name__, build, *arguments)
    try:
        return contender.run(1)
    finally:
        contender.close()


def measure_blend_order(weights: Sequence[float], samples: int, folder: str) -> Work:
    def work(count: int) -> dict[str, float]:
        before = peak_mib()
        begin = time.perf_counter()
        cpu = time.process_time()
        order = blend_order(weights, samples, ArrayCache([Path(folder)]))
        order.counts_at(samples)
        seconds = time.perf_counter() - begin
        cpu = time.process_time() - cpu
        first = samples // 2
        begin = time.perf_counter()
        million = min(1_000_000, samples - first)
        for position in range(first, first + million):
            order.locate(position)
        reading = (time.perf_counter() - begin) * 1e6 / million
        mib = peak_mib() - before
        return {"seconds": seconds, "cpu": cpu, "reading": reading, "mib": mib}

    return work


def measure_blend(prefixes: Sequence[str], samples: int, cache: str) -> Work:
    def work(count: int) -> dict[str, float]:
        before = peak_mib()
        anonymous = anonymous_mib()
        begin = time.perf_counter()
        cpu = time.process_time()
        train = dataset(prefixes, samples, cache)
        seconds = time.perf_counter() - begin
        cpu = time.process_time() - cpu
        anonymous = anonymous_mib() - anonymous
        train[0]
        first = time.perf_counter() - begin
        begin = time.perf_counter()
        mark = size_of(Path(cache))
        train[1], train[2], train[3]
        touch = (time.perf_counter() - begin) / 3 * 1e3
        index_mib = (size_of(Path(cache)) - mark) / 3 / 2**20
        return {
            "seconds": seconds,
            "cpu": cpu,
            "first": first,
            "touch": touch,
            "anonymous": anonymous,
            "mib": peak_mib() - before,
            "index": index_mib,
        }

    return work


def dataset(prefixes: Sequence[str], samples: int, cache: str) -> TokenDataset:
    built = build_datasets(
        DataFiles(DataConfig(data_path=tuple(prefixes), split="1", data_cache_path=cache)),
        seq_length=SEQUENCE,
        seed=1,
        num_samples=(samples, 0, 0),
        tokenizer_fingerprint="benchmark",
        vocab_size=VOCABULARY,
    )
    assert built.train is not None
    return built.train


def sparse_files(folder: Path, files: int, samples: int) -> Iterator[str]:
    """Write sparse pairs of which 20 epochs give `samples`; yield their prefixes."""
    folder.mkdir()
    documents = max(1, round(samples / 20 / files * SEQUENCE / MEAN_TOKENS))
    for number in range(files):
        prefix = folder / f"{number:05}_text_document"
        lengths = random_lengths(documents, number)
        pointers = np.cumsum(lengths, dtype=np.int64)
        with open(f"{prefix}.bin", "wb") as file:
            file.truncate(2 * int(pointers[-1]))
        with open(f"{prefix}.idx", "wb") as file:
            file.write(HEADER.pack(MAGIC, 1, 8, documents, documents + 1))
            file.write(lengths.astype("<i4").tobytes())
            file.write((2 * (pointers - lengths)).astype("<i8").tobytes())
            file.write(np.arange(documents + 1, dtype="<i8").tobytes())
        yield str(prefix)


# Reading.


def reading(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Measure samples per second in random order: bare arrays, dataset and data loader."""
    prefix = write_tokens(folder, arguments.read)
    figures: dict[str, Any] = {}
    for cold in (False, True):
        ways: dict[str, Callable[..., Any]] = {
            "bare numpy": bare_loop,
            "dataset, one by one": our_dataset,
            f"dataset, micro-batches of {MICRO_BATCH}": our_rows,
            "loader in the process": our_loader,
            "loader with one worker": our_worker,
        }
        contenders = [
            Contender(name, run_reading, way, prefix, cold, daemon=way is not our_worker)
            for name, way in ways.items()
        ]
        count = max(MICRO_BATCH, arguments.read // (10 if cold else 1))
        try:
            in_turn(contenders, 1, count)
            rounds = in_turn(contenders, arguments.rounds, count)
        finally:
            close(contenders)
        cache = "cold" if cold else "warm"
        for name, rates in zip(ways, rounds, strict=True):
            figures[f"{cache}: {name}, samples/s"] = round(statistics.median(rates))
        for name, rates in list(zip(ways, rounds, strict=True))[1:]:
            pairs = [ours / bare for ours, bare in zip(rates, rounds[0], strict=True)]
            target = f" (target {TARGETS['reading']})" if not cold else ""
            figures[f"{cache}: {name}, ratio to bare{target}"] = statistics.median(pairs)
    return figures


def run_reading(way: Callable[..., float], prefix: str, cold: bool) -> Work:
    """Read samples with `way`; if `cold`, drop the page cache and reopen the files first."""
    indexes = None if cold else open_indexed(prefix)

    def work(count: int) -> float:
        if indexes is None:
            drop_pages(prefix)
        return way(*(indexes or open_indexed(prefix)), count)

    return work


def open_indexed(prefix: str) -> tuple[IndexedDataset, SampleIndexes]:
    file = IndexedDataset(prefix)
    return file, build_indexes(file.lengths, np.arange(len(file)), len(file) - 9, SEQUENCE, 1)


def drop_pages(prefix: str) -> None:
    """Drop the token file from the page cache, except pages that a process has mapped."""
    with open(f"{prefix}.bin", "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def bare_loop(file: IndexedDataset, indexes: SampleIndexes, count: int) -> float:
    """Baseline: copy the tokens of each sample without any checks."""
    tokens = file.tokens
    documents = indexes.documents
    begins = (file.pointers // 2).tolist()
    lengths = file.lengths.tolist()
    starts = indexes.samples
    shuffle = indexes.shuffle
    wanted = SEQUENCE + 1
    begin = time.perf_counter()
    for position in range(count):
        at, offset = starts[shuffle[position]].tolist()
        row = np.empty(wanted, dtype=np.int32)
        filled = 0
        while filled < wanted:
            document = documents[at]
            size = min(lengths[document] - offset, wanted - filled)
            first = begins[document] + offset
            row[filled : filled + size] = tokens[first : first + size]
            filled += size
            at += 1
            offset = 0
    return count / (time.perf_counter() - begin)


def our_dataset(file: IndexedDataset, indexes: SampleIndexes, count: int) -> float:
    data = GPTDataset(file, indexes, SEQUENCE, VOCABULARY)
    begin = time.perf_counter()
    for position in range(count):
        data[position]
    return count / (time.perf_counter() - begin)


def our_rows(file: IndexedDataset, indexes: SampleIndexes, count: int) -> float:
    data = GPTDataset(file, indexes, SEQUENCE, VOCABULARY)
    begin = time.perf_counter()
    for position in range(0, count, MICRO_BATCH):
        SampleReading(data, range(position, position + MICRO_BATCH)).finish()
    return count / (time.perf_counter() - begin)


def our_loader(file: IndexedDataset, indexes: SampleIndexes, count: int, workers: int = 0) -> float:
    batches = MicroBatchIterator(
        GPTDataset(file, indexes, SEQUENCE, VOCABULARY),
        consumed=0,
        micro_batch_size=MICRO_BATCH,
        dp_rank=0,
        dp_size=1,
        num_workers=workers,
    )
    next(batches)  # starts the worker process
    begin = time.perf_counter()
    for _ in range(count // MICRO_BATCH):
        next(batches)
    seconds = time.perf_counter() - begin
    batches.close()
    return count / seconds


def our_worker(file: IndexedDataset, indexes: SampleIndexes, count: int) -> float:
    return our_loader(file, indexes, count, workers=1)


def write_tokens(folder: Path, samples: int) -> str:
    """Write a pair of random tokens with slightly more samples than are read; return its prefix."""
    prefix = folder / "tokens"
    rng = np.random.RandomState(0)
    lengths = random_lengths(samples + samples // 10 + 1000, 0)
    with pair_writer(prefix, np.uint16) as writer:
        for part in np.array_split(lengths, max(1, len(lengths) // 10_000)):
            tokens = rng.randint(0, VOCABULARY - 47, int(part.sum())).astype(np.uint16)
            writer.add_documents(tokens, part)
    return str(prefix)


# Shared helpers.


def random_lengths(documents: int, seed: int) -> Lengths:
    """Draw document lengths in tokens, log-normal like those of web text."""
    lengths = np.random.RandomState(seed).lognormal(np.log(MEAN_TOKENS) - 0.5, 1.0, documents)
    return np.clip(lengths, 1, 1 << 20).astype(np.int32)


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def anonymous_mib() -> float:
    """Return the current anonymous memory of this process."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.partition("RssAnon:")[2].split()[0]) / 1024


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*"))


def close(contenders: Sequence[Contender]) -> None:
    for contender in contenders:
        contender.close()


if __name__ == "__main__":
    sys.exit(main())
