"""Fault injection: at a named point of the program, on one rank, something goes wrong.

Owns the points where tests inject faults and the actions that happen there. It knows no test.

A fault is written `point:number[:action]`. The number selects an iteration, a sample or a call of
the point, as `POINTS` describes; `number+` selects all from that one on. The action is one of
`ACTIONS` or the name of an errno, and `kill` by default. There are three ways to inject one:

* `inject("os.replace:2:ENOSPC")` in this process, with an action of the test's own if necessary;
* `is_killed_at("os.fsync:3", run)` in a forked child;
* `FAULT=iteration:2:hang FAULT_RANK=1 python tests/faults.py ARGUMENTS` in pretrain_gpt.py, on that
  rank or on all ranks. `Launcher.start(..., fault=...)` does this.

Errors of the disk below a path are injected by a preloaded library, see `faulty_disk`.
"""

from __future__ import annotations

import atexit
import errno
import functools
import importlib
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

REPOSITORY = Path(__file__).resolve().parent.parent
HANG_MESSAGE = "this rank hangs"
FAILURE = "an injected failure"

Action = Callable[..., None]
"""Called with the arguments of the call that it precedes."""


@dataclass(frozen=True)
class Fault:
    """A parsed fault.

    Attributes:
        point: A key of `POINTS`, or the dotted path of a function of a module (`os.fsync`); several
            paths joined by `|` count their calls together.
        number: What the point counts.
        repeats: Whether the fault occurs at every later number as well.
        action: A key of `ACTIONS`, or the name of an errno.
    """

    point: str
    number: int
    repeats: bool
    action: str

    @staticmethod
    def parse(text: str) -> Fault:
        point, number, *rest = text.split(":")
        return Fault(point, int(number.rstrip("+")), number.endswith("+"), *(rest or ["kill"]))

    def matches(self, number: int) -> bool:
        return number == self.number or (self.repeats and number > self.number)


def inject(text: str, action: Action | None = None) -> None:
    """Installs a fault in this process for the rest of its life.

    Args:
        text: The fault, as `point:number[:action]`.
        action: Happens instead of the one that the text names.
    """
    fault = Fault.parse(text)
    action = action or action_of(fault)
    if fault.point in POINTS:
        POINTS[fault.point](fault, action)
        return
    is_due = nth_call(fault)
    for path in fault.point.split("|"):
        module_name, _, name = path.rpartition(".")
        module = importlib.import_module(module_name)
        before_call(module, name, action, is_due)


def before_call(
    owner: Any, name: str, action: Action, is_due: Callable[..., bool] = lambda *_, **__: True
) -> None:
    """Replaces a function of a module or class: the action precedes each call that is due."""
    function = getattr(owner, name)

    @functools.wraps(function)
    def replacement(*arguments: Any, **keywords: Any) -> Any:
        if is_due(*arguments, **keywords):
            action(*arguments)
        return function(*arguments, **keywords)

    setattr(owner, name, replacement)


def nth_call(fault: Fault) -> Callable[..., bool]:
    """True for the calls, counted from 1, that the fault selects."""
    calls = itertools.count(1)
    return lambda *arguments, **keywords: fault.matches(next(calls))


