"""A process that forks crews which all build the same datasets at once; a line of JSON in, a line
of JSON out for each crew. No test by itself.

It loads no torch, so that eight processes start within a moment. A request:

    paths      --data-path        cache      --data-cache-path
    fallback   another folder for the indexes
    fault      what befalls the crew: a key of FAULTS, with its argument after a colon
    patience   seconds until a waiting process gives up
    nobody     run as the user `nobody` if this one is root, whom no permission stops

An answer: for each process its samples' SHA-256, or the error in words, or the signal that killed
it; and what it said while it waited.
"""

from __future__ import annotations

import errno
import fcntl
import functools
import hashlib
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
from megatron_ds.data import index_cache
from megatron_ds.data import blend_schedule
from megatron_ds.data.build_datasets import build_datasets
from megatron_ds.fileio.file_lock import WaitPolicy

PROCESSES = 8
DEADLINE = 100.0
NOBODY = 65534


def build(request: dict[str, Any]) -> str:
    """A hash of every sample of training and validation."""
    blend_schedule.BLOCK = 16  # else so short a mixture would not be kept
    datasets = build_datasets(
        DataConfig(
            data_path=tuple(request["paths"]), split="8,2", data_cache_path=request.get("cache")
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


def first(folder: Path) -> bool:
    """True for the first process of a crew that asks."""
    try:
        os.close(os.open(folder / "first", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def at(module: Any, name: str, count: int, happens: Callable[..., None]) -> None:
    """Before the count-th call of a function, something happens; it gets the call's arguments."""
    function, calls = getattr(module, name), iter(range(1, 1 << 30))

    @functools.wraps(function)
    def called(*arguments: Any, **keywords: Any) -> Any:
        if next(calls) == count:
            happens(*arguments)
        return function(*arguments, **keywords)

    setattr(module, name, called)


def end_first(marks: Path, how: signal.Signals) -> Callable[..., None]:
    def end(*arguments: Any) -> None:
        if first(marks):
            os.kill(os.getpid(), how)

    return end


def killed_making(marks: Path, request: dict[str, Any], argument: str) -> None:
    at(index_cache, "_store", int(argument), end_first(marks, signal.SIGKILL))


def killed_writing(marks: Path, request: dict[str, Any], argument: str) -> None:
    def cut_and_end(descriptor: int) -> None:
        if first(marks):
            with suppress(OSError):  # it may be the folder's
                os.ftruncate(descriptor, os.fstat(descriptor).st_size // 2)
            os.kill(os.getpid(), signal.SIGKILL)

    at(os, "fsync", int(argument), cut_and_end)


def killed_renaming(marks: Path, request: dict[str, Any], argument: str) -> None:
    at(os, "replace", int(argument), end_first(marks, signal.SIGKILL))


def stopped(marks: Path, request: dict[str, Any], argument: str) -> None:
    at(index_cache, "_store", 1, end_first(marks, signal.SIGSTOP))


def waited_for(marks: Path, request: dict[str, Any], argument: str) -> None:
    """The first to build goes on when another has said that it waits."""

    def wait(*arguments: Any) -> None:
        while first(marks) or not (marks / "said").exists():
            time.sleep(0.01)

    at(index_cache, "_store", 1, wait)


def without_locks(marks: Path, request: dict[str, Any], argument: str) -> None:
    def flock(*arguments: Any) -> None:
        raise OSError(getattr(errno, argument), os.strerror(getattr(errno, argument)))

    fcntl.flock = flock  # type: ignore[assignment]


def no_room(marks: Path, request: dict[str, Any], argument: str) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(argument), int(argument)))


def deleted(marks: Path, request: dict[str, Any], argument: str) -> None:
    """The folder of the cache vanishes once in the middle, or whenever it is written to."""

    def delete(*arguments: Any) -> None:
        if argument == "always" or first(marks):
            shutil.rmtree(request["cache"], ignore_errors=True)

    for count in range(1, 20) if argument == "always" else (2,):
        at(os, "replace", count, delete)


FAULTS: dict[str, Callable[[Path, dict[str, Any], str], None]] = {
    "killed_making": killed_making,
    "killed_writing": killed_writing,
    "killed_renaming": killed_renaming,
    "stopped": stopped,
    "waited_for": waited_for,
    "without_locks": without_locks,
    "no_room": no_room,
    "deleted": deleted,
}


def member(request: dict[str, Any], marks: Path) -> dict[str, Any]:
    """What one process of the crew does."""
    said: list[str] = []

    def say(text: str) -> None:
        said.append(text)
        (marks / "said").touch()

    if request.get("nobody") and os.geteuid() == 0:
        os.setegid(NOBODY)
        os.seteuid(NOBODY)
    fault, _, argument = request.get("fault", "").partition(":")
    if fault:
        FAULTS[fault](marks, request, argument)
    index_cache.WaitPolicy = functools.partial(  # type: ignore[assignment, misc]
        WaitPolicy, say=say, words_after=0.2, limit=request.get("patience", DEADLINE)
    )
    try:
        answer = {"samples": build(request)}
    except (ValueError, OSError) as error:
        answer = {"error": str(error)}
    except BaseException:
        answer = {"traceback": traceback.format_exc()}
    return {**answer, "said": said}


def crew(request: dict[str, Any]) -> list[dict[str, Any]]:
    marks = Path(request["marks"])
    children = {}
    pipes = [os.pipe() for _ in range(PROCESSES)]
    for number, (_, theirs) in enumerate(pipes):
        child = os.fork()
        if not child:
            os.write(theirs, json.dumps(member(request, marks)).encode())
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
            build(request)  # whatever is imported late is imported before a crew is `nobody`
            print("[]", flush=True)
        else:
            print(json.dumps(crew(request)), flush=True)


if __name__ == "__main__":
    main()
