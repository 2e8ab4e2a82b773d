"""What the programs of the museum share: ranks on this machine, and how a verdict is told.

A program is run with an upstream package first on its path. It imports that package and torch, not
megatron_ds, and ends with `verdict`.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import socket
import sys
import traceback
from collections.abc import Callable
from multiprocessing.queues import SimpleQueue
from types import ModuleType
from typing import Any, NoReturn

SHOWN = 0
"""Exit status of a program that shows its behavior."""
NOT_SHOWN = 3
"""Exit status of a program that does not. Any other status says that the program failed."""


def verdict(is_shown: bool, figures: str) -> NoReturn:
    """Ends the program.

    Args:
        is_shown: Whether the package computes what it should not.
        figures: What was measured, such as "norm 1.08 instead of 1.34".
    """
    print(f"{'shown' if is_shown else 'not shown'}: {figures}", flush=True)
    sys.exit(SHOWN if is_shown else NOT_SHOWN)


def load_deepspeed() -> ModuleType:
    """Imports DeepSpeed, which then sends by gloo: its own op for that takes long to build."""
    importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None
    return importlib.import_module("deepspeed")


def deepspeed_engine(model: Any, optimizer: Any = None, **settings: Any) -> Any:
    """An engine of DeepSpeed that neither clips nor accumulates, unless the settings say it.

    Args:
        model: Module.
        optimizer: Of torch, or the block of the configuration.
        settings: Of the configuration, and `mpu`.
    """
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        **settings,
    }
    objects = {"model": model, "mpu": config.pop("mpu", None)}
    (config if isinstance(optimizer, dict) else objects)["optimizer"] = optimizer
    engine, *_ = load_deepspeed().initialize(config=config, **objects)
    return engine


def allow_fp16() -> None:
    """Makes DeepSpeed train in fp16 on a CPU, where torch computes it slowly."""
    accelerator = type(importlib.import_module("deepspeed.accelerator").get_accelerator())
    torch = importlib.import_module("torch")
    accelerator.is_fp16_supported = lambda _: True
    accelerator.supported_dtypes = lambda _: [torch.float, torch.half, torch.bfloat16]


def run_ranks(function: Callable[[int], Any], size: int = 1) -> list[Any]:
    """Calls a function with each rank, in processes that gloo can join: this one if it is alone.

    Args:
        function: Called with the rank. Its result is pickled: no tensors.
        size: Number of ranks.

    Returns:
        The results by rank.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    if size == 1:
        _set_environment(0, 1, port)
        return [function(0)]
    context = multiprocessing.get_context("fork")
    results: SimpleQueue[tuple[int, Any, str]] = context.SimpleQueue()
    arguments = [(function, rank, size, port, results) for rank in range(size)]
    ranks = [context.Process(target=_run_rank, args=each, daemon=True) for each in arguments]
    for process in ranks:
        process.start()
    by_rank = {}
    for _ in ranks:
        rank, result, error = results.get()
        if error:
            print(error, file=sys.stderr)
            sys.exit(1)
        by_rank[rank] = result
    for process in ranks:
        process.join(timeout=5)
    return [by_rank[rank] for rank in range(size)]


def _set_environment(rank: int, size: int, port: int) -> None:
    sizes = {"WORLD_SIZE": size, "LOCAL_SIZE": size, "LOCAL_WORLD_SIZE": size}
    places = {"RANK": rank, "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in {**sizes, **places}.items()}


def _run_rank(
    function: Callable[[int], Any],
    rank: int,
    size: int,
    port: int,
    results: SimpleQueue[tuple[int, Any, str]],
) -> None:
    try:
        _set_environment(rank, size, port)
        results.put((rank, function(rank), ""))
    except BaseException:
        results.put((rank, None, traceback.format_exc()))
        raise
