"""Start-up time of --help, an argument error, the imports, and the first iteration.

    python benchmarks/startup.py [--rounds 3] [--against CHECKOUT] [--output startup.json]

The time to the first iteration, under `deepspeed`, is split into the phases that a run prints. The
model has the size of the demo's, the corpus is synthetic. Times are wall times, so nothing else
should run at the same time. A warm-up run fills the page cache and builds the C++ ops and the data
index. The CPU seconds of one process until its first step depend little on what else runs; with
--against, another checkout of this project is measured in turns, and their ratio is printed.
"""

from __future__ import annotations

import argparse
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import this_machine, versions, write_json
from megatron_ds.data.token_files.indexed_writer import pair_writer

HERE = Path(__file__).resolve().parent.parent
MODEL = (
    "--num-layers",
    "4",
    "--hidden-size",
    "192",
    "--num-attention-heads",
    "6",
    "--seq-length",
    "256",
    "--attention-dropout",
    "0",
    "--hidden-dropout",
    "0",
)
"""The size of the demo's model."""
VOCABULARY = 4096
DOCUMENTS = 200
LENGTH = 600
TARGETS = {"--help": 1.5, "argument error": 3.0, "own imports": 0.3, "first iteration": 8.0}
"""Seconds, with two cores and a warm page cache."""
OWN_IMPORTS = """
from megatron_ds.launch import environment
environment.prepare_environment()
import time
import deepspeed, torch
begin = time.perf_counter()
import megatron_ds.training.process
print(time.perf_counter() - begin)
"""
"""Prints the seconds that the package adds to the imports of torch and DeepSpeed."""
LINE = re.compile(r"^start-up \(s\) \|(?P<parts>.*)\| all: (?P<all>[\d.]+) \|", re.MULTILINE)
PART = re.compile(r" (?P<name>[^|:]+): (?P<seconds>[\d.]+) ")


@dataclass(frozen=True)
class Start:
    """Start-up times of one run."""

    seconds: float
    """From the command to the end of the first iteration."""
    parts: dict[str, float]
    """Seconds by phase, as printed by the first rank; without the launcher."""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, help="number of rounds")
    parser.add_argument("--processes", type=int, default=2, help="processes of the run")
    parser.add_argument("--against", type=Path, help="another checkout of this project")
    parser.add_argument("--output", type=Path, help="output file (JSON)")
    arguments = parser.parse_args(argv)
    folders = [HERE, *([arguments.against.resolve()] if arguments.against else [])]
    with tempfile.TemporaryDirectory() as folder:
        prefix = synthetic_corpus(Path(folder))
        start(prefix, arguments.processes)
        helps = []
        errors = []
        imports = []
        starts = []
        cpu: dict[Path, list[float]] = {folder: [] for folder in folders}
        for _ in range(arguments.rounds):
            helps.append(time_command(["--help"], expected=0))
            errors.append(time_command([*settings(prefix), "--num-layer", "4"], expected=2))
            imports.append(own_imports())
            starts.append(start(prefix, arguments.processes))
            for checkout, seconds in cpu.items():
                seconds.append(cpu_seconds(prefix, checkout))
    cpu_medians = [statistics.median(seconds) for seconds in cpu.values()]
    figures = {
        "--help": statistics.median(helps),
        "argument error": statistics.median(errors),
        "own imports": statistics.median(imports),
        "first iteration": statistics.median(one.seconds for one in starts),
    }
    print(report(figures, parts_of(starts)))
    print(f"\nCPU seconds of one process until its first step: {cpu_medians[0]:.2f}")
    if arguments.against is not None:
        ratio = cpu_medians[0] / cpu_medians[1]
        print(f"of {arguments.against}: {cpu_medians[1]:.2f}; ratio {ratio:.2f}")
    if arguments.output is not None:
        result = {
            "machine": asdict(this_machine()),
            "versions": versions(["torch", "deepspeed"]),
            "processes": arguments.processes,
            "seconds": figures,
            "cpu_seconds": cpu_medians,
            "parts": parts_of(starts),
            "starts": [asdict(one) for one in starts],
        }
        write_json(arguments.output, result)
    return 0


