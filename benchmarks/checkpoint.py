"""Rates of saving, loading, converting and resharding a checkpoint, relative to torch and the disk.

    python benchmarks/checkpoint.py --output checkpoint.json

The model has 355 million parameters and Adam's state: bf16 weights, fp32 master weights and two
moments, 5 GB, saved by one process with ZeRO 1. Every round writes the same bytes by plain writes,
by torch.save and by a save of the package, each followed by fsync, and reads them by plain reads,
by torch.load and by a load of the package, each from the disk: the files are dropped from memory
before. Conversions are compared with a plain copy, which reads and writes as many bytes.
Asynchronous saves, conversions and the resharding run in processes of their own; their peak memory
excludes mapped files. Needs 14 GB of memory and 20 GB of disk; --small takes seconds.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import Contender, Work, in_turn, this_machine, versions, write_json
from benchmarks.train_step import Setting, Shape, our_config, start_process_group

MODEL = Shape(layers=24, hidden=1024, heads=16, sequence=1024, vocab=50304, micro_batch=1)
SMALL = Shape(layers=2, hidden=32, heads=2, sequence=16, vocab=128, micro_batch=1)
BLOCK = 2**24
"""Bytes of a plain write or read."""
STEP_TOKENS = 16
"""Length of the training step that gives Adam a state."""
SAVE = "save"
TORCH_SAVE = "torch.save"
PLAIN_WRITE = "plain write"
LOAD = "load"
TORCH_LOAD = "torch.load"
PLAIN_READ = "plain read"
STALL = "asynchronous save"
STALL_TARGET = 0.15
"""Time for which an asynchronous save holds up the training, relative to a synchronous save."""
TO_HF = "native to hf"
TO_NATIVE = "hf to native"
PLAIN_COPY = "plain copy"
RATIOS = (
    (SAVE, TORCH_SAVE, 0.9),
    (SAVE, PLAIN_WRITE, None),
    (LOAD, TORCH_LOAD, 0.8),
    (LOAD, PLAIN_READ, None),
    (TO_HF, PLAIN_COPY, 0.5),
    (TO_NATIVE, PLAIN_COPY, 0.5),
    (TO_HF, PLAIN_WRITE, None),
    (TO_NATIVE, PLAIN_WRITE, None),
)
"""Pairs of rates, and the smallest ratio that is aimed at."""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--rounds", type=int, default=2, help="number of rounds (2)")
    parser.add_argument("--small", action="store_true", help="a tiny model")
    parser.add_argument("--folder", type=Path, help="folder of the disk to measure")
    parser.add_argument("--output", type=Path, help="output file (JSON)")
    options = parser.parse_args(argv)
    machine = this_machine()
    shape = SMALL if options.small else MODEL
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        result = measure(shape, Path(folder), options.rounds)
    print(f"{machine.cpu}, {machine.cores} cores, load {machine.load}", report(result), sep="\n")
    if options.output is not None:
        packages = versions(["torch", "deepspeed", "safetensors"])
        write_json(options.output, {"machine": asdict(machine), "versions": packages, **result})
    return 0


def measure(shape: Shape, folder: Path, rounds: int) -> dict[str, Any]:
    """Runs all rounds.

    Returns:
        Sizes, MB/s and CPU seconds of each job by round, ratios, and peak memory.
    """
    training = Contender("training", build_training, shape, folder)
    try:
        (reports,) = in_turn([training], rounds, 1)
    finally:
        training.close()
    background = Contender("background", build_background, shape, folder)
    try:
        (saves,) = in_turn([background], rounds, 1)
    finally:
        background.close()
    conversion = Contender("conversion", build_conversion, folder)
    try:
        (converted,) = in_turn([conversion], rounds, 1)
    finally:
        conversion.close()
    resharding = Contender("resharding", build_resharding, shape, folder)
    try:
        resharded = resharding.run(1)
    finally:
        resharding.close()
    merged = [{**one, **other} for one, other in zip(reports, converted, strict=True)]
    rates = {
        name: [one[name]["bytes"] / 1e6 / one[name]["seconds"] for one in merged]
        for name in merged[0]
    }
    return {
        "checkpoint_bytes": reports[0][SAVE]["bytes"],
        "weight_bytes": converted[0][TO_HF]["bytes"],
        "MB_per_s": rates,
        "cpu_seconds": {name: [one[name]["cpu"] for one in merged] for name in merged[0]},
        "ratios": ratios(rates),
        "stall_seconds": [one["stall"] for one in saves],
        "stall_ratio": statistics.median(one["stall"] / one["synchronous"] for one in saves),
        "peak_bytes": {
            **{name: max(one[name]["peak"] for one in reports) for name in (LOAD, TORCH_LOAD)},
            **{name: max(one[name]["peak"] for one in converted) for name in (TO_HF, TO_NATIVE)},
            "resharding": resharded["peak"],
            "largest tensor": resharded["largest"],
        },
        "resharding_seconds": resharded["seconds"],
    }


def ratios(rates: dict[str, list[float]]) -> list[dict[str, Any]]:
    """The median over the rounds of each pair's ratio, with its target."""
    return [
        {
            "job": job,
            "peer": peer,
            "ratio": statistics.median(a / b for a, b in zip(rates[job], rates[peer], strict=True)),
            "target": target,
        }
        for job, peer, target in RATIOS
    ]


