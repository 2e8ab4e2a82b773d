"""How long a run takes to start: --help, an argument error, and the first iteration under
`deepspeed`, with the parts of it that a run prints.

    python benchmarks/startup.py [--rounds 3] [--output startup.json]

The model has the size of the demo's, the corpus is synthetic. Wall time: nothing else should run at
the same time. A first start is not measured; it fills the page cache, builds the C++ ops and the
index of the data.
"""

from __future__ import annotations

import argparse
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
from megatron_ds.data.indexed_writer import IndexedWriter

HERE = Path(__file__).resolve().parent.parent
MODEL = (
    *("--num-layers", "4", "--hidden-size", "192", "--num-attention-heads", "6"),
    *("--seq-length", "256", "--attention-dropout", "0", "--hidden-dropout", "0"),
)
"""The size of the demo's model."""
VOCABULARY, DOCUMENTS, LENGTH = 4096, 200, 600
TARGETS = {"--help": 1.5, "argument error": 3.0, "first iteration": 15.0}
"""Seconds, on two cores and warm."""
LINE = re.compile(r"^start-up \(s\) \|(?P<parts>.*)\| all: (?P<all>[\d.]+) \|", re.MULTILINE)
PART = re.compile(r" (?P<name>[^|:]+): (?P<seconds>[\d.]+) ")


@dataclass(frozen=True)
class Start:
    """One start of a run."""

    seconds: float
    """From the command to the end of the first iteration."""
    parts: dict[str, float]
    """As the first rank printed them; what the launcher takes comes before."""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each")
    parser.add_argument("--processes", type=int, default=2, help="ranks of the run")
    parser.add_argument("--output", type=Path, help="JSON file for the figures")
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        prefix = made_up_corpus(Path(folder))
        start(prefix, arguments.processes)
        helps, errors, starts = [], [], []
        for _ in range(arguments.rounds):
            helps.append(seconds_of(["--help"], expected=0))
            errors.append(seconds_of([*settings(prefix), "--num-layer", "4"], expected=2))
            starts.append(start(prefix, arguments.processes))
    figures = {
        "--help": statistics.median(helps),
        "argument error": statistics.median(errors),
        "first iteration": statistics.median(one.seconds for one in starts),
    }
    print(report(figures, parts_of(starts)))
    if arguments.output is not None:
        result = {
            "machine": asdict(this_machine()),
            "versions": versions(["torch", "deepspeed"]),
            "processes": arguments.processes,
            "seconds": figures,
            "parts": parts_of(starts),
            "starts": [asdict(one) for one in starts],
        }
        write_json(arguments.output, result)
    return 0


def report(figures: dict[str, float], parts: dict[str, float]) -> str:
    """The figures against their targets, and the parts of the first iteration, largest first."""
    lines = [f"{'':24}{'s':>8}{'target':>8}"]
    lines += [f"{name:24}{value:8.2f}{TARGETS[name]:8.1f}" for name, value in figures.items()]
    lines += ["", "parts of the first iteration:"]
    ordered = sorted(parts.items(), key=lambda part: -part[1])
    lines += [f"  {name:22}{value:8.2f}" for name, value in ordered]
    return "\n".join(lines)


def parts_of(starts: list[Start]) -> dict[str, float]:
    """Medians; the launcher's is what the first rank's own parts leave over."""
    parts = {name: statistics.median(one.parts[name] for one in starts) for name in starts[0].parts}
    launcher = statistics.median(one.seconds - sum(one.parts.values()) for one in starts)
    return {"launcher": launcher, **parts}


def made_up_corpus(folder: Path) -> Path:
    """Prefix of a pair of token files."""
    prefix = folder / "tokens"
    draw = np.random.default_rng(0)
    with IndexedWriter(prefix, np.uint16) as writer:
        for _ in range(DOCUMENTS):
            writer.add_document(draw.integers(0, VOCABULARY, LENGTH, dtype=np.uint16))
    return prefix


def settings(prefix: Path) -> list[str]:
    """Two iterations of MODEL."""
    return [
        *MODEL,
        *("--micro-batch-size", "4", "--global-batch-size", "8", "--train-iters", "2"),
        *("--lr", "1e-3", "--zero-stage", "1", "--eval-iters", "0", "--split", "1,0,0"),
        *("--tokenizer-type", "NullTokenizer", "--vocab-size", str(VOCABULARY)),
        *("--data-path", str(prefix)),
    ]


def seconds_of(words: list[str], *, expected: int) -> float:
    """Of a command that answers without a run. Raises RuntimeError if it ends otherwise."""
    begin = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "pretrain_gpt.py", *words],
        cwd=HERE,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != expected:
        raise RuntimeError(f"{words} ended with {done.returncode}:\n{done.stderr}")
    return time.perf_counter() - begin


def start(prefix: Path, processes: int) -> Start:
    """Starts a run under `deepspeed` and waits for its end; notes when its first step was done."""
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
    """The seconds in a run's start-up line; empty without one."""
    found = LINE.search(output)
    if found is None:
        return {}
    return {part["name"]: float(part["seconds"]) for part in PART.finditer(found["parts"])}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    sys.exit(main())
