"""What a load of another layout and a conversion cost: memory, and bytes that are read.

A model whose embedding is by far its largest tensor is saved by two tensor-parallel ranks, and
loaded by two data-parallel ones, from its checkpoint and from the universal one. Memory is that of
torch's allocator beyond what the run has; files are memory-mapped and need none.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from megatron_ds.checkpoint.files.native_reader import SavedStates
from megatron_ds.checkpoint.manager import CheckpointManager
from megatron_ds.checkpoint.metadata import list_checkpoints
from megatron_ds.checkpoint.universal.folders import SUFFIX
from megatron_ds.checkpoint.universal.reader import UniversalStates
from megatron_ds.checkpoint.universal.writer import convert_checkpoint, open_verified
from tests.dist.engine_harness import prepare
from tests.dist.test_resharding import Continued, Layout
from tests.distributed import run_ranks

ROWS = 16384
WIDTH = 64
LARGEST = 4 * ROWS * WIDTH
SHAPE = {
    "vocab_size": ROWS,
    "hidden_size": WIDTH,
    "ffn_hidden_size": 64,
    "num_layers": 1,
    "make_vocab_size_divisible_by": 1,
}
SOURCE = Layout(1, tp=2, changes={"model": SHAPE})
TARGET = Layout(3, changes={"model": SHAPE})


def peak_of(work: Callable[[], Any], folder: Path) -> int:
    """Most bytes that torch's allocator had during the work beyond those before it.

    The profiler counts mappings of files, too; those below the folder are left out.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        work()
    assert found.profiler is not None
    events = found.profiler.kineto_results.events()
    memory = sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns())
    current = 0
    peak = 0
    mapped = {path.stat().st_size for path in folder.rglob("*.pt")}
    for event in memory:
        current += 0 if abs(event.nbytes()) in mapped else event.nbytes()
        peak = max(peak, current)
    return peak


def disk_reads() -> int:
    """Bytes that this process has caused to be read from a disk."""
    text = Path("/proc/self/io").read_text()
    return int(next(line for line in text.splitlines() if line.startswith("read_bytes")).split()[1])


def forget(folder: Path) -> int:
    """Drops the files of a folder from the host's cache. Returns their size."""
    size = 0
    for path in folder.rglob("*"):
        if path.is_file():
            with open(path, "rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            size += path.stat().st_size
    return size


def measure(rank: int, folder: Path) -> dict[str, tuple[int, ...]]:
    meshes = prepare()
    training = Continued("source", folder, meshes, SOURCE)
    training.step()
    training.manager(folder, []).saving.save(training.engine, training.state)
    training.close()
    (path,) = list_checkpoints(folder)
    target = path.with_name(f"{path.name}{SUFFIX}")
    found = {}
    if rank == 0:
        checkpoint = open_verified(path)
        peak = peak_of(
            lambda: convert_checkpoint(checkpoint, target, lambda name, size: None), folder
        )
        found["conversion"] = (peak, 0, 0, 0)
    dist.barrier()
    training = Continued("target", folder, meshes, TARGET)
    for kind, source in (("native", path), ("universal", target)):
        loads = []
        for _ in range(2):  # the first may also read code of libraries that is not in memory
            size = forget(source) if rank == 0 else 0
            dist.barrier()
            before = disk_reads()
            manager = training.manager(folder, [], universal_checkpoint=kind == "universal")
            read = watched_reads(training, manager)
            loads.append((*read, disk_reads() - before, size))
        found[kind] = min(loads, key=lambda each: each[-2])
    training.close()
    return found


def watched_reads(training: Continued, manager: CheckpointManager) -> tuple[int, int]:
    """Loads a checkpoint. Returns the peak of memory and the bytes of the values that were read."""
    checkpoint = manager.restoring.select()
    assert checkpoint is not None
    sources: list[SavedStates | UniversalStates] = []
    reshard = training.engine.reshard

    def watched(source: SavedStates | UniversalStates) -> None:
        sources.append(source)
        reshard(source)

    training.engine.reshard = watched  # type: ignore[method-assign, assignment]
    peak = peak_of(lambda: manager.restoring.load(training.engine, checkpoint), checkpoint.path)
    training.engine.reshard = reshard  # type: ignore[method-assign]
    (source,) = sources
    return peak, source.bytes_read


def test_a_load_reads_each_byte_once_in_the_memory_of_one_tensor(tmp_path: Path) -> None:
    """Claim (checkpoints): a resharding, and a conversion to the universal format, need less memory
    than two of the largest tensor; every value is read by one process, every byte from the disk
    once"""
    ranks = run_ranks(measure, 2, tmp_path)
    states = 3 * sum(
        4 * torch.Size(shape).numel()
        for shape in UniversalStates(tmp_path / "global_step1_universal").shapes.values()
    )
    assert ranks[0]["conversion"][0] < 2 * LARGEST
    for kind in ("native", "universal"):
        peaks, values, reads, sizes = zip(*(rank[kind] for rank in ranks), strict=True)
        assert max(peaks) < 2 * LARGEST, (kind, peaks)
        # Rows at the ends of a rank's partition are read by both.
        assert states <= sum(values) <= 1.02 * states, (kind, values, states)
        assert sum(reads) <= 1.1 * max(sizes), (kind, reads, sizes)
