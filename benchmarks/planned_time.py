"""Planned times of steps (tools/plan.py), relative to measured ones on CPU ranks.

    python benchmarks/planned_time.py [--bf16] [--output planned_time.json]

Rates are measured first: the share of the peak from a step of one rank, the memory from additions,
the links from sums of large messages over two ranks. Layouts of two ranks of a thread each, other
sizes, accumulation and recomputation are then planned with these rates, and their steps measured in
turn. `--rates FILE` writes the rates for `tools/plan.py --rates FILE`.
"""

from __future__ import annotations

import argparse
import dataclasses
import io
import itertools
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import on_ranks, this_machine, versions, write_json

BASE = (
    "--num-layers 6 --hidden-size 384 --num-attention-heads 6 --seq-length 128 "
    "--micro-batch-size 4 --tokenizer-type NullTokenizer --vocab-size 4095 --lr 1e-4 "
    "--attention-dropout 0 --hidden-dropout 0 --train-iters 100 --data-path unused "
)
CALIBRATION = "one rank"
CASES: dict[str, tuple[int, str]] = {
    CALIBRATION: (1, "--zero-stage 0 --global-batch-size 8"),
    "12 layers": (1, "--zero-stage 0 --global-batch-size 8 --num-layers 12"),
    "hidden size 576": (1, "--zero-stage 0 --global-batch-size 8 --hidden-size 576"),
    "full recomputation": (1, "--zero-stage 0 --global-batch-size 8 --recompute-granularity full"),
    "DP 2": (2, "--zero-stage 0 --global-batch-size 16"),
    "DP 2, ZeRO 1": (2, "--zero-stage 1 --global-batch-size 16"),
    "DP 2, ZeRO 2": (2, "--zero-stage 2 --global-batch-size 16"),
    "DP 2, ZeRO 3": (2, "--zero-stage 3 --global-batch-size 16"),
    "TP 2": (2, "--zero-stage 1 --global-batch-size 8 --tensor-model-parallel-size 2"),
    "TP 2, sequence parallel": (
        2,
        "--zero-stage 1 --global-batch-size 8 --tensor-model-parallel-size 2 --sequence-parallel",
    ),
    "PP 2": (2, "--zero-stage 1 --global-batch-size 32 --pipeline-model-parallel-size 2"),
    "SP 2": (2, "--zero-stage 1 --global-batch-size 8 --ds-sequence-parallel-size 2"),
}
"""Name -> number of ranks, further flags."""


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n\n")[0])
    parser.add_argument("--bf16", action="store_true", help="train in bf16 instead of fp32")
    parser.add_argument("--steps", type=int, default=4, help="steps of each case and round")
    parser.add_argument("--rounds", type=int, default=3, help="rounds")
    parser.add_argument("--rates", type=Path, help="output file of the measured rates (JSON)")
    parser.add_argument("--output", type=Path, help="output file (JSON)")
    options = parser.parse_args()
    flags = BASE + ("--bf16 " if options.bf16 else "")
    seconds: dict[str, list[float]] = {name: [] for name in CASES}
    links = []
    memory = []
    for _ in range(options.rounds):
        for ranks in (1, 2):
            own = {name: flags + case for name, (count, case) in CASES.items() if count == ranks}
            found = on_ranks(_rank, ranks, own, options.steps)
            for name in own:
                seconds[name].append(found[name])
            memory.append(found["memory"])
        links.append(found["link"])
    measured = {name: statistics.median(values) for name, values in seconds.items()}
    hardware = _rates(flags, measured[CALIBRATION], min(memory), statistics.median(links))
    rows = {}
    for name, (ranks, case) in CASES.items():
        planned = _plan(flags + case, ranks, hardware).seconds
        rows[name] = {"measured": measured[name], "planned": planned}
    machine = this_machine()
    print(f"{machine.cpu}, load {machine.load}, {'bf16' if options.bf16 else 'fp32'}; {hardware}")
    for name, row in rows.items():
        ratio = row["planned"] / row["measured"]
        print(f"{name:28}{row['measured']:8.3f} s{row['planned']:8.3f} s{ratio:7.2f}")
    if options.rates is not None:
        write_json(options.rates, vars(hardware))
    if options.output is not None:
        result = {"machine": vars(machine), "versions": versions(("torch", "deepspeed"))}
        write_json(options.output, {**result, "rates": vars(hardware), "seconds": rows})
    return 0


