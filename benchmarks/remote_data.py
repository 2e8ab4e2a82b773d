"""Benchmark of training data by URL against the same files on the disk.

    python benchmarks/remote_data.py [--only reading|waiting] [--rounds 9] [--output remote.json]

reading: Samples per second in random order, of files whose blocks are all in the node's cache, by
    URL and by path. Contenders run in turn, each in its own process with one thread; ratios are
    medians over the rounds. What is read in the measured process is per second of its CPU time,
    which other load on the machine affects less.
waiting: Time that steps of a fixed duration wait for their micro-batches, with an empty cache and a
    server that answers each request after 20 ms, and the same with local files. Blocks are smaller
    than a run's, so that all steps need blocks that are not in the cache.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import Contender, Work, in_turn, this_machine, versions, write_json
from benchmarks.data import MICRO_BATCH, SEQUENCE, VOCABULARY, close, report, write_tokens
from megatron_ds.data.gpt_dataset import GPTDataset
from megatron_ds.data.micro_batches import MicroBatchIterator
from megatron_ds.data.remote.block_cache import BLOCK_BYTES
from megatron_ds.data.remote.token_cache import TokenCache
from megatron_ds.data.sample_index import build_indexes
from megatron_ds.data.token_dataset import SampleReading
from megatron_ds.data.token_files.indexed_dataset import IndexedDataset
from tests.object_server import BUCKET, FolderServer

TARGET = 0.8
LATENCY_S = 0.02
STEP_S = 0.1
STEPS = 150
FIRST_STEPS = 4
SMALL_BLOCK = 1 << 14


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--only", choices=("reading", "waiting"), help="run a single benchmark")
    parser.add_argument("--rounds", type=int, default=9, help="number of rounds")
    parser.add_argument("--read", type=int, default=50_000, help="samples to read per round")
    parser.add_argument("--folder", type=Path, help="folder for temporary files (needs 1 GB)")
    parser.add_argument("--output", type=Path, help="output file (JSON)")
    arguments = parser.parse_args(argv)
    results: dict[str, Any] = {}
    for name, benchmark in {"reading": reading, "waiting": waiting}.items():
        if arguments.only in (None, name):
            with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
                write_tokens(Path(folder), arguments.read)
                results[name] = benchmark(arguments, Path(folder))
            print(report(name, results[name]), flush=True)
    if arguments.output is not None:
        about = {"machine": asdict(this_machine()), "versions": versions(["numpy", "obstore"])}
        write_json(arguments.output, {**about, **results})
    return 0


def reading(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Measure samples per second: micro-batches of the dataset, and of the loader."""
    server = FolderServer(folder)
    os.environ.update(server.variables)
    prefixes = {"path": f"{folder}/tokens", "URL": f"s3://{BUCKET}/tokens"}
    ways = {"dataset": None, "loader in the process": 0, "loader with one worker": 1}
    contenders = [
        Contender(f"{way}, {kind}", reader, prefix, str(folder / "cache"), workers, daemon=False)
        for way, workers in ways.items()
        for kind, prefix in prefixes.items()
    ]
    try:
        in_turn(contenders, 1, arguments.read)  # downloads, and maps all pages
        rounds = in_turn(contenders, arguments.rounds, arguments.read)
    finally:
        close(contenders)
    figures: dict[str, Any] = {}
    for way, local, remote in zip(ways, rounds[::2], rounds[1::2], strict=True):
        figures[f"{way}, path, samples/s"] = round(statistics.median(local))
        figures[f"{way}, URL, samples/s"] = round(statistics.median(remote))
        pairs = [ours / theirs for ours, theirs in zip(remote, local, strict=True)]
        figures[f"{way}, ratio (target {TARGET})"] = statistics.median(pairs)
        figures[f"{way}, ratio of each round"] = " ".join(f"{pair:.2f}" for pair in pairs)
    return figures


def open_dataset(prefix: str, cache: str, block_bytes: int = BLOCK_BYTES) -> GPTDataset:
    file = IndexedDataset(prefix, TokenCache(cache, block_bytes=block_bytes))
    indexes = build_indexes(file.lengths, np.arange(len(file)), len(file) - 9, SEQUENCE, 1)
    return GPTDataset(file, indexes, SEQUENCE, VOCABULARY)


def loader(dataset: GPTDataset, workers: int) -> MicroBatchIterator:
    return MicroBatchIterator(
        dataset,
        consumed=0,
        micro_batch_size=MICRO_BATCH,
        dp_rank=0,
        dp_size=1,
        num_workers=workers,
    )


def reader(prefix: str, cache: str, workers: int | None) -> Work:
    """Read samples by micro-batches, with a loader if `workers` is given."""
    dataset = open_dataset(prefix, cache)

    def work(count: int) -> float:
        if workers is None:
            begin = time.process_time()
            for position in range(0, count, MICRO_BATCH):
                SampleReading(dataset, range(position, position + MICRO_BATCH)).finish()
            return count / (time.process_time() - begin)
        clock = time.perf_counter if workers else time.process_time
        batches = loader(dataset, workers)
        next(batches)  # starts the worker process
        begin = clock()
        for _ in range(count // MICRO_BATCH - 1):
            next(batches)
        seconds = clock() - begin
        batches.close()
        return count / seconds

    return work


def waiting(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Measure how long steps wait for micro-batches that are downloaded."""
    figures: dict[str, Any] = {
        "latency, ms": 1000 * LATENCY_S,
        "step, ms": 1000 * STEP_S,
        "steps": STEPS,
        "samples of a step": MICRO_BATCH,
    }
    server = FolderServer(folder, LATENCY_S)
    os.environ.update(server.variables)
    prefixes = {"URL": f"s3://{BUCKET}/tokens", "path": f"{folder}/tokens"}
    for workers, kind in itertools.product((0, 1, 2), prefixes):
        server.requests.clear()
        cache = str(folder / f"cache{workers}")
        contender = Contender("steps", steps, prefixes[kind], cache, workers, daemon=False)
        try:
            opened, waits = contender.run(STEPS)
        finally:
            contender.close()
        later = waits[FIRST_STEPS:]
        name = f"{workers} workers, {kind}"
        figures[f"{name}: opening the files, s"] = opened
        figures[f"{name}: the first steps wait, ms"] = " ".join(
            f"{1000 * each:.1f}" for each in waits[:FIRST_STEPS]
        )
        figures[f"{name}: later steps wait, median, ms"] = 1000 * statistics.median(later)
        figures[f"{name}: later steps wait, longest, ms"] = 1000 * max(later)
        figures[f"{name}: later steps wait, of all time, %"] = (
            100 * sum(later) / (sum(later) + STEP_S * len(later))
        )
        if kind == "URL":
            figures[f"{name}: requests"] = len(server.requests)
    return figures


def steps(prefix: str, cache: str, workers: int) -> Work:
    def work(count: int) -> tuple[float, list[float]]:
        begin = time.perf_counter()
        batches = loader(open_dataset(prefix, cache, SMALL_BLOCK), workers)
        opened = time.perf_counter() - begin
        waits = []
        for _ in range(count):
            begin = time.perf_counter()
            next(batches)
            waits.append(time.perf_counter() - begin)
            time.sleep(STEP_S)
        batches.close()
        return opened, waits

    return work


if __name__ == "__main__":
    sys.exit(main())
