"""Scores the tests by mutants: small mistakes in the package that a test must catch.

    make mutants                                        all of mutants.toml
    make mutants ONLY="model/* tests/dist/*" JOBS=4     by file of the package, name or test
    python tests/mutants/run.py --fit                   only whether they fit the package

Each worker has a copy of the repository. A mutant replaces a fragment of the copy's package and
runs its test there. It is caught if the test fails or hangs, survives if the test passes, and is
broken if it does not fit the package or its test does not start. Without a mutant all these tests
must pass; that is checked first.
"""

from __future__ import annotations

import argparse
import fnmatch
import os
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))
from tests.mutants.fragments import MisfitError, replace  # noqa: E402 (the path is complete now)

LIST = Path(__file__).with_name("mutants.toml")
PYTEST = (sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "-p", "no:cacheprovider")
OF_PROOFS = ("-m", "not interop")  # also tests that only the complete proofs run
TIMEOUT_S = 300.0
OUTCOMES = {0: "survived", 1: "caught"}
"""By the exit status of pytest; any other is "broken"."""


@dataclass(frozen=True)
class Mutant:
    """One mistake."""

    target: str
    """Qualified name of the function, class or constant."""
    change: str
    """What is wrong, in words."""
    old: str
    """What is replaced, as in `fragments.py`."""
    new: str
    test: str
    """The narrowest test that should catch it: a folder, a file or a node id."""


@dataclass(frozen=True)
class Mutation:
    """A mutant in the package."""

    mutant: Mutant
    file: str
    """Path below the package; empty if the mutant does not fit."""
    text: str
    """The mutated file, or why the mutant does not fit."""

    def has_any(self, patterns: Sequence[str]) -> bool:
        names = (self.file, self.mutant.target, self.mutant.test)
        return any(fnmatch.fnmatch(name, pattern) for name in names for pattern in patterns)


def read_mutants() -> list[Mutant]:
    entries = tomllib.loads(LIST.read_text(encoding="utf-8"))["mutant"]
    return [Mutant(target=entry.pop("in"), **entry) for entry in entries]


def fit(mutants: Iterable[Mutant], package: Path) -> list[Mutation]:
    """Applies each mutant to the package's text."""
    sources = {
        path.relative_to(package).as_posix(): path.read_text(encoding="utf-8")
        for path in package.rglob("*.py")
    }
    mutations = []
    for mutant in mutants:
        try:
            file, text = replace(sources, mutant.target, mutant.old, mutant.new)
        except (MisfitError, SyntaxError) as error:
            file = ""
            text = str(error)
        mutations.append(Mutation(mutant, file, text))
    return mutations


@contextmanager
def applied(mutation: Mutation, copy: Path) -> Iterator[None]:
    """The mutated file in a copy of the repository."""
    path = copy / "megatron_ds" / mutation.file
    source = path.read_text(encoding="utf-8")
    _write(path, mutation.text)
    try:
        yield
    finally:
        _write(path, source)


def _write(path: Path, text: str) -> None:
    # A bytecode cache is valid for a file's size and its time in whole seconds.
    newer = path.stat().st_mtime + 2
    path.write_text(text, encoding="utf-8")
    os.utime(path, (newer, newer))


def run_tests(copy: Path, *tests: str, timeout: float | None = None) -> tuple[str, str]:
    """Returns the outcome, and the first test that failed or the end of the output."""
    environment = {**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            [*PYTEST, *OF_PROOFS, *tests],
            cwd=copy,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            outcome = OUTCOMES.get(process.wait(timeout), "broken")
        except subprocess.TimeoutExpired:
            process.terminate()
            process.wait()
            return "caught", "hangs"
        output.seek(0)
        text = output.read()
    failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", text, re.MULTILINE)
    return outcome, failed[1] if failed else text[-1000:] if outcome != "survived" else ""


def copy_repository(folder: Path) -> Path:
    """Copies the files that git knows or does not ignore."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "-co", "--exclude-standard"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
    )
    for name in filter(None, listed.stdout.split("\0")):
        if (REPOSITORY / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPOSITORY / name, folder / name)
    (folder / "build").mkdir()
    (folder / "build" / "s3").symlink_to(REPOSITORY / "build" / "s3")  # the server of some tests
    return folder


def score(mutations: list[Mutation], jobs: int) -> list[str]:
    """Runs the mutants, prints and returns each outcome; none if the tests fail without mutants."""
    with tempfile.TemporaryDirectory() as name:
        copies = queue.SimpleQueue[Path]()
        for job in range(jobs):
            copies.put(copy_repository(Path(name) / str(job)))

        def run_one(mutation: Mutation) -> str:
            if not mutation.file:
                return "broken"
            copy = copies.get()
            start = time.monotonic()
            with applied(mutation, copy):
                outcome, detail = run_tests(copy, mutation.mutant.test, timeout=TIMEOUT_S)
            copies.put(copy)
            _print(mutation, outcome, f"{time.monotonic() - start:4.0f} s", detail)
            return outcome

        copy = copies.get()
        tests = sorted({mutation.mutant.test for mutation in mutations})
        baseline, detail = run_tests(copy, "-n", str(jobs), "--dist", "loadfile", *tests)
        copies.put(copy)
        if baseline != "survived":
            print(f"Without a mutant the tests do not pass: {detail}")
            return []
        with ThreadPoolExecutor(jobs) as workers:
            outcomes = list(workers.map(run_one, mutations))
    caught = outcomes.count("caught")
    print(f"{caught} of {len(outcomes)} caught: {100 * caught / max(1, len(outcomes)):.1f} %")
    return outcomes


def _print(mutation: Mutation, outcome: str, seconds: str, detail: str) -> None:
    mutant = mutation.mutant
    print(f"{outcome:9}{seconds:6}  {mutant.target}: {mutant.change}  {detail}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("patterns", nargs="*", default=["*"], help="shell patterns")
    parser.add_argument("--jobs", type=int, default=2, help="workers (default: 2)")
    parser.add_argument("--fit", action="store_true", help="run no test")
    options = parser.parse_args()
    mutations = fit(read_mutants(), REPOSITORY / "megatron_ds")
    chosen = [mutation for mutation in mutations if mutation.has_any(options.patterns)]
    misfits = [mutation for mutation in chosen if not mutation.file]
    for mutation in misfits:
        _print(mutation, "broken", "", mutation.text)
    outcomes = [] if options.fit else score(chosen, options.jobs)
    is_sound = not misfits and (options.fit or (outcomes and "broken" not in outcomes))
    return 0 if is_sound else 1


if __name__ == "__main__":
    sys.exit(main())
