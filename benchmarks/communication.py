"""Bytes that each ZeRO stage communicates per step, and bytes of states that a process keeps.

    python benchmarks/communication.py --output communication.json

Trains a small model for a step on CPU ranks and adds up the messages of its collectives. A message
is counted by its size per parameter, and by what each rank sends of it on a ring of many ranks: an
all-reduce sends it twice, a gather or scatter of the whole message once. These sizes do not depend
on the device; which of them are hidden behind computation does.
"""

from __future__ import annotations

import argparse
import io
import itertools
import sys
from collections import Counter
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import on_ranks, versions, write_json

OPERATIONS = {
    "allreduce_": ("all-reduce", 2),
    "_allgather_base_": ("all-gather", 1),
    "allgather_": ("all-gather", 1),
    "allgather_into_tensor_coalesced_": ("all-gather", 1),
    "_reduce_scatter_base_": ("reduce-scatter", 1),
    "reduce_scatter_": ("reduce-scatter", 1),
    "reduce_scatter_tensor_coalesced_": ("reduce-scatter", 1),
    "reduce_": ("reduce", 1),
    "broadcast_": ("broadcast", 1),
    "alltoall_base_": ("all-to-all", 1),
    "send": ("send", 1),
}
"""Operator of torch.distributed -> name, and how often each rank sends the message on a ring."""
NEGLIGIBLE = 1000
"""Bytes of messages that are norms and flags, not parameters or gradients."""
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": True},
    "bf16, summed in bf16": {"bf16": True, "accumulate_allreduce_grads_in_fp32": False},
}


@dataclass(frozen=True)
class Setting:
    stage: int
    precision: str
    accumulation: int
    tp: int = 1
    pp: int = 1
    offload: str = ""
    """What is in host memory: "", "optimizer" or "optimizer and parameters"."""

    def __str__(self) -> str:
        parts = [f"ZeRO {self.stage}, {self.precision}"]
        parts += [f"TP {self.tp}"] * (self.tp > 1) + [f"PP {self.pp}"] * (self.pp > 1)
        parts += [f"{self.offload} offloaded"] * bool(self.offload)
        return ", ".join([*parts, f"{self.accumulation} micro-batches"])


def settings() -> list[Setting]:
    """All but those that are rejected."""
    product = itertools.product((0, 1, 2, 3), PRECISIONS, (1, 4))
    return [Setting(*values) for values in product if values[0] > 0 or values[1] == "fp32"]


