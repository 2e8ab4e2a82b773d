"""What grows how with ranks, parameters and tokens, measured by simulation on one machine.

    python benchmarks/scale.py [--largest 4096] [--output scale.json] [--pictures docs/images]

Ranks are threads or forked processes that run the start-up functions of the package, or one process
with torch's fake process group, which has the rank and the groups of a large run and communicates
nothing. docs/running/scale.md says what each part simulates.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import this_machine, versions, write_json
from benchmarks.simulated_ranks import (
    RANKS_PER_HOST,
    RankThreads,
    attend_roll_call,
    count_start_calls,
    place_of,
    say_where,
    write_shared_files,
)
from megatron_ds.checkpoint.files.file_assignment import FileAssignment
from megatron_ds.checkpoint.metadata import manifest_text
from megatron_ds.data.blend.blend_schedule import FAIR, blend_order
from megatron_ds.data.index_cache import ArrayCache
from megatron_ds.data.sample_index import build_indexes, index_bytes
from megatron_ds.fileio.atomic import FileRecord

HERE = Path(__file__).resolve().parent.parent
SIZES = (8, 64, 256, 1024, 4096)
GLOO_SIZES = (8, 16, 32, 64, 128)
TP = 8
PP = 4
SEQ_LENGTH = 2048
HIDDEN_SIZES = (128, 256, 512, 1024)

Curve = dict[str, list[float]]
"""Columns of a table, of which the first is the size."""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--largest", type=int, default=SIZES[-1], help="largest number of ranks")
    parser.add_argument("--largest-gloo", type=int, default=GLOO_SIZES[-1], help="the same of gloo")
    parser.add_argument("--largest-hidden", type=int, default=HIDDEN_SIZES[-1], help="of a model")
    parser.add_argument("--output", type=Path, help="output file (JSON)")
    parser.add_argument("--pictures", type=Path, help="folder for the pictures")
    arguments = parser.parse_args(argv)
    sizes = [size for size in SIZES if size <= arguments.largest]
    gloo = [size for size in GLOO_SIZES if size <= arguments.largest_gloo]
    hidden = [size for size in HIDDEN_SIZES if size <= arguments.largest_hidden]
    curves: dict[str, Curve] = {}
    parts: list[tuple[str, Callable[[], Curve]]] = [
        ("start calls", lambda: start_calls(sizes)),
        ("start messages", lambda: rows(in_fork(start_messages, size) for size in sizes)),
        ("gloo group", lambda: rows(gloo_group(size) for size in gloo)),
        ("mesh", lambda: rows(in_fork(mesh, size) for size in sizes)),
        ("manifest", lambda: rows(manifest(size) for size in sizes)),
        ("checkpoint and log", lambda: rows(small_run(size) for size in hidden)),
        ("index", lambda: rows(in_fork(index, size) for size in (10**6, 10**7, 10**8, 10**9))),
        ("blend", lambda: rows(in_fork(blend, size) for size in (10**5, 10**6, 10**7, 10**8))),
    ]
    for name, measure in parts:
        curves[name] = measure()
        print_table(name, curves[name])
    result = {
        "machine": vars(this_machine()),
        "versions": versions(["torch", "numpy", "deepspeed"]),
        "curves": curves,
    }
    if arguments.output:
        write_json(arguments.output, result)
    if arguments.pictures:
        plot(curves, arguments.pictures)
    return 0


def rows(measured: Any) -> Curve:
    """Rows with the same names as columns."""
    curve: Curve = {}
    for row in measured:
        for name, value in row.items():
            curve.setdefault(name, []).append(value)
    return curve


def in_fork(measure: Callable[[int], dict[str, float]], size: int) -> dict[str, float]:
    """Measures in a process of its own, whose memory nothing else has used."""
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        os.close(reader)
        os.write(writer, json.dumps(measure(size)).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as file:
        text = file.read()
    if os.waitpid(child, 0)[1]:
        raise RuntimeError(f"{measure.__name__} of {size} failed")
    row: dict[str, float] = json.loads(text)
    return row


def start_calls(sizes: Sequence[int]) -> Curve:
    """Calls of the file system of a start on shared files, counted in forked ranks."""
    found = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        flags = write_shared_files(folder, sources=3)
        for world_size in sizes:
            count_start_calls(flags, folder, 1, world_size)  # builds the indexes
            hosts = max(1, world_size // RANKS_PER_HOST)
            measured = min(hosts, 2)
            per_host = []
            samples = set()
            start = time.perf_counter()
            for host in range(measured):
                first = host * RANKS_PER_HOST
                calls = count_start_calls(flags, folder, RANKS_PER_HOST, world_size, first)
                samples |= {each.pop("sample") for each in calls}
                per_host.append(sum(each.total() for each in calls))
            row = {
                "ranks": world_size,
                "hosts that were started": measured,
                "most calls of a host": max(per_host),
                "calls of all hosts": round(sum(per_host) / measured * hosts),
                "seconds": time.perf_counter() - start,
            }
            found.append(row)
    return rows(found)


def start_messages(size: int) -> dict[str, float]:
    """What all ranks exchange through the store before and after it connects them, as threads."""
    ranks = RankThreads(size)
    start = time.perf_counter()
    results = ranks.run(say_where)
    assert all(result is not None for result in results)
    seconds = time.perf_counter() - start
    traffic = ranks.store.traffic
    row: dict[str, float] = {"ranks": size}
    row |= {"requests": traffic["requests"], "bytes": traffic["bytes"]}
    message = len(json.dumps([each.to_json() for each in place_of(0)]))
    row |= {"bytes, all to all": message * size * size, "seconds": seconds}
    ranks = RankThreads(size)
    assert all(ranks.run(attend_roll_call))
    traffic = ranks.store.traffic
    return row | {"requests, roll call": traffic["requests"], "bytes, roll call": traffic["bytes"]}


def gloo_group(size: int) -> dict[str, float]:
    """Bytes in the store and sockets of one gloo group and its first collectives."""
    row: dict[str, float] = {"ranks": size}
    for name, value in (("on demand", "1"), ("all pairs", "0")):
        command = [sys.executable, __file__, "--gloo", str(size)]
        done = subprocess.run(
            command,
            env={**os.environ, "TORCH_GLOO_LAZY_INIT": value, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=True,
        )
        sent, sockets = map(int, done.stdout.split())
        row |= {f"bytes, {name}": sent, f"sockets, {name}": sockets}
    return row


def run_gloo(size: int) -> None:
    """Prints the bytes between the store and its clients, and the sockets of the ranks.

    The ranks are threads of this process, with a client of the store each. A proxy counts.
    """
    import torch
    import torch.distributed as dist
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    server = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    proxy = socket.create_server(("127.0.0.1", 0), backlog=size)
    counts = [0]
    lock = threading.Lock()

    def pump(source: socket.socket, target: socket.socket) -> None:
        while data := source.recv(1 << 16):
            with lock:
                counts[0] += len(data)
            target.sendall(data)

    def serve() -> None:
        while True:
            client, _ = proxy.accept()
            upstream = socket.create_connection(("127.0.0.1", server.port))
            for pair in ((client, upstream), (upstream, client)):
                threading.Thread(target=pump, args=pair, daemon=True).start()

    groups: list[Any] = []

    def rank(number: int) -> None:
        store = TCPStore("127.0.0.1", proxy.getsockname()[1], None, False, wait_for_workers=False)
        group: Any = dist.ProcessGroupGloo(store, number, size, timedelta(seconds=60))
        groups.append((group, store))
        value = torch.ones(8)
        group.allreduce([value]).wait()
        assert value[0] == size
        group.broadcast([value], 0).wait()
        parts = [[torch.empty(8) for _ in range(size)]] if number == 0 else []
        group.gather(parts, [value], 0).wait()
        group.barrier().wait()

    threading.Thread(target=serve, daemon=True).start()
    threads = [threading.Thread(target=rank, args=(number,)) for number in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    descriptors = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    names = [os.readlink(path) for path in descriptors if os.path.islink(path)]
    sockets = sum("socket:" in name for name in names)
    print(counts[0], sockets - 4 * size, flush=True)  # each client of the store has four here
    os._exit(0)


def mesh(size: int) -> dict[str, float]:
    """Process groups of a rank in the middle, over torch's fake process group."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from megatron_ds.parallel.mesh import Mesh

    dist.init_process_group("fake", rank=size // 3, world_size=size, store=FakeStore())
    before = resident_bytes()
    start = time.perf_counter()
    built = Mesh.build(min(TP, size), pp_size=PP if size >= TP * PP else 1)
    seconds = time.perf_counter() - start
    assert built.world_size == size
    groups = len(dist.distributed_c10d._world.pg_map)
    used = resident_bytes() - before
    return {"ranks": size, "groups": groups, "seconds": seconds, "bytes": used}


def manifest(size: int) -> dict[str, float]:
    """The manifest of a checkpoint of so many ranks, with a file of states each."""
    tp = min(TP, size)
    names = [
        f"zero_pp_rank_{rank // tp}_mp_rank_{rank % tp:02d}_optim_states.pt" for rank in range(size)
    ]
    names += [f"mp_rank_{rank:02d}_model_states.pt" for rank in range(tp)]
    record = FileRecord.of(b"content")
    text = manifest_text(dict.fromkeys(names, record))
    start = time.perf_counter()
    parts = FileAssignment(tp, size // tp, size).by_rank(dict.fromkeys(names, record))
    seconds = time.perf_counter() - start
    assert sum(map(len, parts)) == len(names)
    return {"ranks": size, "files": len(names), "bytes": len(text), "assignment, seconds": seconds}


def small_run(hidden: int) -> dict[str, float]:
    """The checkpoint and the logs of a run of one process and 20 steps."""
    from megatron_ds.data.token_files.indexed_writer import pair_writer

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with pair_writer(folder / "tokens", "uint16") as writer:
            for length in range(500, 700):
                writer.add_documents([token % 1000 for token in range(length)], [length])
        line = (
            f"--num-layers 4 --hidden-size {hidden} --num-attention-heads 4 --seq-length 64 "
            "--micro-batch-size 1 --train-iters 20 --lr 1e-4 --vocab-size 8191 --split 1,0,0 "
            "--tokenizer-type NullTokenizer --eval-iters 0 --bf16 --log-interval 1 "
            f"--save {folder}/run --data-path {folder}/tokens --log-dir {folder}/logs"
        )
        command = [sys.executable, str(HERE / "pretrain_gpt.py"), *line.split()]
        times: dict[str, float] = {}
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for text in process.stdout:
                for mark in ("saving checkpoint", "successfully saved"):
                    if mark in text:
                        times[mark] = time.perf_counter()
        if process.returncode:
            raise RuntimeError(f"the run ended with status {process.returncode}")
        (checkpoint,) = (folder / "run").glob("global_step*")
        files = [path for path in checkpoint.rglob("*") if path.is_file()]
        # Weights of attention and MLP, norms and biases; embedding and positions.
        parameters = 4 * (12 * hidden**2 + 13 * hidden) + (8192 + 64 + 2) * hidden
        size = sum(path.stat().st_size for path in files)
        described = sum(path.stat().st_size for path in files if path.suffix == ".json")
        metrics = (folder / "run" / "metrics.jsonl").stat().st_size / 20
        printed = (folder / "logs" / "rank0.log").stat().st_size
    return {
        "parameters": parameters,
        "checkpoint bytes": size,
        "bytes per parameter": size / parameters,
        "run.json and manifest bytes": described,
        "save, seconds": times["successfully saved"] - times["saving checkpoint"],
        "metrics.jsonl bytes per record": metrics,
        "log of rank 0, bytes": printed,
    }


def index(tokens: int) -> dict[str, float]:
    """The indexes of one epoch over documents of 1000 tokens."""
    documents = tokens // 1000
    lengths = np.full(documents, 1000, np.int32)
    samples = (tokens - 1) // SEQ_LENGTH
    before = peak_bytes()
    start = time.perf_counter()
    built = build_indexes(lengths, np.arange(documents), samples, SEQ_LENGTH, 1)
    seconds = time.perf_counter() - start
    peak = peak_bytes() - before
    size = sum(array.nbytes for array in vars(built).values())
    predicted = index_bytes(samples, documents, tokens, SEQ_LENGTH)
    return {
        "tokens": tokens,
        "bytes": size,
        "bytes, predicted": predicted,
        "seconds": seconds,
        "peak bytes of the builder": peak,
    }


def blend(samples: int) -> dict[str, float]:
    """The order of a blend of 100 sources."""
    weights = [1 / (1 + number) for number in range(100)]
    weights = [weight / sum(weights) for weight in weights]
    with tempfile.TemporaryDirectory() as folder:
        before = peak_bytes()
        start = time.perf_counter()
        order = blend_order(weights, samples, ArrayCache([Path(folder)]), FAIR)
        order.counts_at(samples)
        seconds = time.perf_counter() - start
        stored = sum(path.stat().st_size for path in Path(folder).iterdir())
    used = peak_bytes() - before
    return {"samples": samples, "peak bytes": used, "stored bytes": stored, "seconds": seconds}


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def print_table(title: str, curve: Curve) -> None:
    print(f"\n{title}\n| {' | '.join(curve)} |\n|{'---|' * len(curve)}")
    for row in zip(*curve.values(), strict=True):
        print(
            f"| {' | '.join(f'{value:.4g}' if value < 1e4 else f'{value:,.0f}' for value in row)} |"
        )
    sys.stdout.flush()


PANELS = {
    "start": (
        ("start calls", "Calls of the file system", ("most calls of a host", "calls of all hosts")),
        (
            "start messages",
            "Bytes in the store at a start",
            ("bytes", "bytes, all to all", "bytes, roll call"),
        ),
        ("gloo group", "Bytes in the store, gloo", ("bytes, on demand", "bytes, all pairs")),
        ("gloo group", "Sockets of a gloo group", ("sockets, on demand", "sockets, all pairs")),
        ("mesh", "Process groups of a rank", ("groups",)),
        ("mesh", "Seconds to create them", ("seconds",)),
    ),
    "data": (
        ("manifest", "Bytes of the manifest", ("bytes",)),
        ("checkpoint and log", "Bytes of a checkpoint", ("checkpoint bytes",)),
        (
            "checkpoint and log",
            "Bytes of logs",
            ("metrics.jsonl bytes per record", "log of rank 0, bytes"),
        ),
        ("checkpoint and log", "Seconds of a save", ("save, seconds",)),
        ("index", "Seconds of indexes", ("seconds",)),
        ("index", "Bytes of indexes", ("bytes", "bytes, predicted", "peak bytes of the builder")),
        ("blend", "Bytes of a blend's order", ("peak bytes", "stored bytes")),
        ("blend", "Seconds of a blend's order", ("seconds",)),
    ),
}


DECADES = 40
"""Ratio of the largest to the smallest value from which an axis is logarithmic."""


def plot(curves: dict[str, Curve], folder: Path) -> None:
    """Writes a picture of each group of panels."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    for name, panels in PANELS.items():
        figure, axes = pyplot.subplots(2, len(panels) // 2, figsize=(11, 6), layout="constrained")
        for place, (key, title, columns) in zip(axes.flat, panels, strict=True):
            curve = curves[key]
            x_name, *_ = curve
            for column in columns:
                values = [value or float("nan") for value in curve[column]]
                place.plot(curve[x_name], values, marker="o", markersize=3, label=column)
            place.set(xscale="log", xlabel=x_name, title=title)
            shown = [value for column in columns for value in curve[column] if value]
            if max(shown) > DECADES * min(shown):
                place.set_yscale("log")
            else:
                place.set_ylim(bottom=0)
            place.minorticks_off()
            place.grid(alpha=0.3)
            if len(columns) > 1:
                place.legend(fontsize="small")
        figure.savefig(folder / f"scale_{name}.png", dpi=80)
        pyplot.close(figure)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--gloo"]:
        run_gloo(int(sys.argv[2]))
    sys.exit(main())
