"""pretrain_gpt.py with trouble in one rank, at a chosen moment of its own. No test by itself.

    TROUBLE kind:when   RANK_IN_TROUBLE rank

When is an iteration, or an evaluation's micro-batch where the kind says so.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

HANG = "this rank hangs"


def before_iteration(number: int, trouble: Callable[[], None]) -> None:
    from megatron_ds.engine.zero import ZeroEngine

    step = ZeroEngine.train_step

    def troubled(self: ZeroEngine, batches: Any, plan: Any) -> Any:
        if plan.iteration == number:
            trouble()
        return step(self, batches, plan)

    ZeroEngine.train_step = troubled  # type: ignore[method-assign]


def in_trouble() -> bool:
    return os.environ["RANK"] == os.environ.get("RANK_IN_TROUBLE", "0")


def hang() -> None:
    if in_trouble():
        print(HANG, flush=True)
        while True:
            time.sleep(0.1)


def hang_with_a_short_timeout() -> None:
    """All ranks shorten it: before, the start of a run may need longer on a slow machine."""
    from torch.distributed import distributed_c10d

    for group in list(distributed_c10d._world.pg_map):
        distributed_c10d._set_pg_timeout(timedelta(seconds=1), group)
    hang()


def fail() -> None:
    if in_trouble():
        raise ZeroDivisionError("the trouble of this rank")


def run_out_of_memory() -> None:
    if in_trouble():
        import torch

        raise torch.OutOfMemoryError("tried to allocate 2.00 GiB")


def signal_itself() -> None:
    if in_trouble():
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.2)  # until the thread that hears it has run


def signal_in_the_save(number: int) -> None:
    """After the first of its files."""
    from megatron_ds.engine.zero import ZeroEngine

    save = ZeroEngine.save

    def troubled(self: ZeroEngine, folder: Path, tag: str) -> None:
        save(self, folder, tag)
        if tag.endswith(f"global_step{number}"):
            signal_itself()

    ZeroEngine.save = troubled  # type: ignore[method-assign]


def signal_in_the_evaluation(number: int) -> None:
    """In its micro-batch of that number, counted from 1 over all evaluations."""
    from megatron_ds.engine.zero import ZeroEngine

    loss = ZeroEngine.eval_loss
    done = 0

    def troubled(self: ZeroEngine, batch: Any) -> Any:
        nonlocal done
        done += 1
        print(f"evaluation micro-batch {done}", flush=True)
        if done == number:
            signal_itself()
        return loss(self, batch)

    ZeroEngine.eval_loss = troubled  # type: ignore[method-assign]


def hang_at_the_start(_: int) -> None:
    """While the others wait for this rank."""
    from megatron_ds.training import trainer

    build = trainer.build_engine

    def troubled(*arguments: Any) -> Any:
        hang()
        return build(*arguments)

    trainer.build_engine = troubled


KINDS: dict[str, Callable[[int], None]] = {
    "hang": lambda number: before_iteration(number, hang),
    "hang-timeout": lambda number: before_iteration(number, hang_with_a_short_timeout),
    "hang-start": hang_at_the_start,
    "fail": lambda number: before_iteration(number, fail),
    "memory": lambda number: before_iteration(number, run_out_of_memory),
    "signal-save": signal_in_the_save,
    "signal-evaluation": signal_in_the_evaluation,
}


def main() -> NoReturn:
    kind, _, number = os.environ["TROUBLE"].partition(":")
    from megatron_ds.launch import environment

    environment.prepare_environment()
    KINDS[kind](int(number))
    import pretrain_gpt

    pretrain_gpt.main()
    raise AssertionError("a program that ends by itself gives its status")


if __name__ == "__main__":
    main()
