"""How many of the parallel mutants the types find, without running numbers.

    python -m tests.typed.score                    all of them
    python -m tests.typed.score "parallel/*"       by file of the package, name or test

A mutant is parallel if it is in `parallel/` or `model/` and a test of several ranks must catch it.
It is found if a layout of the covering array does not pass.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.mutants import run as mutants

CHECK = """
import json, sys
from tests.typed import cases
for run in json.loads(sys.stdin.read()):
    try:
        cases.check(run, *cases.WORLDS[0])
    except Exception as error:
        print(f"{type(error).__name__}: {error}".splitlines()[0])
        break
"""
"""Prints the first error; nothing if all layouts pass."""


def parallel_mutants(patterns: Sequence[str] = ("*",)) -> list[mutants.Mutation]:
    fitted = mutants.fit(mutants.read_mutants(), mutants.REPOSITORY / "megatron_ds")
    return [
        each
        for each in fitted
        if each.file.startswith(("parallel/", "model/"))
        and each.mutant.test.startswith("tests/dist/")
        and each.has_any(patterns)
    ]


def find(mutations: list[mutants.Mutation]) -> dict[str, str]:
    """What the types say about each mutant by its description; empty if they do not find it."""
    from tests.dist.layouts import covering

    runs = json.dumps([dict(run) for run in covering()])
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        copy = mutants.copy_repository(Path(folder))
        for mutation in mutations:
            with mutants.applied(mutation, copy):
                done = subprocess.run(
                    [sys.executable, "-c", CHECK],
                    input=runs,
                    cwd=copy,
                    env={**os.environ, "PYTHONPATH": f"{copy}:{os.environ.get('PYTHONPATH', '')}"},
                    capture_output=True,
                    text=True,
                )
            name = f"{mutation.mutant.target}: {mutation.mutant.change}"
            found[name] = done.stdout.strip() or (
                "" if done.returncode == 0 else done.stderr[-300:]
            )
            print(
                f"{'found' if found[name] else 'not found':10}{name}  {found[name][:300]}",
                flush=True,
            )
    print(f"{sum(map(bool, found.values()))} of {len(found)} found by types")
    return found


if __name__ == "__main__":
    find(parallel_mutants(sys.argv[1:] or ["*"]))