def report(figures: dict[str, float], parts: dict[str, float]) -> str:
    """Format the figures with their targets, and the phases in descending order."""
    lines = [f"{'':24}{'s':>8}{'target':>8}"]
    lines += [f"{name:24}{value:8.2f}{TARGETS[name]:8.1f}" for name, value in figures.items()]
    lines += ["", "phases of the first iteration:"]
    ordered = sorted(parts.items(), key=lambda part: -part[1])
    lines += [f"  {name:22}{value:8.2f}" for name, value in ordered]
    return "\n".join(lines)


def parts_of(starts: list[Start]) -> dict[str, float]:
    """Return the median of each phase, and of the launcher before them."""
    parts = {name: statistics.median(one.parts[name] for one in starts) for name in starts[0].parts}
    launcher = statistics.median(one.seconds - sum(one.parts.values()) for one in starts)
    return {"launcher": launcher, **parts}


def synthetic_corpus(folder: Path) -> Path:
    """Write a pair of random tokens and return its prefix."""
    prefix = folder / "tokens"
    rng = np.random.default_rng(0)
    with pair_writer(prefix, np.uint16) as writer:
        for _ in range(DOCUMENTS):
            tokens = rng.integers(0, VOCABULARY, LENGTH, dtype=np.uint16)
            writer.add_documents(tokens, [LENGTH])
    return prefix


def settings(prefix: Path) -> list[str]:
    """Return the flags of a run of two iterations."""
    return [
        *MODEL,
        "--micro-batch-size",
        "4",
        "--global-batch-size",
        "8",
        "--train-iters",
        "2",
        "--lr",
        "1e-3",
        "--zero-stage",
        "1",
        "--eval-iters",
        "0",
        "--split",
        "1,0,0",
        "--tokenizer-type",
        "NullTokenizer",
        "--vocab-size",
        str(VOCABULARY),
        "--data-path",
        str(prefix),
    ]


def time_command(arguments: list[str], *, expected: int) -> float:
    """Return the seconds of a command that exits without training.

    Raises:
        RuntimeError: If the exit status is not `expected`.
    """
    begin = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "pretrain_gpt.py", *arguments],
        cwd=HERE,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != expected:
        raise RuntimeError(f"{arguments} exited with {done.returncode}:\n{done.stderr}")
    return time.perf_counter() - begin


def own_imports() -> float:
    """Return the seconds of the package's imports beyond torch and DeepSpeed."""
    command = [sys.executable, "-c", OWN_IMPORTS]
    done = subprocess.run(command, cwd=HERE, capture_output=True, text=True, check=True)
    return float(done.stdout.split()[-1])


def cpu_seconds(prefix: Path, checkout: Path) -> float:
    """Return the CPU seconds, of all threads, of a run of one step in one process.

    Raises:
        RuntimeError: If the run fails.
    """
    flags = [*settings(prefix), "--train-iters", "1"]
    environment = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [sys.executable, "pretrain_gpt.py", *flags],
            cwd=checkout,
            env=environment,
            stdout=log,
            stderr=log,
        )
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            log.seek(0)
            raise RuntimeError(f"{checkout} failed:\n{log.read().decode()[-3000:]}")
    return usage.ru_utime + usage.ru_stime


def start(prefix: Path, processes: int) -> Start:
    """Run under `deepspeed` to the end, and measure the time to the first iteration.

    Raises:
        RuntimeError: If the run fails.
    """
    launcher = Path(sys.executable).parent / "deepspeed"
    command = [str(launcher), "--num_gpus", str(processes), "--master_port", str(free_port())]
    output = []
    seconds = None
    begin = time.perf_counter()
    with subprocess.Popen(
        [*command, "pretrain_gpt.py", *settings(prefix)],
        cwd=HERE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            output.append(line)
            if seconds is None and LINE.match(line):
                seconds = time.perf_counter() - begin
    parts = printed_parts("".join(output))
    if process.returncode or seconds is None:
        raise RuntimeError(f"the run did not start:\n{''.join(output)[-3000:]}")
    return Start(seconds, parts)


def printed_parts(output: str) -> dict[str, float]:
    """Parse the seconds by phase from the start-up line of a run; empty if there is none."""
    match = LINE.search(output)
    if match is None:
        return {}
    return {part["name"]: float(part["seconds"]) for part in PART.finditer(match["parts"])}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    sys.exit(main())
