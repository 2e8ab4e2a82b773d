#!/usr/bin/env python
"""Checks and measurements on one accelerator, within a budget of time.

    python benchmarks/gpu.py references --data FOLDER       before, without the accelerator
    python benchmarks/gpu.py first --budget 480 --data FOLDER --output results.jsonl
    python benchmarks/gpu.py second --budget 230 --output results.jsonl
    python benchmarks/gpu.py certificate --output benchmarks/certificates/NAME.json
    python benchmarks/gpu.py COMMAND [--size SIZE] [--cases NAME ...] [--output FILE]

Every finished case is one JSON line at the end of the output file, at once. Once the budget is
used, nothing starts, and what runs is ended. With `--size tiny` every command also runs on a CPU,
which tries the program, not the device. docs/running/gpu.md says what each one is for and what to
expect.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import os
import shlex
import signal
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.accelerator import certificate, smoke, train
from benchmarks.accelerator.certificate_files import RefusedFileError
from benchmarks.accelerator.certificate_rules import MOST_RANKS
from benchmarks.accelerator.models import PEAK_TFLOPS, SIZES
from benchmarks.accelerator.processes import RUN_S, Row, budget, run
from benchmarks.common import this_machine, versions

TINY = "tiny"
MILLION = 1_000_000
PACKAGES = ("torch", "deepspeed", "transformers", "numpy")
TESTS = {
    "kernels": ("tests/gpu/test_kernels.py", "tests/unit/model", "tests/unit/engine"),
    "runs": ("tests/gpu/test_runs.py",),
}
"""Case of `tests` -> files and folders, so that the other tests are not collected."""
CANARY_FAILED = 3


@dataclass(frozen=True)
class Command:
    """A command: yields a row for each case as soon as it is finished."""

    cases: Callable[[argparse.Namespace], Iterator[Row]]
    lines: Callable[[Row], Iterator[str]]
    help: str


@dataclass(frozen=True)
class Stage:
    """A command that `first` or `second` runs in a process of its own.

    Attributes:
        words: Its words. SIZE stands for the size, DATA for the folder.
        limit: Its longest time, in seconds.
        beside: Another command that runs at the same time, because it leaves the device idle.
        is_canary: Nothing else is worth the device's time if it fails.
    """

    words: str
    limit: float
    beside: str | None = None
    is_canary: bool = False


FIRST = (
    Stage("about --size SIZE", 60),
    Stage("smoke --cases bf16 --data DATA", 90, is_canary=True),
    Stage("train --size SIZE --cases default", 110),
    Stage("smoke --jobs JOBS --data DATA", 190, beside="tests --cases kernels"),
    Stage("train --size SIZE --cases eager", 110),
    Stage("train --size SIZE --cases plain", 120),
    Stage("head --size SIZE", 60),
    Stage("attention --size SIZE", 60),
)
SECOND = (
    Stage("train --size MIDDLE --warm-up 5 --timed 10", 90),
    Stage("train --size BIG --warm-up 4 --timed 6", 120),
    Stage("train --size LLAMA --warm-up 4 --timed 6", 90),
    Stage("generate --size SIZE", 90),
    Stage("tests --cases runs --jobs JOBS", 150),
    Stage("optimizers --size SIZE", 90),
    Stage("context --size SIZE", 90),
    Stage("disk --size SIZE", 100),
)
"""In order of their value: the last ones are left out if there is no time."""


def main(argv: list[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(argv)
    if options.output is None and options.command == "certificate":
        parser.error("certificate needs --output FILE")
    if options.ranks is not None and not 1 <= options.ranks <= MOST_RANKS:
        parser.error(f"--ranks {options.ranks} is not 1 to {MOST_RANKS}, as a machine has")
    if options.data is None and options.command in ("references", "first"):
        parser.error(f"{options.command} needs --data FOLDER")
    end_by_signal()
    budget.start(options.budget)
    try:
        return _run(options)
    except RefusedFileError as error:
        parser.exit(2, f"gpu.py: {error}\n")


def end_by_signal() -> None:
    """Let SIGTERM end what was started, too, as Ctrl-C does."""

    def end(*_: object) -> None:
        raise SystemExit(128 + signal.SIGTERM)

    signal.signal(signal.SIGTERM, end)


def _run(options: argparse.Namespace) -> int:
    """Run a command, and return its status."""
    begin = time.perf_counter()
    status = 0
    command = COMMANDS[options.command]
    is_certificate = options.command == "certificate"
    rows = command.cases(options)  # a certificate watches the budget, and says what is missing
    for row in rows if is_certificate else budget.cases(rows):
        skipped = row.get("skipped")
        text = command.lines(row) if skipped is None else (f"{row['name']}: skipped, {skipped}",)
        print("\n".join(text), flush=True)
        if options.output is not None and not is_certificate:
            _append(options.output, {"command": options.command, **row})
        status = max(status, row.get("exit_status", int(not row.get("passed", True))))
    print(f"{options.command}: {time.perf_counter() - begin:.0f} s")
    return status


def _append(path: Path, row: Row) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row, default=str) + "\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=str(__doc__),
        epilog="\n".join(f"{name:12}{command.help}" for name, command in COMMANDS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("command", choices=COMMANDS, metavar="COMMAND", help="one of those below")
    add("--size", choices=sorted(SIZES), default="124m", help="size of the model (default: 124m)")
    add("--budget", type=float, default=RUN_S, metavar="SECONDS", help="time for all cases")
    add("--output", type=Path, metavar="FILE", help="file to which the figures are appended (JSON)")
    add("--cases", nargs="+", metavar="NAME", help="cases to run (default: all that are quick)")
    add("--data", type=Path, metavar="FOLDER", help="of `references`, for smoke and first")
    add("--jobs", type=int, default=6, metavar="N", help="smoke, tests: runs at a time")
    add("--iterations", type=int, default=20, metavar="N", help="references: length of a run")
    add("--warm-up", type=int, default=6, metavar="N", help="train: steps before the measurement")
    add("--timed", type=int, default=15, metavar="N", help="train: measured steps")
    add("--micro-batch", type=int, metavar="N", help="train: its only micro-batch")
    add("--trace", type=Path, metavar="FILE", help="train: a Chrome trace of a step (JSON)")
    add("--peak-tflops", type=float, default=PEAK_TFLOPS, metavar="X", help="dense bf16 rate")
    add("--ranks", type=int, metavar="N", help="certificate: devices (default: all)")
    add("--flags", nargs=argparse.REMAINDER, default=[], help="further flags of our commands")
    return parser


def _about(options: argparse.Namespace) -> Iterator[Row]:
    from benchmarks.accelerator import device

    machine = {**dataclasses.asdict(this_machine()), "device": device.name()}
    here = _device()
    rates = device.rates(here, _rows(options))
    yield {"machine": machine, "versions": versions(PACKAGES), **device.describe(here), **rates}


def _rows(options: argparse.Namespace) -> int:
    """Rows of the matrices by which the device's rates are measured."""
    return 256 if options.size.startswith(TINY) else 8192