def report(result: dict[str, Any]) -> str:
    """The figures as text."""
    size = result["checkpoint_bytes"] / 1e9
    weights = result["weight_bytes"] / 1e9
    lines = [f"checkpoint {size:.3f} GB, its weights {weights:.3f} GB", ""]
    lines.append(f"{'':24}{'MB/s':>8}{'CPU s':>8}   of each round, MB/s")
    for name, rates in result["MB_per_s"].items():
        cpu = statistics.median(result["cpu_seconds"][name])
        every = " ".join(f"{rate:.0f}" for rate in rates)
        lines.append(f"{name:24}{statistics.median(rates):8.0f}{cpu:8.2f}   {every}")
    lines += ["", f"{'':40}{'ratio':>7}{'target':>8}"]
    for pair in result["ratios"]:
        target = "" if pair["target"] is None else f"{pair['target']:.2f}"
        lines.append(f"{pair['job'] + ' / ' + pair['peer']:40}{pair['ratio']:7.2f}{target:>8}")
    stalls = " ".join(f"{seconds:.2f}" for seconds in result["stall_seconds"])
    lines.append(f"{STALL + ' / ' + SAVE:40}{result['stall_ratio']:7.2f}{STALL_TARGET:>8.2f}")
    lines += ["", f"stall of an asynchronous save, s: {stalls}"]
    lines += ["", "peak memory beyond the model's, MB:"]
    lines += [f"  {name:22}{peak / 1e6:8.0f}" for name, peak in result["peak_bytes"].items()]
    return "\n".join(lines)


class Measured:
    """Seconds, CPU seconds and peak memory of a block; the bytes are added by the caller."""

    def __init__(self) -> None:
        self.values: dict[str, float] = {}

    def __enter__(self) -> Measured:
        self._stop = threading.Event()
        self._before = _anonymous_bytes()
        self._peak = self._before
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        self._start = time.perf_counter()
        self._cpu_start = time.process_time()
        return self

    def __exit__(self, *error: object) -> None:
        self.values["seconds"] = time.perf_counter() - self._start
        self.values["cpu"] = time.process_time() - self._cpu_start
        self._stop.set()
        self._thread.join()
        self.values["peak"] = self._peak - self._before

    def _watch(self) -> None:
        while not self._stop.wait(0.01):
            self._peak = max(self._peak, _anonymous_bytes())


def measured(job: Callable[[], object], folder: Path) -> dict[str, float]:
    """Runs a job; its bytes are those of the files with tensors in a folder."""
    with Measured() as found:
        job()
    return {**found.values, "bytes": sum(path.stat().st_size for path in tensor_files(folder))}


def tensor_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.suffix in (".pt", ".safetensors"))


def build_training(shape: Shape, folder: Path) -> Work:
    """An engine whose states are saved and loaded in every way."""
    engine, manager = build_engine_and_manager(shape, folder, zero_stage=1)
    train_one_step(engine, shape)
    native = folder / "native"
    other = folder / "other"

    def work(count: int) -> dict[str, dict[str, float]]:
        return {
            **_measure_writes(engine, manager, native, other),
            **_measure_reads(engine, manager, native),
        }

    return work


def _measure_writes(engine: Any, manager: Any, native: Path, other: Path) -> dict[str, Any]:
    import torch

    from megatron_ds.train_state import TrainState

    states = dict(engine.snapshot(copy=False).states)
    block = memoryview(os.urandom(BLOCK))

    def torch_save() -> None:
        for name, state in states.items():
            torch.save(state, other / name)
            _fsync(other / name)

    def plain_write() -> None:
        for path in tensor_files(native):
            left = path.stat().st_size
            with (other / path.name).open("wb", buffering=0) as file:
                while left > 0:
                    left -= file.write(block[:left])
                os.fsync(file.fileno())

    shutil.rmtree(native, ignore_errors=True)
    found = {SAVE: measured(lambda: manager.saving.save(engine, TrainState(iteration=1)), native)}
    for name, job in ((TORCH_SAVE, torch_save), (PLAIN_WRITE, plain_write)):
        other.mkdir()
        found[name] = measured(job, other)
        shutil.rmtree(other)
    return found


def _measure_reads(engine: Any, manager: Any, native: Path) -> dict[str, Any]:
    import torch

    from megatron_ds.engine.deepspeed.tensor_files import safe_classes

    files = tensor_files(native)

    def torch_load() -> None:
        with torch.serialization.safe_globals(safe_classes()):
            for path in files:
                torch.load(path, map_location="cpu", weights_only=True)

    def plain_read() -> None:
        block = memoryview(bytearray(BLOCK))
        for path in files:
            with path.open("rb", buffering=0) as file:
                while file.readinto(block):
                    pass

    jobs = {
        LOAD: lambda: manager.restoring.load(engine, manager.restoring.select()),
        TORCH_LOAD: torch_load,
        PLAIN_READ: plain_read,
    }
    found = {}
    for name, job in jobs.items():
        drop_from_memory(native)
        found[name] = measured(job, native)
    return found


