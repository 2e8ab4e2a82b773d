"""Benchmark of tools/import_tokens.py beside copies of the same files.

    python benchmarks/import_tokens.py [--megabytes 400] [--rounds 3] [--output import.json]

Each format holds the same random documents of 700 tokens on average, in files of `--megabytes` in
all. A round runs in turn, as complete processes on one core: `cp`, which is the speed of the disk
and its cache, a floor that reads blocks through NumPy and writes them, and the tool. The result is
the median over rounds of MB of ids per second, by wall time and by CPU time without start-up, and
of the ratio to the floor's CPU seconds. Every output ends with an fsync.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import resource
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import parquet

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import this_machine, versions, write_json

REPOSITORY = Path(__file__).resolve().parents[1]
END = 50256
MEAN_TOKENS = 700
SHARD_DOCUMENTS = 40_000
WIDTHS = {"llm.c, 32 bits": 2, "parquet": 4}
"""Bytes of an id as stored, per id of the other formats; the file of 32 bits has half of them."""
SUFFIXES = (".bin", ".ds", ".npy", ".mds", ".parquet", ".jsonl")
"""Ends of the names of the files with ids."""
TARGET = 300.0
"""MB of ids per second on one core."""
FLOOR_CODE = """
import os, sys
import numpy as np
with open(sys.argv[1], "wb") as out:
    for path in sys.argv[2:]:
        content = np.memmap(path, np.uint8, "r")
        for first in range(0, len(content), 1 << 22):
            out.write(content[first : first + (1 << 22)].data)
    out.flush()
    os.fsync(out.fileno())