def _measured(options: argparse.Namespace) -> Row:
    """Memory and rates of the device: those in the output file, or measured in a process."""
    from benchmarks.accelerator import device

    if options.output is not None and options.output.exists():
        found = map(json.loads, options.output.read_text(encoding="utf-8").splitlines())
        about: list[Row] = [row for row in found if row.get("rows") == _rows(options)]
        if about:
            return about[-1]
    return device.measured(_rows(options))


def _certificate(options: argparse.Namespace) -> Iterator[Row]:
    from benchmarks.accelerator import device
    from megatron_ds.launch.device import visible_devices

    visible = visible_devices()
    ranks = options.ranks or min(visible or 1, MOST_RANKS)
    if visible is not None and ranks > visible:
        yield {"name": f"--ranks {ranks}: {visible} devices are visible", "passed": False}
        return

    def rates() -> Row:
        found = device.measured(_rows(options))
        names = ("bf16_tflops", "copy_tb_s", "memory_gib")
        return {name: found[name] for name in names if name in found}

    about = {"device": device.name(), "versions": versions(PACKAGES)}
    tiny = options.size.startswith(TINY)
    yield from certificate.measure(options.output.resolve(), ranks, about, rates, tiny=tiny)


def _references(options: argparse.Namespace) -> Iterator[Row]:
    tiny = options.size == TINY
    return smoke.write_references(options.data, 3 if tiny else options.iterations, tiny=tiny)


def _smoke(options: argparse.Namespace) -> Iterator[Row]:
    names = options.cases or (smoke.TINY if options.size == TINY else ())
    if options.data is not None:
        yield from smoke.measure(options.data.resolve(), names=names, jobs=options.jobs)
        return
    with tempfile.TemporaryDirectory() as temporary:
        options.data = Path(temporary)
        yield from _references(options)
        yield from smoke.measure(options.data, names=names, jobs=options.jobs)


