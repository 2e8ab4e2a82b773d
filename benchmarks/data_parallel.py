"""Step time of ZeRO 0 relative to a bare torch loop with the same model, on one and more ranks.

    python benchmarks/data_parallel.py --ranks 1 2 --output data_parallel.json

The bare loop is torch's DistributedDataParallel (on several ranks), gradient clipping and torch's
fused AdamW. Both train in the same processes, one after the other in each round.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import on_ranks, paired_ratio, this_machine, versions, write_json
from benchmarks.train_step import BETAS, CLIP, LR, WEIGHT_DECAY, Setting, Shape, our_config

SHAPES = {
    "tiny": Shape(layers=2, hidden=64, heads=4, sequence=64, vocab=512, micro_batch=2),
    "small": Shape(layers=4, hidden=256, heads=8, sequence=256, vocab=8192, micro_batch=4),
}
ENGINE = "ZeRO 0"
BARE = "bare loop"
Step = Callable[[], Any]


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="ranks (1 2)")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--rounds", type=int, default=9, help="rounds (9)")
    parser.add_argument("--seconds", type=float, default=1.5, help="of each part of a round (1.5)")
    parser.add_argument("--output", type=Path, default=None, help="output file (JSON)")
    options = parser.parse_args()
    table = []
    print(f"{'model':8}{'ranks':>6}{'ZeRO 0, ms':>12}{'bare, ms':>10}{'ratio':>8}{'CPU':>8}")
    for name, ranks in itertools.product(options.shapes, options.ranks):
        found = measure(SHAPES[name], ranks, options.rounds, options.seconds)
        table.append({"model": name, "ranks": ranks, **found})
        times = f"{found['engine_ms']:12.2f}{found['bare_ms']:10.2f}"
        print(f"{name:8}{ranks:6}{times}{found['ratio']:8.3f}{found['cpu_ratio']:8.3f}", flush=True)
    if options.output is not None:
        result = {
            "machine": dataclasses.asdict(this_machine()),
            "versions": versions(("torch", "deepspeed")),
            "shapes": {name: dataclasses.asdict(SHAPES[name]) for name in options.shapes},
            "rounds": options.rounds,
            "steps": table,
        }
        write_json(options.output, result)
    return 0


def measure(shape: Shape, ranks: int, rounds: int, seconds: float) -> dict[str, Any]:
    """The median step times, their ratio by paired rounds, and the last losses."""
    result: dict[str, Any] = on_ranks(compare, ranks, shape, rounds, seconds)
    return result


def compare(shape: Shape, rounds: int, seconds: float) -> dict[str, Any]:
    """Train both in turn. Collective, in an initialized process group."""
    import torch
    import torch.distributed as dist

    loops = {ENGINE: _engine_step(shape), BARE: _bare_step(shape)}
    losses: dict[str, float] = {}
    times: dict[str, list[list[float]]] = {name: [] for name in loops}
    cpu_times: dict[str, list[list[float]]] = {name: [] for name in loops}
    counts = {}
    for name, step in loops.items():  # warms up, and finds how many steps take the time
        for _ in range(3):
            step()
        start = time.perf_counter()
        for _ in range(3):
            step()
        count = torch.tensor([1 + 3 * seconds / (time.perf_counter() - start)])
        dist.all_reduce(count, op=dist.ReduceOp.MIN)
        counts[name] = int(count)
    for number in range(rounds):
        # Who is first alternates, so that a growing load affects both.
        for name in list(loops)[:: 1 if number % 2 else -1]:
            dist.barrier()
            kept: list[float] = []
            cpu: list[float] = []
            for _ in range(counts[name]):
                start = time.perf_counter()
                cpu_start = time.process_time()
                losses[name] = float(loops[name]())
                kept.append(time.perf_counter() - start)
                cpu.append(time.process_time() - cpu_start)
            times[name].append(kept)
            cpu_times[name].append(cpu)
    medians = {name: statistics.median(itertools.chain(*times[name])) for name in loops}
    return {
        "engine_ms": 1e3 * medians[ENGINE],
        "bare_ms": 1e3 * medians[BARE],
        "ratio": paired_ratio(times[ENGINE], times[BARE]),
        "cpu_ratio": paired_ratio(cpu_times[ENGINE], cpu_times[BARE]),
        "losses": losses,
    }


def _batch(shape: Shape) -> tuple[Any, Any]:
    """Token ids and labels [B, S] of this rank."""
    import torch
    import torch.distributed as dist

    generator = torch.Generator().manual_seed(dist.get_rank())
    ids = torch.randint(shape.vocab, (shape.micro_batch, shape.sequence + 1), generator=generator)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def _engine_step(shape: Shape) -> Step:
    import torch

    from megatron_ds.engine.build import build_engine
    from megatron_ds.engine.device_batches import DeviceBatch
    from megatron_ds.parallel.mesh import Mesh
    from megatron_ds.train_state import StepPlan

    mesh = Mesh.build(1)
    device = torch.device("cpu")
    config = our_config(Setting(shape, "fp32", 1), compiled=False)
    samples = shape.micro_batch * mesh.dp.size
    config = config.with_values({"zero_stage": 0, "global_batch_size": samples})
    engine = build_engine(config, mesh, device)
    tokens, labels = _batch(shape)
    batch = DeviceBatch(tokens, labels, None, position=0)
    plan = StepPlan(1, samples, 1, LR, WEIGHT_DECAY, seq_length=shape.sequence)
    return lambda: engine.train_step(iter([batch]), plan).loss


def _bare_step(shape: Shape) -> Step:
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from megatron_ds.model.gpt import GPTModel
    from megatron_ds.parallel.activation_checkpointing import ActivationCheckpointing
    from megatron_ds.parallel.mesh import Mesh
    from megatron_ds.parallel.rng import RngStreams

    config = our_config(Setting(shape, "fp32", 1), compiled=False)
    rng = RngStreams(0, torch.device("cpu"), 0)
    model: Any = GPTModel(
        config.model,
        mesh=Mesh.single(),
        rng=rng,
        seed=config.runtime.seed,
        checkpointing=ActivationCheckpointing(config.recompute, rng, None),
    )
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in parameters if p.dim() > 1], "weight_decay": WEIGHT_DECAY},
            {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
        ],
        lr=LR,
        betas=BETAS,
        fused=True,
    )
    if dist.get_world_size() > 1:
        model = DistributedDataParallel(model)
    tokens, labels = _batch(shape)

    def step() -> Any:
        loss = model(tokens, labels).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


if __name__ == "__main__":
    sys.exit(main())
