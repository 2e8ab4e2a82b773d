"""Records where Python waits for the device: every place that reads a tensor's values.

On a CPU nothing waits, but the same calls are made: `item`, `tolist`, `bool`, `float` and their
like, which torch's function mode sees, and operators whose result's size depends on values.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast
from unittest import mock

import deepspeed
import torch.distributed as dist
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import megatron_ds
from megatron_ds.config import Config, StoppingConfig
from megatron_ds.engine.device_batches import DeviceBatches
from megatron_ds.engine.zero import ZeroEngine
from megatron_ds.launch.process.stop_request import StopRequest
from megatron_ds.parallel.mesh import Mesh
from megatron_ds.train_state import TrainState
from megatron_ds.training.exit_conditions import ExitConditions
from megatron_ds.training.metrics import Metrics, ThroughputModel
from megatron_ds.training.trainer import Trainer

READS = frozenset(
    {
        "item",
        "tolist",
        "__bool__",
        "__float__",
        "__int__",
        "__index__",
        "__contains__",
        "cpu",
        "numpy",
        "__array__",
        "nonzero",
        "masked_select",
        "unique",
        "equal",
        "allclose",
    }
)
OPERATORS = ("aten._local_scalar_dense", "aten.nonzero", "aten.masked_select", "aten.equal")
PACKAGES = tuple(Path(package.__path__[0]) for package in (megatron_ds, deepspeed))


def caller() -> str:
    """The innermost function of one of PACKAGES, as "megatron_ds/engine/zero.py train_step"."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        for package in PACKAGES:
            if path.is_relative_to(package):
                return f"{path.relative_to(package.parent)} {frame.f_code.co_name}"
        frame = frame.f_back
    return "elsewhere"


def reads_of(action: Callable[[], object]) -> Counter[str]:
    """Where an action reads values of tensors, by caller."""
    places: Counter[str] = Counter()

    def call(is_read: bool, func: Any, args: Any, kwargs: Any) -> object:
        if is_read:
            places[caller()] += 1
        return func(*args, **(kwargs or {}))

    class Functions(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> object:
            return call(getattr(func, "__name__", "") in READS, func, args, kwargs)

    class Operators(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> object:
            return call(str(func).startswith(OPERATORS), func, args, kwargs)

    with Functions(), Operators():
        action()
    return places


def reads_of_steps(
    config: Config, mesh: Mesh, engine: ZeroEngine, batches: DeviceBatches, state: TrainState
) -> Counter[str]:
    """Where two steps of the training loop inside a log interval, and an evaluation, read values.

    All-reductions of the package itself that are not asynchronous count as "all_reduce by PLACE".
    """
    ends = ExitConditions(StoppingConfig(), 100, StopRequest(), None, 0.0)
    workload = ThroughputModel(lambda _: 1, config.model.seq_length, mesh.world_size)
    anything = cast(Any, mock.MagicMock())
    trainer = Trainer(
        config=config,
        mesh=mesh,
        engine=engine,
        data=anything,
        metrics=Metrics(workload, 100, 100, lambda values: values),
        checkpoints=anything,
        exits=ends,
        state=state,
        total_iterations=100,
        report=anything,
    )

    def run() -> None:
        for _ in range(2):
            trainer._step(batches)
            ends.after_step(trainer.state.iteration)
        trainer.engine.eval_loss(batches, 1)

    places: Counter[str] = Counter()
    all_reduce = dist.all_reduce

    def count_and_reduce(*args: Any, **options: Any) -> object:
        place = caller()
        is_own = place.startswith("megatron_ds") and "parallel" not in place
        if is_own and not options.get("async_op"):
            places[f"all_reduce by {place}"] += 1
        return all_reduce(*args, **options)

    with mock.patch.object(dist, "all_reduce", count_and_reduce):
        return places + reads_of(run)