def _tests(options: argparse.Namespace) -> Iterator[Row]:
    for name in options.cases or TESTS:
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder) / "report.xml"
            words = ["-m", "pytest", "-m", "gpu", *TESTS[name], f"--junit-xml={report}"]
            if options.jobs > 1 and importlib.util.find_spec("xdist"):
                words += ["-n", str(options.jobs)]
            done = run([*words, *options.flags])
            suite = next(ElementTree.parse(report).iter("testsuite")) if report.exists() else None
        counts = {} if suite is None else {k: int(v) for k, v in suite.items() if v.isdigit()}
        end = {"tail": done.output.splitlines()[-10:], "passed": done.status == 0}
        yield {"name": name, **counts, **done.describe(), **end}


def _test_lines(row: Row) -> Iterator[str]:
    yield f"{row['name']:10}{'passed' if row['passed'] else 'FAILED':8}{row['wall_seconds']:7.1f} s"
    yield from ("    " + line for line in row["tail"])


def _train(options: argparse.Namespace) -> Iterator[Row]:
    how = _measurement(options)
    names = options.cases or ("default",)
    for row in train.measure(options.size, _size(options), names, how):
        yield {**row, "passed": "seconds" in row or "skipped" in row}


def _train_lines(row: Row) -> Iterator[str]:
    yield from train.lines(row)
    yield from list(train.kernel_lines(row))[:12]


def _attention(options: argparse.Namespace) -> Iterator[Row]:
    from benchmarks.accelerator import sweep

    tiny = options.size == TINY
    lengths = (64,) if tiny else (1024, 2048, 8192)
    tokens, heads, head_dim = (128, 2, 32) if tiny else (32768, SIZES[options.size].heads, 64)
    return sweep.attention(_device(), lengths, tokens=tokens, heads=heads, head_dim=head_dim)


def _context(options: argparse.Namespace) -> Iterator[Row]:
    from benchmarks.accelerator import context

    if options.size == TINY:
        return context.measure(heads=4, head_dim=32, lengths=(256,))
    heads = SIZES[options.size].heads
    return context.measure(heads=heads, head_dim=64, lengths=(8192, 32768, 131072))


def _context_lines(row: Row) -> Iterator[str]:
    from benchmarks.accelerator import context

    return context.lines(row)


def _head(options: argparse.Namespace) -> Iterator[Row]:
    from benchmarks.accelerator import sweep

    size = SIZES[options.size]
    tokens = 256 if options.size == TINY else 65536
    vocab = size.config().padded_vocab(1)
    return sweep.head(_device(), tokens=tokens, hidden=size.hidden, vocab=vocab)


def _fp8(options: argparse.Namespace) -> Iterator[Row]:
    from benchmarks.accelerator import fp8

    tiny = options.size == TINY
    names = options.cases or ("layers", "steps")
    if "layers" in names:
        hidden = (64,) if tiny else (1024, 2048, 4096, 8192)
        yield from fp8.layers(_device(), tokens=128 if tiny else 16384, hidden=hidden)
    if "steps" in names:
        sizes = (TINY,) if tiny else ("1.3b", "llama-8b")
        for row in fp8.steps(sizes, _measurement(options), fewest=1 if tiny else 1024):
            yield {**row, "passed": "seconds" in row}


def _fp8_lines(row: Row) -> Iterator[str]:
    from benchmarks.accelerator import fp8

    return fp8.lines(row)


def _engine(options: argparse.Namespace) -> Iterator[Row]:
    from benchmarks.accelerator import sweep

    names = options.cases or (("default",) if options.size == TINY else tuple(sweep.DS_CONFIGS))
    return sweep.engine(options.size, _size(options), names, _measurement(options))


def _optimizers(options: argparse.Namespace) -> Iterator[Row]:
    from benchmarks.accelerator import sweep

    return sweep.optimizers(_device(), MILLION if options.size == TINY else 124 * MILLION)


def _disk(options: argparse.Namespace) -> Iterator[Row]:
    from benchmarks.accelerator import sweep

    yield from sweep.checkpoints(SIZES[options.size])
    yield from sweep.disk(_device(), (1 if options.size == TINY else 1000) * MILLION)


def _sweep_lines(row: Row) -> Iterator[str]:
    from benchmarks.accelerator import sweep

    return sweep.lines(row)


def _generate(options: argparse.Namespace) -> Iterator[Row]:
    from benchmarks.accelerator import generate

    batches, new_tokens = ((1, 2), 8) if options.size == TINY else ((1, 8, 64), 128)
    device = _device()
    return generate.measure(device, SIZES[options.size], batches=batches, new_tokens=new_tokens)


def _generate_lines(row: Row) -> Iterator[str]:
    from benchmarks.accelerator import generate

    return generate.lines(row)


