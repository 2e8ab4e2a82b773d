"""How many of the parallel mutants the types find, without running numbers.

    python -m tests.typed.score                    all of them
    python -m tests.typed.score "parallel/*"       by file of the package, name or test

A mutant is parallel if it is in `parallel/` or `model/` and a test of several ranks must catch it.
It is found if a layout of the covering array does not pass.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.dist.layouts import Pair, RunLayout, covering, pairs_of
from tests.mutants import run as mutants
from tests.typed import cases as _  # noqa: F401 (with the libraries that a child needs)

LAYOUT = ("tp", "sequence", "pp", "cp", "sp", "experts", "model", "documents")
"""Axes of the covering array of whose values the score has all pairs."""


def parallel_mutants(patterns: Sequence[str] = ("*",)) -> list[mutants.Mutation]:
    fitted = mutants.fit(mutants.read_mutants(), mutants.REPOSITORY / "megatron_ds")
    return [
        each
        for each in fitted
        if each.file.startswith(("parallel/", "model/"))
        and each.mutant.test.startswith("tests/dist/")
        and each.has_any(patterns)
    ]


def selected() -> list[RunLayout]:
    """Runs of the covering array with all its pairs of values of `LAYOUT`."""

    def parts(run: RunLayout) -> set[Pair]:
        return pairs_of({axis: run[axis] for axis in LAYOUT})

    left = list(covering())
    chosen = []
    missing = set[Pair]().union(*map(parts, left))
    while missing:
        run = max(left, key=lambda run: len(parts(run) & missing))
        missing -= parts(run)
        chosen.append(run)
    return chosen


def in_copy(copy: Path, runs: Sequence[RunLayout]) -> str:
    """The first error of the types in a copy of the repository, or of another kind, or none.

    A child of this process, which has imported the libraries, imports the copy.
    """
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        message = ""
        try:
            for name in [name for name in sys.modules if re.match(r"(megatron_ds|tests)\b", name)]:
                del sys.modules[name]
            sys.path.insert(0, str(copy))
            cases = importlib.import_module("tests.typed.cases")
            names = [name for name in cases.FURTHER if name.endswith((" tensor", " sequence"))]
            further = [cases.FURTHER[name] for name in names]
            for run, changes in [*further, *((run, {}) for run in runs)]:
                cases.check(run, *cases.WORLDS[0], **changes)
        except Exception as error:
            message = f"{type(error).__name__}: {error}".splitlines()[0]
        finally:
            os.write(writer, message.encode())
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as answer:
        text = answer.read()
    os.waitpid(child, 0)
    return text


def find(mutations: list[mutants.Mutation]) -> dict[str, str]:
    """What the types say about each mutant by its description; empty if they do not find it."""
    runs = selected()
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        copy = mutants.copy_repository(Path(folder))
        if error := in_copy(copy, runs):
            raise ValueError(f"without a mutant the types do not agree: {error}")
        for mutation in mutations:
            with mutants.applied(mutation, copy):
                message = in_copy(copy, runs)
            name = f"{mutation.mutant.target}: {mutation.mutant.change}"
            found[name] = message.removeprefix("TypesError: ") if "TypesError" in message else ""
            verdict = "found" if found[name] else "other" if message else "not found"
            print(f"{verdict:10}{name}  {message}", flush=True)
    print(f"{sum(map(bool, found.values()))} of {len(found)} found by types")
    return found


if __name__ == "__main__":
    find(parallel_mutants(sys.argv[1:] or ["*"]))
