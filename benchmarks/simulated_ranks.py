"""Simulated ranks, which run the start-up functions of the package, to count what they cost.

`RankThreads` are ranks as threads with a store in this process, for what ranks say to each other.
`count_start_calls` forks the ranks of a host, which start up to their datasets without a process
group, and counts their calls of the file system.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import socket
import sys
import tempfile
import threading
import types
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed import distributed_c10d

from megatron_ds import extend, schedules
from megatron_ds.checkpoint.folders.shared_folders import SharedFolders
from megatron_ds.checkpoint.lineage import Lineage
from megatron_ds.checkpoint.location import RunFolders
from megatron_ds.checkpoint.metadata import (
    MANIFEST,
    RUN,
    DataOrder,
    ParallelLayout,
    RunRecord,
    manifest_text,
)
from megatron_ds.config import Config
from megatron_ds.data.build_datasets import build_datasets
from megatron_ds.data.token_files.indexed_writer import pair_writer
from megatron_ds.fileio.atomic import FileRecord
from megatron_ds.launch import environment, software
from megatron_ds.launch.ranks import distributed, roll_call
from megatron_ds.launch.ranks.host_variables import HostVariables
from megatron_ds.launch.ranks.roll_call import RollCall
from megatron_ds.launch.watch.liveness import HostLocation, ProcessHandle
from megatron_ds.planning import host_checks  # which the checks import, with torch
from megatron_ds.train_state import TrainState
from megatron_ds.training.start import preflight

RANKS_PER_HOST = 8
PREPARED = (host_checks,)
"""Modules that a start imports late: a forked rank has them already."""
COUNTED = ("stat", "lstat", "access", "readlink", "listdir", "scandir", "mkdir", "unlink", "rename")
"""Functions of `os` that ask the file system; `open` besides."""
VOCABULARY = 1000


class CountingStore:
    """A store of this process, which counts what ranks send and receive."""

    def __init__(self) -> None:
        self.traffic: Counter[str] = Counter()
        """Requests, and bytes of keys and values."""
        self._values: dict[str, str] = {}
        self._counters: Counter[str] = Counter()
        self._is_set: defaultdict[str, threading.Event] = defaultdict(threading.Event)
        self._lock = threading.Lock()

    def set(self, key: str, value: str) -> None:
        self._count(key, value)
        self._values[key] = value
        with self._lock:
            self._is_set[key].set()

    def get(self, key: str) -> bytes:
        with self._lock:
            event = self._is_set[key]
        if not event.wait(60.0):
            raise TimeoutError(key)
        self._count(key, self._values[key])
        return self._values[key].encode()

    def check(self, keys: Sequence[str]) -> bool:
        self._count("".join(keys), "")
        with self._lock:
            return all(self._is_set[key].is_set() for key in keys)

    def wait(self, keys: Sequence[str], timeout: timedelta) -> None:
        """Waits longer than asked for: what a rank repeats depends on the time that it waits."""
        for key in keys:
            self.get(key)

    def add(self, key: str, amount: int) -> int:
        if amount:  # otherwise the first rank asks again and again how many have come
            self._count(key, "")
        with self._lock:
            self._counters[key] += amount
            return self._counters[key]

    def _count(self, key: str, value: str) -> None:
        with self._lock:
            self.traffic["requests"] += 1
            self.traffic["bytes"] += len(key) + len(value)


class StoreBelow:
    """The keys of a store that start with a prefix."""

    def __init__(self, prefix: str, store: Any) -> None:
        self._prefix = prefix
        self._store = store

    def set(self, key: str, value: str) -> None:
        self._store.set(self._prefix + key, value)

    def get(self, key: str) -> bytes:
        return self._store.get(self._prefix + key)  # type: ignore[no-any-return]

    def check(self, keys: Sequence[str]) -> bool:
        return self._store.check([self._prefix + key for key in keys])  # type: ignore[no-any-return]

    def wait(self, keys: Sequence[str], timeout: timedelta) -> None:
        self._store.wait([self._prefix + key for key in keys], timeout)

    def add(self, key: str, amount: int) -> int:
        return self._store.add(self._prefix + key, amount)  # type: ignore[no-any-return]


class RankThreads:
    """Ranks as threads of this process, with a store in place of the network."""

    def __init__(self, count: int) -> None:
        self.store = CountingStore()
        self.count = count
        self._own = threading.local()

    def run(self, work: Callable[[int], Any]) -> list[Any]:
        """Calls `work` with each rank; returns what the ranks return."""
        results: list[Any] = [None] * self.count

        def run(rank: int) -> None:
            self._own.rank = rank
            results[rank] = work(rank)

        versions = software.versions()
        digests = software.source_digests()
        modules = software.module_digests()
        places: list[tuple[Any, str, Callable[..., Any]]] = [
            (distributed, "rank", lambda: self._own.rank),
            (distributed, "world_size", lambda: self.count),
            (environment, "rank", lambda: self._own.rank),
            (environment, "world_size", lambda: self.count),
            (environment, "local_rank", lambda: self._own.rank % RANKS_PER_HOST),
            (environment, "local_world_size", lambda: RANKS_PER_HOST),
            (software, "versions", lambda: versions),
            (software, "source_digests", lambda: digests),
            (software, "module_digests", lambda: modules),
            (roll_call, "_connect", lambda timeout_s: self.store),
            (roll_call, "_below", StoreBelow),
            (distributed_c10d, "_get_default_store", lambda: self.store),
        ]
        originals = [getattr(module, name) for module, name, _ in places]
        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(self.count)]
        try:
            for module, name, replacement in places:
                setattr(module, name, replacement)
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(120.0)
        finally:
            for (module, name, _), original in zip(places, originals, strict=True):
                setattr(module, name, original)
        return results


def say_where(rank: int) -> tuple[dict[int, HostLocation], dict[str, list[str]]]:
    """What a rank exchanges with the others when the process group has been initialized."""
    return distributed.exchange_locations(*place_of(rank))


def attend_roll_call(rank: int) -> bool:
    """Takes part in the roll call of ranks that are started alike, without shared folders."""
    call = RollCall()
    call.describe("settings", {f"flag{number}": "value" for number in range(100)})
    call.probe = SharedFolders(RunFolders())
    call.attend(timedelta(seconds=60))
    return call.is_over


def place_of(rank: int) -> tuple[HostLocation, HostVariables]:
    """Where a rank runs: one of eight on a host of 96 cores. The first host has a variable more."""
    host = f"node{rank // RANKS_PER_HOST}"
    location = HostLocation(host, ProcessHandle(rank, "1"), frozenset(range(96)))
    names = frozenset({"HF_HOME"} if rank < RANKS_PER_HOST else {})
    return location, HostVariables(host, names, frozenset())


def write_shared_files(folder: Path, sources: int) -> list[str]:
    """Writes token files and a checkpoint to a shared folder; returns the flags of a run."""
    data = []
    for number in range(sources):
        with pair_writer(folder / f"tokens{number}", "uint16") as writer:
            for length in range(50, 150):
                writer.add_documents([token % VOCABULARY for token in range(length)], [length])
        data += ["1.0", str(folder / f"tokens{number}")]
    flags = (
        "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --lr 1e-3 "
        f"--micro-batch-size 1 --train-samples 8192 --vocab-size {VOCABULARY - 1} "
        "--tokenizer-type NullTokenizer --eval-iters 1 --eval-interval 100 --split 90,5,5"
    ).split()
    path = folder / "run" / "global_step1"
    path.mkdir(parents=True)
    from megatron_ds.cli.arguments import build_config

    words = [*flags, "--data-path", *data]
    config: Config = build_config(words, world_size=1, warn=lambda text: None)[0]
    config = config.with_vocab(VOCABULARY)
    run = RunRecord(
        state=TrainState(iteration=1),
        config=config.to_dict(),
        layout=ParallelLayout.of(config, 1),
        data_order=DataOrder.of(config, 1),
        shards={},
        branch=Lineage.new(),
    )
    (path / RUN).write_text(json.dumps(run.to_dict()))
    records = {RUN: FileRecord.of((path / RUN).read_bytes())}
    (path / MANIFEST).write_text(manifest_text(records))
    place = str(folder / "run")
    return [*words, "--save", place, "--load", place, "--override-opt_param-scheduler"]


def count_start_calls(
    flags: Sequence[str], folder: Path, ranks: int, world_size: int, first: int = 0
) -> list[Counter[str]]:
    """Starts the ranks of a host, as forked processes that do not form a process group.

    Each runs `extend.pretrain` up to where the ranks would meet, and then builds its datasets.

    Args:
        flags: Of pretrain_gpt.py.
        folder: The shared folder.
        ranks: Number of ranks on the host.
        world_size: Number of ranks of the run.
        first: Global rank of the first one.

    Returns:
        By rank, how often it called which function for a path in the folder.

    Raises:
        RuntimeError: If a rank fails.
    """
    with socket.socket() as probe, tempfile.TemporaryDirectory() as results:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        children = []
        for local_rank in range(ranks):
            if (child := os.fork()) == 0:
                variables = {
                    "RANK": first + local_rank,
                    "LOCAL_RANK": local_rank,
                    "WORLD_SIZE": world_size,
                    "LOCAL_WORLD_SIZE": ranks,
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": port,
                }
                _start({k: str(v) for k, v in variables.items()}, flags, folder, Path(results))
            children.append(child)
        statuses = [os.waitpid(child, 0)[1] for child in children]
        if any(statuses):
            texts = [path.read_text() for path in Path(results).glob("*.error")]
            raise RuntimeError("\n".join(["a rank failed", *texts[:1]]))
        files = [Path(results, f"{rank}.json") for rank in range(ranks)]
        return [Counter(json.loads(file.read_text())) for file in files]


def _start(variables: Mapping[str, str], flags: Sequence[str], folder: Path, results: Path) -> None:
    """A forked rank; never returns."""
    import traceback

    rank = variables["LOCAL_RANK"]
    status = 1
    try:
        signal.alarm(120)
        os.environ.update(variables)
        os.environ["TORCH_EXTENSIONS_DIR"] = str(results / "extensions")
        calls = _count_calls(folder)
        # Where the ranks would meet: there is no process group, and no engine.
        process: Any = types.ModuleType("process")

        def train(config: Config, inputs: preflight.RunInputs, *rest: object) -> int:
            config = config.with_vocab(inputs.tokenizer.vocab_size)
            datasets = build_datasets(
                inputs.data[0],
                seq_length=config.model.seq_length,
                seed=config.runtime.seed,
                num_samples=schedules.planned_samples(config, int(variables["WORLD_SIZE"])),
                tokenizer_fingerprint=inputs.tokenizer.fingerprint.digest,
                vocab_size=inputs.tokenizer.vocab_size,
            )
            assert datasets.train is not None
            sample = datasets.train[int(variables["RANK"])]
            counted = Counter({**calls, "sample": int(sample.sum())})
            (results / f"{rank}.json").write_text(json.dumps(counted))
            os._exit(0)

        process.train = train
        sys.modules["megatron_ds.training.process"] = process
        sys.modules["megatron_ds.training"].process = process  # type: ignore[attr-defined]
        extend.pretrain(extend.Extensions(), [*flags])
        status = 0
    except BaseException:
        (results / f"{rank}.error").write_text(traceback.format_exc())
    finally:
        os._exit(status)


def _count_calls(folder: Path) -> Counter[str]:
    """Counts the calls for paths in a folder from now on, in this process."""
    calls: Counter[str] = Counter()
    inside = str(folder)

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*arguments: Any, **options: Any) -> Any:
            path = arguments[0] if arguments else ""
            if isinstance(path, str | Path) and str(path).startswith(inside):
                calls[name] += 1
            return function(*arguments, **options)

        return call

    for name in COUNTED:
        setattr(os, name, counted(name, getattr(os, name)))

    def on_event(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and str(arguments[0]).startswith(inside):
            calls["open"] += 1

    sys.addaudithook(on_event)
    return calls
