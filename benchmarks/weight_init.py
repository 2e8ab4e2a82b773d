"""Speed of weight initialization: numbers per second, by number of threads.

    python benchmarks/weight_init.py --threads 1 2 --output weight_init.json

Each measurement initializes one matrix. The baseline is torch.normal, with one generator and one
thread. The rate per CPU second is unaffected by other load on the machine.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import this_machine, versions, write_json
from megatron_ds.model.weight_init import Initializer

SEQUENTIAL = "torch.normal"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument(
        "--threads", type=int, nargs="+", default=[1, 2], help="numbers of threads (1 2)"
    )
    parser.add_argument("--rows", type=int, default=8192, help="rows of the matrix (8192)")
    parser.add_argument("--columns", type=int, default=4096, help="columns of the matrix (4096)")
    parser.add_argument("--rounds", type=int, default=5, help="number of rounds (5)")
    parser.add_argument("--output", type=Path, default=None, help="output file (JSON)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    machine = this_machine()
    shape = options.rows, options.columns

    def initializer(threads: int) -> Callable[[], object]:
        init = Initializer(1, threads).normal("weight", 0.02)
        return lambda: init(shape, 0, [range(shape[0])])

    draws: dict[str, Callable[[], object]] = {
        f"{threads} threads": initializer(threads) for threads in options.threads
    }
    draws[SEQUENTIAL] = lambda: torch.normal(0.0, 0.02, shape)
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in draws}
    for _ in range(options.rounds):
        for name, draw in draws.items():
            start = time.perf_counter()
            cpu_start = time.process_time()
            draw()
            taken[name].append((time.perf_counter() - start, time.process_time() - cpu_start))
    numbers = shape[0] * shape[1] / 1e6
    rates = {name: numbers / min(wall for wall, _ in times) for name, times in taken.items()}
    cpu_rates = {name: numbers / min(cpu for _, cpu in times) for name, times in taken.items()}
    for name, rate in rates.items():
        print(f"{name}: {rate:.0f} million per second, {cpu_rates[name]:.0f} per CPU second")
    if options.output is not None:
        result = {
            "machine": dataclasses.asdict(machine),
            "versions": versions(["torch", "numpy"]),
            "shape": shape,
            "million numbers per second": rates,
            "million numbers per CPU second": cpu_rates,
        }
        write_json(options.output, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
