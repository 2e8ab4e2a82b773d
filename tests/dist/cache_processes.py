"""A process that forks groups of processes which all build the same datasets at once.

It loads no torch, so that eight processes start within a moment. It reads a line of JSON for each
group and answers with one. A request:

    paths      --data-path
    cache      --data-cache-path
    fallback   another folder for the indexes
    marks      a folder for files that the processes leave for each other
    fault      a fault for tests/faults.py, or a key of SPECIAL_FAULTS. A fault at one call happens
               at that call of all processes, counted together, a repeated one in all of them.
    patience   seconds until a waiting process gives up
    nobody     run as the user `nobody` if this one is root, which ignores permissions

An answer: for each process its samples' SHA-256, or the error message, or the signal that killed
it; and what it reported while it waited.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import os
import resource
import shutil
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from megatron_ds.config import DataConfig
from megatron_ds.config.problems import UserError
from megatron_ds.data import index_cache
from megatron_ds.data.blend import blend_schedule
from megatron_ds.data.build_datasets import build_datasets
from megatron_ds.data.validation import DataFiles
from megatron_ds.fileio.file_lock import WaitPolicy
from tests import faults

PROCESSES = 8
DEADLINE = 100.0
NOBODY = 65534


def build(request: dict[str, Any]) -> str:
    """Returns a hash of every training and validation sample."""
    blend_schedule.BLOCK = 16  # otherwise so short a blend would not be cached
    datasets = build_datasets(
        DataFiles(
            DataConfig(
                data_path=tuple(request["paths"]), split="8,2", data_cache_path=request.get("cache")
            )
        ),
        seq_length=16,
        seed=3,
        num_samples=(400, 40, 0),
        tokenizer_fingerprint="t",
        vocab_size=1000,
        fallback_cache=request.get("fallback"),
    )
    digest = hashlib.sha256()
    for dataset in (datasets.train, datasets.valid[""]):
        assert dataset is not None
        for number in range(len(dataset)):
            digest.update(dataset[number].tobytes())
    return digest.hexdigest()


def next_number(folder: Path) -> int:
    """1 for the first process of a group that asks, 2 for the next one, and so on."""
    for number in itertools.count(1):
        with suppress(FileExistsError):
            os.close(os.open(folder / f"call-{number}", os.O_CREAT | os.O_EXCL))
            break
    return number


def is_first(folder: Path) -> bool:
    """True for the first process of a group that asks."""
    try:
        os.close(os.open(folder / "first", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def inject(request: dict[str, Any], marks: Path) -> None:
    text = request["fault"]
    name, _, argument = text.partition(":")
    if name in SPECIAL_FAULTS:
        SPECIAL_FAULTS[name](request, marks, argument)
        return
    fault = faults.Fault.parse(text)
    action = faults.action_of(fault)

    def act(*arguments: Any) -> None:
        # Any process may build any of the indexes, so a process may make few of the calls.
        if fault.repeats or next_number(marks) == fault.number:
            action(*arguments)

    faults.inject(text if fault.repeats else f"{fault.point}:1+", act)


def wait_for_peers(request: dict[str, Any], marks: Path, argument: str) -> None:
    """The first process to build an index continues when a peer has reported that it waits."""

    def wait(*arguments: Any) -> None:
        while is_first(marks) or not (marks / "reported").exists():
            time.sleep(0.01)

    faults.inject(f"{STORE}:1", wait)


def limit_file_size(request: dict[str, Any], marks: Path, argument: str) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(argument), int(argument)))


def delete_cache(request: dict[str, Any], marks: Path, argument: str) -> None:
    """The cache folder vanishes once, before the second rename, or before every rename."""

    def delete(*arguments: Any) -> None:
        if argument == "always" or is_first(marks):
            shutil.rmtree(request["cache"], ignore_errors=True)

    faults.inject("os.replace:1+" if argument == "always" else "os.replace:2", delete)


STORE = f"{index_cache.__name__}.{index_cache._store.__name__}"
SPECIAL_FAULTS: dict[str, Callable[[dict[str, Any], Path, str], None]] = {
    "wait-for-peers": wait_for_peers,
    "limit-file-size": limit_file_size,
    "delete-cache": delete_cache,
}


def run_member(request: dict[str, Any], marks: Path) -> dict[str, Any]:
    """What one process of the group does."""
    reports: list[str] = []

    def report(text: str) -> None:
        reports.append(text)
        (marks / "reported").touch()

    if request.get("nobody") and os.geteuid() == 0:
        os.setegid(NOBODY)
        os.seteuid(NOBODY)
    if "fault" in request:
        inject(request, marks)
    index_cache.WaitPolicy = functools.partial(  # type: ignore[assignment, misc]
        WaitPolicy, report=report, report_after=0.2, timeout=request.get("patience", DEADLINE)
    )
    try:
        answer: dict[str, Any] = {"samples": build(request)}
    except UserError as error:
        answer = {"error": str(error), "codes": [problem.code for problem in error.problems]}
    except BaseException:
        answer = {"traceback": traceback.format_exc()}
    return {**answer, "reports": reports}


def run_group(request: dict[str, Any]) -> list[dict[str, Any]]:
    marks = Path(request["marks"])
    children = {}
    pipes = [os.pipe() for _ in range(PROCESSES)]
    for number, (_, theirs) in enumerate(pipes):
        child = os.fork()
        if not child:
            try:
                os.write(theirs, json.dumps(run_member(request, marks)).encode())
            finally:
                os._exit(0)
        children[child] = number
    answers: list[dict[str, Any]] = [{"hung": True}] * PROCESSES
    deadline = time.monotonic() + DEADLINE
    while children and time.monotonic() < deadline:
        child, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED)
        if not child:
            time.sleep(0.01)
        elif os.WIFSTOPPED(status):
            answers[children.pop(child)] = {"stopped": child}
        else:
            number = children.pop(child)
            answers[number] = (
                {"killed": os.WTERMSIG(status)}
                if os.WIFSIGNALED(status)
                else json.loads(os.read(pipes[number][0], 1 << 20))
            )
    for child in [*children, *(answer["stopped"] for answer in answers if "stopped" in answer)]:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    for end in (end for pipe in pipes for end in pipe):
        os.close(end)
    return answers


def main() -> None:
    warnings.simplefilter("ignore")
    for line in sys.stdin:
        request = json.loads(line)
        if request.get("warm"):
            build(request)  # late imports happen before a group runs as `nobody`
            print("[]", flush=True)
        else:
            print(json.dumps(run_group(request)), flush=True)


if __name__ == "__main__":
    main()