def _config(line: str, ranks: int) -> Any:
    from megatron_ds.cli import arguments
    from megatron_ds.engine.ds_config.merge import merge_file

    config = arguments.parse(shlex.split(line), world_size=ranks, complete=merge_file)
    return config.with_vocab(config.model.vocab_size + 1)


def _plan(line: str, ranks: int, hardware: Any) -> Any:
    from megatron_ds.planning.plan import make_plan

    return make_plan(_config(line, ranks), ranks, hardware)


def _rates(flags: str, seconds: float, memory: float, link: float) -> Any:
    """A device with the measured rates: products take what the step's other parts leave."""
    from megatron_ds.planning.hardware import HARDWARE

    hardware = dataclasses.replace(
        HARDWARE["cpu"], memory_rate=memory, inside=link, per_machine=2, efficiency=1.0
    )
    plan = _plan(flags + CASES[CALIBRATION][1], 1, hardware)
    share = plan.compute / (seconds - plan.optimizer)
    return dataclasses.replace(hardware, efficiency=share)


def _rank(cases: dict[str, str], steps: int) -> dict[str, float]:
    """Seconds of a step of each case; bytes per second of the memory and of the link."""
    import torch.distributed as dist

    ranks = dist.get_world_size()
    with redirect_stdout(io.StringIO()):  # DeepSpeed's optimizers print
        found = {name: _seconds(_config(line, ranks), steps) for name, line in cases.items()}
    return found | _measured_rates(ranks)


def _seconds(config: Any, steps: int) -> float:
    import torch

    from benchmarks.communication import as_a_large_model
    from megatron_ds.engine.build import build_engine
    from megatron_ds.engine.device_batches import DeviceBatch
    from megatron_ds.parallel.mesh import Mesh
    from megatron_ds.train_state import StepPlan

    mesh = Mesh.build(**config.mesh_sizes)
    engine = build_engine(as_a_large_model(config), mesh, torch.device("cpu"))
    size = config.schedule.micro_batch_size
    length = config.model.seq_length
    tokens = torch.randint(config.model.vocab_size, (size, length))
    batch = DeviceBatch(tokens, tokens, None, 0)
    samples = config.schedule.global_batch_size
    plan = StepPlan(1, samples, samples // size // mesh.dp.size, 1e-4, 0.0, seq_length=length)

    def step() -> None:
        engine.train_step(itertools.repeat(batch), plan)

    times = _times(step, steps)
    engine._engine.destroy()
    return statistics.median(times)


def _times(work: Callable[[], None], count: int) -> list[float]:
    """Seconds of some repetitions, after two that are not counted. Collective."""
    import torch.distributed as dist

    times = []
    for number in range(count + 2):
        dist.barrier()
        start = time.perf_counter()
        work()
        dist.barrier()
        if number >= 2:
            times.append(time.perf_counter() - start)
    return times


def _measured_rates(ranks: int) -> dict[str, float]:
    import torch
    import torch.distributed as dist

    first, second = torch.ones(2, 2**24)
    read_and_written = 3 * first.nbytes
    memory = read_and_written / statistics.median(_times(lambda: first.add_(second), 9))
    if ranks == 1:
        return {"memory": memory}
    message = torch.ones(2**20)
    seconds = statistics.median(_times(lambda: dist.all_reduce(message), 9))
    # An all-reduce sends 2 (n - 1) / n of its message.
    return {"memory": memory, "link": 2 * (ranks - 1) / ranks * message.nbytes / seconds}


if __name__ == "__main__":
    sys.exit(main())