def layouts() -> list[Setting]:
    """The layouts of two ranks whose states are compared."""
    everything = "optimizer and parameters"
    return [
        Setting(0, "fp32", 4),
        *(Setting(stage, "bf16", 4) for stage in (1, 2, 3)),
        Setting(1, "bf16", 4, tp=2),
        Setting(1, "bf16", 4, pp=2),
        Setting(1, "bf16", 4, offload="optimizer"),
        Setting(2, "bf16", 4, offload="optimizer"),
        Setting(3, "bf16", 4, offload=everything),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--ranks", type=int, default=2, help="number of ranks (2)")
    parser.add_argument("--hidden", type=int, default=128, help="hidden size of the model (128)")
    parser.add_argument(
        "--layouts", action="store_true", help="compare layouts instead of number formats"
    )
    parser.add_argument("--output", type=Path, default=None, help="output file (JSON)")
    options = parser.parse_args()
    chosen = layouts() if options.layouts else settings()
    measured = measure(options.ranks, options.hidden, chosen)
    print(f"{'bytes per parameter of the model':64}{'sent':>6}{'states':>8}")
    for setting, found in measured.items():
        print(f"{setting!s:64}{found['sent']:6.1f}{found['states']:8.2f}")
        for kind in ("messages", "states_by_kind"):
            print(" " * 8 + ", ".join(f"{name} {size:.2f}" for name, size in found[kind].items()))
    if options.output is not None:
        result = {
            "ranks": options.ranks,
            "versions": versions(("torch", "deepspeed")),
            "bytes_per_parameter": {str(setting): found for setting, found in measured.items()},
        }
        write_json(options.output, result)
    return 0


def measure(ranks: int, hidden: int, chosen: list[Setting]) -> dict[Setting, dict[str, Any]]:
    """Bytes per parameter of each setting: sent by a rank, and of the messages by operation."""
    found: dict[Setting, dict[str, Any]] = on_ranks(_rank, ranks, hidden, chosen)
    return found


def _rank(hidden: int, chosen: list[Setting]) -> dict[Setting, dict[str, Any]]:
    """Train a step in each setting."""
    from megatron_ds.parallel.mesh import Mesh

    sizes = dict.fromkeys((setting.tp, setting.pp) for setting in chosen)
    meshes = {(tp, pp): Mesh.build(tp, pp_size=pp) for tp, pp in sizes}
    with redirect_stdout(io.StringIO()):  # DeepSpeed's optimizers print
        return {
            setting: bytes_of_a_step(setting, meshes[setting.tp, setting.pp], hidden)
            for setting in chosen
        }


def bytes_of_a_step(setting: Setting, mesh: Any, hidden: int) -> dict[str, Any]:
    """Bytes per parameter of the whole model, on this rank. Collective.

    Returns:
        What it sends in a step, the messages by operation, and the tensors that it keeps between
        the backward pass and the optimizer step, also by kind.
    """
    import torch

    from megatron_ds.config import (
        Config,
        DeepSpeedConfig,
        ModelConfig,
        OptimizerConfig,
        ParallelConfig,
        PrecisionConfig,
        ScheduleConfig,
    )
    from megatron_ds.engine.build import build_engine
    from megatron_ds.engine.device_batches import DeviceBatch
    from megatron_ds.model.declaration.architecture import model_spec
    from megatron_ds.train_state import StepPlan

    samples = mesh.dp.size * setting.accumulation
    config = Config(
        model=ModelConfig(
            num_layers=4, hidden_size=hidden, num_attention_heads=4, seq_length=16, vocab_size=256
        ),
        optimizer=OptimizerConfig(lr=1e-3),
        schedule=ScheduleConfig(micro_batch_size=1, global_batch_size=samples, train_iters=2),
        precision=PrecisionConfig(**PRECISIONS[setting.precision]),
        deepspeed=DeepSpeedConfig(
            zero_stage=setting.stage,
            cpu_optimizer=setting.offload.startswith("optimizer"),
            remote_device="cpu" if setting.offload.endswith("parameters") else "none",
        ),
        parallel=ParallelConfig(
            tensor_model_parallel_size=setting.tp, pipeline_model_parallel_size=setting.pp
        ),
    )
    engine = build_engine(as_a_large_model(config), mesh, torch.device("cpu"))
    tokens = torch.zeros(1, 16, dtype=torch.int64)
    batch = DeviceBatch(tokens, tokens, None, 0)
    plan = StepPlan(1, samples, setting.accumulation, 1e-3, 0.0, seq_length=16)
    # The first step is different: ZeRO-3 learns the order of the layers in it.
    engine.train_step(itertools.repeat(batch), plan)
    log = message_log(NEGLIGIBLE)
    kept = Counter[str]()
    take_step = engine._engine._take_model_step

    def step(*arguments: Any) -> None:
        for kinds in engine.state_bytes().values():
            kept.update(kinds)
        take_step(*arguments)

    with log, mock.patch.object(engine._engine, "_take_model_step", step):
        engine.train_step(itertools.repeat(batch), plan)
    size = model_spec(config.model).elements()
    messages: Counter[str] = Counter()
    sent = 0.0
    for (name, factor), bytes_ in log.messages.items():
        messages[name] += bytes_
        sent += factor * bytes_
    engine._engine.destroy()
    per_parameter = {name: round(bytes_ / size, 2) for name, bytes_ in messages.items()}
    return {
        "sent": round(sent / size, 2),
        "messages": per_parameter,
        "states": round(kept.total() / size, 2),
        "states_by_kind": {kind: round(bytes_ / size, 2) for kind, bytes_ in kept.items()},
    }


def as_a_large_model(config: Any) -> Any:
    """With limits of ZeRO-3 that a small model exceeds as a large one exceeds the usual ones."""
    import dataclasses
    import json
    import tempfile

    from megatron_ds.engine.ds_config.merge import merge_file

    if config.deepspeed.zero_stage != 3:
        return config
    limits = ("param_persistence_threshold", "max_live_parameters", "max_reuse_distance")
    zero: dict[str, int] = {"stage": 3, **{f"stage3_{name}": 0 for name in limits}}
    values = {"zero_optimization": zero}
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(values, file)
        file.flush()
        deepspeed = dataclasses.replace(config.deepspeed, deepspeed_config=file.name)
        world_size = config.schedule.global_batch_size
        return merge_file(dataclasses.replace(config, deepspeed=deepspeed), world_size)[0]


def message_log(negligible: int) -> Any:
    """A dispatch mode that adds up the messages of torch.distributed's operators.

    Inside it ZeRO 3 reduces gradients as on devices, and not by the exchange that gloo needs.

    Args:
        negligible: Bytes of the largest messages that are not counted.
    """
    import torch
    import torch.distributed as dist
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    from megatron_ds.engine.deepspeed import gradient_sums

    class Log(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.messages: Counter[tuple[str, int]] = Counter()
            self._as_on_devices = mock.patch.object(gradient_sums, "GLOO", None)

        def __enter__(self) -> Any:
            self._as_on_devices.start()
            return super().__enter__()

        def __exit__(self, *error: Any) -> None:
            super().__exit__(*error)
            self._as_on_devices.stop()

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> object:
            namespace, _, name = str(func).partition(".")
            operation = OPERATIONS.get(name.partition(".")[0])
            if namespace == "c10d" and operation is not None:
                group = next(arg for arg in args if isinstance(arg, torch.ScriptObject))
                is_alone = dist.ProcessGroup.unbox(group).size() == 1
                bytes_ = max(map(_bytes, args[:2]))
                if bytes_ > negligible and not is_alone:
                    self.messages[operation] += bytes_
            return func(*args, **(kwargs or {}))

    def _bytes(argument: Any) -> int:
        """Of the input or the output; the larger is the message of all ranks together."""
        leaves = tree_leaves(argument) if isinstance(argument, torch.Tensor | list | tuple) else []
        return sum(leaf.nbytes for leaf in leaves if isinstance(leaf, torch.Tensor))

    return Log()


if __name__ == "__main__":
    sys.exit(main())