def _stages(stages: tuple[Stage, ...], options: argparse.Namespace) -> Iterator[Row]:
    """Run stages one after the other, each within its limit and the budget."""
    failed = False
    for stage in stages:
        with ThreadPoolExecutor(2) as pool:
            beside = stage.beside and pool.submit(_stage, stage.beside, stage.limit, options)
            rows = [
                _stage(stage.words, stage.limit, options),
                *([beside.result()] if beside else []),
            ]
        for row in rows:
            failed |= row["status"] != 0
            yield {**row, "exit_status": int(failed)}
        if stage.is_canary and failed:
            yield {
                "name": "the rest",
                "skipped": "the canary failed",
                "exit_status": CANARY_FAILED,
            }
            return
        if not budget.left:
            return


def _stage(words: str, limit: float, options: argparse.Namespace) -> Row:
    tiny = options.size == TINY
    values = {
        "SIZE": options.size,
        "MIDDLE": TINY if tiny else "345m",
        "BIG": TINY if tiny else "1.3b",
        "LLAMA": "tiny-llama" if tiny else "llama-0.5b",
        "JOBS": str(options.jobs),
        "DATA": str(options.data),
    }
    arguments: list[object] = [values.get(word, word) for word in shlex.split(words)]
    limit = min(limit, budget.left)
    arguments += ["--budget", limit]
    if options.output is not None:
        arguments += ["--output", options.output.resolve()]
    if tiny and "--size" not in arguments:
        arguments += ["--size", TINY]
    done = run([Path(__file__).resolve(), *arguments, "--flags", *options.flags], timeout=limit + 5)
    return {"name": words, **done.describe(), "text": done.output.splitlines()[-40:]}


def _stage_lines(row: Row) -> Iterator[str]:
    yield f"== {row['name']}: status {row['status']}, {row['wall_seconds']:.0f} s"
    yield from row["text"]


def _about_lines(row: Row) -> Iterator[str]:
    yield json.dumps(row, indent=2)


COMMANDS = {
    "references": Command(_references, smoke.lines, "data, and losses of the CPU, for `smoke`"),
    "first": Command(
        lambda options: _stages(FIRST, options), _stage_lines, "does it run, is it right, how fast"
    ),
    "second": Command(
        lambda options: _stages(SECOND, options), _stage_lines, "larger models, generation, tests"
    ),
    "certificate": Command(
        _certificate, certificate.lines, "collectives, layouts, rates and speeds, in one JSON file"
    ),
    "about": Command(_about, _about_lines, "versions and measured rates of the device"),
    "smoke": Command(_smoke, smoke.lines, "runs of every feature, compared with the CPU"),
    "tests": Command(_tests, _test_lines, f"tests marked gpu; cases: {', '.join(TESTS)}"),
    "train": Command(_train, _train_lines, f"throughput; cases: {', '.join(train.CONTENDERS)}"),
    "attention": Command(_attention, _sweep_lines, "kernels of attention by length"),
    "context": Command(_context, _context_lines, "context parallelism: what hides its messages"),
    "fp8": Command(_fp8, _fp8_lines, "linear layers in fp8, and steps; cases: layers, steps"),
    "head": Command(_head, _sweep_lines, "output layer and loss by the size of chunks"),
    "engine": Command(_engine, _sweep_lines, "keys of the DeepSpeed file"),
    "optimizers": Command(_optimizers, _sweep_lines, "implementations of AdamW"),
    "disk": Command(_disk, _sweep_lines, "saving and loading"),
    "generate": Command(_generate, _generate_lines, "generation, greedy and sampled"),
}


def _size(options: argparse.Namespace) -> Any:
    size = SIZES[options.size]
    if options.micro_batch is None:
        return size
    return dataclasses.replace(size, micro_batches=(options.micro_batch,), smallest_gib={})


def _measurement(options: argparse.Namespace) -> train.Measurement:
    tiny = options.size.startswith(TINY)
    found = _measured(options)
    return train.Measurement(
        peak_tflops=options.peak_tflops,
        warm_up=1 if tiny else options.warm_up,
        timed=2 if tiny else options.timed,
        extra=tuple(options.flags),
        trace=options.trace and options.trace.resolve(),
        measured_tflops=found.get("bf16_tflops"),
        device_gib=found.get("memory_gib", float("inf")),
    )


def _device() -> Any:
    """This process's device, after a process group of one process has been set up."""
    from benchmarks.train_step import start_process_group

    return start_process_group(len(os.sched_getaffinity(0)))


if __name__ == "__main__":
    raise SystemExit(main())