def build_background(shape: Shape, folder: Path) -> Work:
    """Saves of the same states, synchronous and asynchronous."""
    from megatron_ds.train_state import TrainState

    engine, manager = build_engine_and_manager(shape, folder, zero_stage=1)
    train_one_step(engine, shape)
    engine.snapshot(copy=True)  # later copies use the same memory
    state = TrainState(iteration=1)

    def work(count: int) -> dict[str, float]:
        start = time.perf_counter()
        manager.saving.save(engine, state)
        saved = time.perf_counter()
        manager.saving.save(engine, state, in_background=True)
        stalled = time.perf_counter()
        manager.saving.advance(wait=True)
        return {"synchronous": saved - start, "stall": stalled - saved}

    return work


def build_conversion(folder: Path) -> Work:
    """Conversions of the weights of the checkpoint, and back."""
    start_process_group(1)
    from megatron_ds.conversion.registry import open_source, write

    def converted(source: Path, target: Path, name: str) -> dict[str, float]:
        shutil.rmtree(target, ignore_errors=True)
        drop_from_memory(source)

        def job() -> None:
            write(open_source(source), target, name)

        return measured(job, target)

    def copied(source: Path, target: Path) -> dict[str, float]:
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir()
        drop_from_memory(source)
        return measured(lambda: plain_copy(source, target), target)

    def work(count: int) -> dict[str, dict[str, float]]:
        hf = folder / "hf"
        native = folder / "weights"
        return {
            TO_HF: converted(folder / "native", hf, "hf"),
            PLAIN_COPY: copied(hf, folder / "copy"),
            TO_NATIVE: converted(hf, native, "native"),
        }

    return work


def plain_copy(source: Path, target: Path) -> None:
    """Reads files with tensors and writes their bytes to another folder, without a checksum."""
    block = memoryview(bytearray(BLOCK))
    for path in tensor_files(source):
        with path.open("rb", buffering=0) as old, (target / path.name).open("wb", 0) as new:
            while count := old.readinto(block):
                left = block[:count]
                while len(left) > 0:
                    left = left[new.write(left) :]
            os.fsync(new.fileno())


def build_resharding(shape: Shape, folder: Path) -> Work:
    """A load into an engine of another ZeRO stage."""
    engine, manager = build_engine_and_manager(shape, folder, zero_stage=2)
    train_one_step(engine, shape)  # allocates Adam's states

    def work(count: int) -> dict[str, float]:
        drop_from_memory(folder / "native")
        found = measured(
            lambda: manager.restoring.load(engine, manager.restoring.select()), folder / "native"
        )
        return {**found, "largest": 4.0 * shape.vocab * shape.hidden}

    return work


def build_engine_and_manager(shape: Shape, folder: Path, *, zero_stage: int) -> tuple[Any, Any]:
    """An engine in bf16 on one process, and the manager of its checkpoints."""
    device = start_process_group(1)
    import dataclasses

    from megatron_ds.checkpoint.files.collective_io import CollectiveIO
    from megatron_ds.checkpoint.location import RunFolders
    from megatron_ds.checkpoint.manager import CheckpointManager
    from megatron_ds.checkpoint.run_checkpoints import RunCheckpoints
    from megatron_ds.config import CheckpointConfig, TokenizerConfig
    from megatron_ds.engine.build import build_engine
    from megatron_ds.parallel.mesh import Mesh

    config = our_config(Setting(shape, "bf16", 1), compiled=False)
    native = str(folder / "native")
    config = dataclasses.replace(
        config,
        tokenizer=TokenizerConfig(tokenizer_type="NullTokenizer"),
        deepspeed=dataclasses.replace(config.deepspeed, zero_stage=zero_stage),
        checkpoint=CheckpointConfig(save=native, load=native),
    )
    mesh = Mesh.build(1)
    folders = RunFolders.local(config.checkpoint)
    run = RunCheckpoints(config, mesh, lambda text: None, CollectiveIO(), folders)
    return build_engine(config, mesh, device), CheckpointManager(run)


def train_one_step(engine: Any, shape: Shape) -> None:
    """Gives the optimizer its states, in a step of few tokens."""
    import torch

    from megatron_ds.engine.device_batches import DeviceBatch
    from megatron_ds.train_state import StepPlan

    tokens = torch.randint(shape.vocab, (1, STEP_TOKENS + 1))
    batch = DeviceBatch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), None, position=0)
    engine.train_step(iter([batch]), StepPlan(1, 1, 1, 1e-4, 0.1, seq_length=STEP_TOKENS))


def drop_from_memory(folder: Path) -> None:
    """Makes the next read of the files read the disk."""
    for path in tensor_files(folder):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _fsync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _anonymous_bytes() -> int:
    """Memory of this process without mapped files."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("RssAnon:"):
            return 1024 * int(line.split()[1])
    return 0


if __name__ == "__main__":
    sys.exit(main())