def is_killed_at(text: str, run: Callable[[], object]) -> bool:
    """Whether a forked child that calls `run` reaches the fault, which must be a kill."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            inject(text)
            run()
            status = 0
        finally:
            os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, -signal.SIGKILL), f"the child exited with status {status}"
    return status != 0


@functools.cache
def faulty_disk() -> Path:
    """The library of faulty_disk.cpp, which LD_PRELOAD loads and DISK_FAULT controls."""
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder)
    return compile_library(REPOSITORY / "tests" / "e2e" / "faulty_disk.cpp", folder)


def compile_library(source: Path, folder: Path) -> Path:
    """A shared library, for LD_PRELOAD, of one file of C++."""
    import pytest

    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++")
    library = folder / f"{source.stem}.so"
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(source), "-ldl"], check=True
    )
    return library


# Actions.


def kill(*_: Any) -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)  # another thread may receive the signal first
    raise AssertionError("the process survived SIGKILL")


def kill_all_ranks(*_: Any) -> NoReturn:
    """The ranks of a run are one process group."""
    sys.stdout.flush()
    os.killpg(os.getpgrp(), signal.SIGKILL)
    kill()


def truncate_and_kill(descriptor: int, *_: Any) -> NoReturn:
    """Leaves half of the file that is being synced, as a power failure may."""
    with suppress(OSError):  # a folder cannot be truncated
        os.ftruncate(descriptor, os.fstat(descriptor).st_size // 2)
    kill()


def record(_: Any, batch: Any, *__: Any) -> None:
    """Appends position and tokens of the samples of a micro-batch to the file in RECORD."""
    rows = [
        [*ids, *labels[-1:]]
        for ids, labels in zip(batch.tokens_BS.tolist(), batch.labels_BS.tolist(), strict=True)
    ]
    line = json.dumps([batch.position, int(os.environ["RANK"]), rows])
    with open(os.environ["RECORD"], "a", encoding="utf-8") as file:
        file.write(f"{line}\n")


def stop(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def terminate(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.2)  # until the thread that receives it has run


def pause(*_: Any) -> None:
    """Slows a run down, so that it is not far ahead when something else happens to it."""
    time.sleep(0.2)


def hang(*_: Any) -> NoReturn:
    print(HANG_MESSAGE, flush=True)
    while True:
        time.sleep(0.1)


def hang_past_timeout(*_: Any) -> None:
    """Shortens the timeout of collectives on all ranks; then the rank of the fault hangs.

    A short timeout from the beginning would be exceeded by the start on a slow machine.
    """
    from torch.distributed import distributed_c10d

    for group in list(distributed_c10d._world.pg_map):
        distributed_c10d._set_pg_timeout(timedelta(seconds=1), group)
    if _is_fault_rank():
        hang()


def fail(*_: Any) -> NoReturn:
    raise ZeroDivisionError(FAILURE)


def run_out_of_memory(*_: Any) -> NoReturn:
    import torch

    raise torch.OutOfMemoryError("tried to allocate 2.00 GiB")


def remove_folder(_: Path, target: Path) -> None:
    """Before a rename: removes the folder that the target is in."""
    shutil.rmtree(target.parent)


ACTIONS: dict[str, Action] = {
    "kill": kill,
    "kill-all": kill_all_ranks,
    "truncate-kill": truncate_and_kill,
    "record": record,
    "stop": stop,
    "terminate": terminate,
    "pause": pause,
    "remove-folder": remove_folder,
    "hang": hang,
    "hang-past-timeout": hang_past_timeout,
    "fail": fail,
    "out-of-memory": run_out_of_memory,
}


def action_of(fault: Fault) -> Action:
    if fault.action in ACTIONS:
        return ACTIONS[fault.action]
    code = getattr(errno, fault.action)

    def raise_error(*_: Any) -> NoReturn:
        raise OSError(code, os.strerror(code))

    return raise_error


# Points.


def _at_micro_batch(fault: Fault, action: Action) -> None:
    """Before the forward pass of the first micro-batch at or after sample `number`."""
    from megatron_ds.engine.module import PipelineStage
    from megatron_ds.engine.step import ModelPasses

    def is_due(_: Any, batch: Any, x_SBH: Any = None) -> bool:
        return bool(batch.position >= fault.number)

    before_call(ModelPasses, ModelPasses._forward.__name__, action, is_due)
    before_call(PipelineStage, PipelineStage.compute.__name__, action, is_due)


def _at_iteration(fault: Fault, action: Action) -> None:
    from megatron_ds.engine.zero import ZeroEngine

    def is_due(engine: ZeroEngine, batches: Any, plan: Any) -> bool:
        return fault.matches(plan.iteration)

    before_call(ZeroEngine, ZeroEngine.train_step.__name__, action, is_due)


def _at_evaluation(fault: Fault, action: Action) -> None:
    """In the n-th micro-batch of all evaluations; each is printed."""
    from megatron_ds.engine.zero import ZeroEngine

    numbers = itertools.count(1)
    eval_loss = ZeroEngine.eval_loss

    def watch(batch: Any) -> Any:
        number = next(numbers)
        print(f"evaluation micro-batch {number}", flush=True)
        if fault.matches(number):
            action()
        return batch

    def watched_eval_loss(self: ZeroEngine, batches: Iterator[Any], count: int) -> Any:
        return eval_loss(self, map(watch, batches), count)

    ZeroEngine.eval_loss = watched_eval_loss  # type: ignore[method-assign]


def _at_engine_build(fault: Fault, action: Action) -> None:
    """Peer ranks then wait for this one."""
    from megatron_ds.training import build

    before_call(build, build.build_engine.__name__, action, nth_call(fault))


def _after_engine_save(fault: Fault, action: Action) -> None:
    """After the engine's files of iteration `number`; the other files are missing."""
    from megatron_ds.engine.deepspeed.checkpoint_io import DeepSpeedSnapshot

    write = DeepSpeedSnapshot.write

    def write_and_act(self: DeepSpeedSnapshot, folder: Path) -> Any:
        written = write(self, folder)
        if _iteration_of(folder) == fault.number:
            action()
        return written

    DeepSpeedSnapshot.write = write_and_act  # type: ignore[method-assign]