"""


def texts(megabytes: int) -> tuple[np.ndarray, np.ndarray]:
    """Ids of 16 bits, and the ends of the documents, each of which ends with the end token."""
    random = np.random.default_rng(7)
    count = megabytes * 500_000
    lengths = random.geometric(1 / MEAN_TOKENS, count // MEAN_TOKENS)
    ends = np.cumsum(lengths)
    tokens = random.integers(0, END, int(ends[-1]), dtype=np.uint16)
    tokens[ends - 1] = END
    return tokens, ends


def write_flat(folder: Path, tokens: np.ndarray, ends: np.ndarray) -> None:
    tokens.tofile(folder / "train.bin")


def write_llm_c(folder: Path, tokens: np.ndarray, ends: np.ndarray) -> None:
    head = struct.pack("<3i", 20240520, 1, len(tokens)).ljust(1024, b"\0")
    (folder / "shard.bin").write_bytes(head + np.roll(tokens, 1).tobytes())


def write_wide(folder: Path, tokens: np.ndarray, ends: np.ndarray) -> None:
    half = tokens[: int(ends[len(ends) // 2])]
    head = struct.pack("<3i", 20240801, 7, len(half)).ljust(1024, b"\0")
    (folder / "shard.bin").write_bytes(head + np.roll(half, 1).astype("<u4").tobytes())


def write_datatrove(folder: Path, tokens: np.ndarray, ends: np.ndarray) -> None:
    tokens.tofile(folder / "0.ds")
    ends.astype("<u8").tofile(folder / "0.ds.index")
    (folder / "0.ds.metadata").write_text(f"tokenizer.json|2\n{len(tokens)}\n")


def write_olmo(folder: Path, tokens: np.ndarray, ends: np.ndarray) -> None:
    tokens.tofile(folder / "0.npy")
    starts = np.concatenate([[0], ends[:-1]])
    rows = "".join(f"{a},{b}\n" for a, b in zip(starts.tolist(), ends.tolist(), strict=True))
    (folder / "0.csv.gz").write_bytes(gzip.compress(rows.encode(), 1))


def mds_shard(samples: Sequence[bytes]) -> bytes:
    columns = {"column_encodings": ["ndarray:uint16"], "column_names": ["tokens"]}
    description = json.dumps(columns).encode()
    sizes = np.array([0, *map(len, samples)], np.int64)
    begin = 4 * (len(samples) + 2) + len(description)
    offsets = (begin + np.cumsum(sizes)).astype("<u4")
    return struct.pack("<I", len(samples)) + offsets.tobytes() + description + b"".join(samples)


def write_mds(folder: Path, tokens: np.ndarray, ends: np.ndarray, row: int = 0) -> None:
    """Documents, or rows of `row` tokens."""
    if row:
        ends = np.arange(row, len(tokens) + 1, row)
    shards: list[dict[str, Any]] = []
    starts = np.concatenate([[0], ends[:-1]]).tolist()
    pairs = list(zip(starts, ends.tolist(), strict=True))
    for first in range(0, len(pairs), SHARD_DOCUMENTS):
        samples = []
        for begin, end in pairs[first : first + SHARD_DOCUMENTS]:
            content = tokens[begin:end].tobytes()
            wide = end - begin > 255
            head = struct.pack("<BH" if wide else "<BB", 1 << 2 | wide, end - begin)
            samples.append(struct.pack("<I", len(head) + len(content)) + head + content)
        name = f"shard.{len(shards):05}.mds"
        shard = mds_shard(samples)
        (folder / name).write_bytes(shard)
        entry = {"basename": name, "bytes": len(shard), "hashes": {}}
        columns = {"column_encodings": ["ndarray:uint16"], "column_names": ["tokens"]}
        more = {"column_sizes": [None], "compression": None, "format": "mds", "zip_data": None}
        shards.append(columns | more | {"raw_data": entry, "samples": len(samples)})
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": shards}))


def write_mds_rows(folder: Path, tokens: np.ndarray, ends: np.ndarray) -> None:
    write_mds(folder, tokens, ends, 2048)


def write_litdata(folder: Path, tokens: np.ndarray, ends: np.ndarray) -> None:
    offsets = (4 * (len(ends) + 2) + 2 * np.concatenate([[0], ends])).astype("<u4")
    content = struct.pack("<I", len(ends)) + offsets.tobytes() + tokens.tobytes()
    (folder / "chunk-0-0.bin").write_bytes(content)
    chunk = {"chunk_bytes": len(content), "chunk_size": len(ends), "dim": len(tokens)}
    config = {"data_format": ["no_header_tensor:20"], "compression": None}
    index = {"chunks": [chunk | {"filename": "chunk-0-0.bin"}], "config": config}
    (folder / "index.json").write_text(json.dumps(index))


def write_parquet(folder: Path, tokens: np.ndarray, ends: np.ndarray) -> None:
    offsets = pa.array(np.concatenate([[0], ends]).astype(np.int32))
    ids = pa.ListArray.from_arrays(offsets, pa.array(tokens.astype(np.int32)))
    table = pa.table({"input_ids": ids})
    parquet.write_table(table, folder / "0.parquet", row_group_size=20_000, compression="none")


def write_json_lines(folder: Path, tokens: np.ndarray, ends: np.ndarray) -> None:
    starts = np.concatenate([[0], ends[:-1]]).tolist()
    with (folder / "0.jsonl").open("w") as file:
        for begin, end in zip(starts, ends.tolist(), strict=True):
            file.write(json.dumps({"input_ids": tokens[begin:end].tolist()}) + "\n")


Write = Callable[[Path, np.ndarray, np.ndarray], None]
FORMATS: dict[str, tuple[Write, tuple[str, ...]]] = {
    "nanogpt": (write_flat, ("--end-token", str(END))),
    "llm.c": (write_llm_c, ("--end-token", str(END))),
    "llm.c, 32 bits": (write_wide, ("--end-token", str(END))),
    "datatrove": (write_datatrove, ()),
    "olmo": (write_olmo, ()),
    "mds, documents": (write_mds, ()),
    "mds, rows": (write_mds_rows, ()),
    "litdata": (write_litdata, ()),
    "parquet": (write_parquet, ()),
    "json lines": (write_json_lines, ()),
}
TEXT = "json lines"
"""The format whose ids are text, which has no target."""


def timed(command: Sequence[str]) -> tuple[float, float]:
    """Wall and CPU seconds of a process."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wall = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def measure(name: str, folder: Path, megabytes: int, rounds: int) -> dict[str, Any]:
    write, flags = FORMATS[name]
    source = folder / "in"
    empty = folder / "small"
    for path, size in ((source, megabytes), (empty, 1)):
        path.mkdir()
        write(path, *texts(size))
    files = sorted(str(path) for path in source.iterdir() if path.suffix in SUFFIXES)
    id_bytes = texts(megabytes)[0].nbytes * WIDTHS.get(name, 2) / 2e6
    out = str(folder / "out")
    tool = [sys.executable, str(REPOSITORY / "tools/import_tokens.py"), "--overwrite"]
    tool += ["--output-prefix", out, "--vocab-size", "50257", *flags, "--input"]
    seconds: dict[str, list[tuple[float, float]]] = {}
    for _ in range(rounds):
        for contender, command in (
            ("cp", ["cp", *files, str(folder)]),
            ("floor", [sys.executable, "-c", FLOOR_CODE, str(folder / "floor"), *files]),
            ("tool", [*tool, str(source)]),
            ("start", [*tool, str(empty)]),
        ):
            seconds.setdefault(contender, []).append(timed(command))
    cpu = [
        whole[1] - start[1] for whole, start in zip(seconds["tool"], seconds["start"], strict=True)
    ]
    floor = [cpu for _, cpu in seconds["floor"]]
    return {
        "id_megabytes": id_bytes,
        "wall_mb_per_s": id_bytes / statistics.median(wall for wall, _ in seconds["tool"]),
        "cp_wall_mb_per_s": id_bytes / statistics.median(wall for wall, _ in seconds["cp"]),
        "cpu_mb_per_s": id_bytes / statistics.median(cpu),
        "cpu_ratio_to_floor": statistics.median(a / b for a, b in zip(cpu, floor, strict=True)),
        "seconds": seconds,
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="*", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--output", type=Path, help="output file (JSON)")
    args = parser.parse_args(argv)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    results = {}
    for name in args.only:
        with tempfile.TemporaryDirectory() as folder:
            results[name] = measure(name, Path(folder), args.megabytes, args.rounds)
        found = results[name]
        print(
            f"{name}: {found['cpu_mb_per_s']:.0f} MB/s of CPU time, {found['wall_mb_per_s']:.0f} "
            f"of wall time with start-up (cp {found['cp_wall_mb_per_s']:.0f}), "
            f"{found['cpu_ratio_to_floor']:.2f} of the floor's CPU seconds",
            flush=True,
        )
    slow = [name for name, one in results.items() if one["cpu_mb_per_s"] < TARGET and name != TEXT]
    if args.output:
        write_json(
            args.output,
            {
                "machine": asdict(this_machine()),
                "versions": versions(("numpy", "pyarrow")),
                **results,
            },
        )
    return bool(slow)


if __name__ == "__main__":
    raise SystemExit(main())