def _between_engine_files(fault: Fault, action: Action) -> None:
    """In the save of iteration `number`: rank 0 has written half a file, its peers none."""
    from megatron_ds.engine.deepspeed.checkpoint_io import DeepSpeedSnapshot

    def is_due(snapshot: DeepSpeedSnapshot, folder: Path) -> bool:
        return _iteration_of(folder) == fault.number

    def write_half(snapshot: DeepSpeedSnapshot, folder: Path) -> None:
        if os.environ["RANK"] == "0":
            (folder / "mp_rank_00_model_states.pt").write_bytes(b"half of a file")
            action()
        time.sleep(60)

    before_call(DeepSpeedSnapshot, DeepSpeedSnapshot.write.__name__, write_half, is_due)


def _before_writing(name: str) -> Callable[[Fault, Action], None]:
    """Before a text file of the save of iteration `number`."""

    def install(fault: Fault, action: Action) -> None:
        from megatron_ds.checkpoint.files import local_files

        tag = f"global_step{fault.number}"

        def is_due(path: Path, content: bytes, *_: Any) -> bool:
            is_pointer = content.decode() in (str(fault.number), tag)
            return path.name == name and (is_pointer or _iteration_of(path.parent) == fault.number)

        before_call(local_files, local_files.write_atomically.__name__, action, is_due)

    return install


def _iteration_of(folder: Path) -> int | None:
    """The iteration of a checkpoint, which may be incomplete."""
    digits = re.search(r"global_step(\d+)", folder.name)
    return None if digits is None else int(digits[1])


def _before_rename(fault: Fault, action: Action) -> None:
    """The checkpoint of iteration `number` is complete under its temporary name."""
    from megatron_ds.checkpoint.files import local_files

    def is_due(temporary: Path, target: Path) -> bool:
        return target.name == f"global_step{fault.number}"

    before_call(local_files, local_files.publish.__name__, action, is_due)


POINTS: dict[str, Callable[[Fault, Action], None]] = {
    "micro-batch": _at_micro_batch,
    "iteration": _at_iteration,
    "evaluation": _at_evaluation,
    "build-engine": _at_engine_build,
    "after-engine-save": _after_engine_save,
    "between-engine-files": _between_engine_files,
    "before-run-facts": _before_writing("run.json"),
    "before-manifest": _before_writing("manifest.json"),
    "before-rename": _before_rename,
    "before-pointers": _before_writing("latest"),
    "between-pointers": _before_writing("latest_checkpointed_iteration.txt"),
}


def _is_fault_rank() -> bool:
    return os.environ.get("FAULT_RANK", os.environ["RANK"]) == os.environ["RANK"]


def main() -> None:
    """Runs pretrain_gpt.py with the fault of the environment."""
    from megatron_ds.launch import environment

    environment.prepare_environment()
    action = action_of(Fault.parse(os.environ["FAULT"]))
    acts_here = _is_fault_rank() or action is hang_past_timeout
    inject(os.environ["FAULT"], action if acts_here else lambda *_: None)
    import pretrain_gpt

    pretrain_gpt.main()


if __name__ == "__main__":
    sys.path.insert(0, str(REPOSITORY))
    main()
