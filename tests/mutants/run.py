"""Scores the tests by mutants: small mistakes in the package that a test must catch.

    make mutants                                        all of mutants.toml
    make mutants ONLY="model/* tests/dist/*" JOBS=4     those whose file or first test matches

Each worker has a copy of the repository; a mutant replaces `old` by `new` in a file of the copy's
package and runs `tests` there. It is caught if a test fails or hangs, survives if all pass, and is
broken if the tests do not start. Without a mutant all these tests must pass; that is checked first.
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
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
LIST = Path(__file__).with_name("mutants.toml")
PYTEST = (sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "-p", "no:cacheprovider")
TIMEOUT_S = 300.0
OUTCOMES = {0: "survived", 1: "caught"}
"""By the exit status of pytest; any other is "broken"."""


@dataclass(frozen=True)
class Mutant:
    """One mistake."""

    file: str
    """Path below the package."""
    change: str
    """What is wrong, in words."""
    old: str
    """Text that occurs once in the file."""
    new: str
    tests: tuple[str, ...]
    """Test files or node ids that should catch it, the narrowest ones."""


def read_mutants() -> list[Mutant]:
    entries = tomllib.loads(LIST.read_text(encoding="utf-8"))["mutant"]
    return [Mutant(**{**entry, "tests": tuple(entry["tests"])}) for entry in entries]


@contextmanager
def applied(mutant: Mutant, copy: Path) -> Iterator[None]:
    """The mutated file in a copy of the repository."""
    path = copy / "megatron_ds" / mutant.file
    source = path.read_text(encoding="utf-8")
    assert source.count(mutant.old) == 1, f"{mutant.change}: {mutant.file} was changed"
    _write(path, source.replace(mutant.old, mutant.new))
    try:
        yield
    finally:
        _write(path, source)


def _write(path: Path, text: str) -> None:
    # A bytecode cache is valid for a file's size and its time in whole seconds.
    newer = path.stat().st_mtime + 2
    path.write_text(text, encoding="utf-8")
    os.utime(path, (newer, newer))


def run_tests(copy: Path, tests: list[str], timeout: float | None = None) -> tuple[str, str]:
    """Returns the outcome, and the first test that failed or the end of the output."""
    environment = {**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            [*PYTEST, *tests],
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
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", text, re.MULTILINE)
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


def score(mutants: list[Mutant], jobs: int) -> bool:
    """Runs the mutants, prints each outcome and the score; returns whether the list is sound."""
    with tempfile.TemporaryDirectory() as name:
        copies = queue.SimpleQueue[Path]()
        for job in range(jobs):
            copies.put(copy_repository(Path(name) / str(job)))

        def run_one(mutant: Mutant) -> str:
            copy, start = copies.get(), time.monotonic()
            with applied(mutant, copy):
                outcome, detail = run_tests(copy, list(mutant.tests), TIMEOUT_S)
            copies.put(copy)
            seconds = f"{time.monotonic() - start:4.0f} s"
            print(f"{outcome:9}{seconds}  {mutant.file}: {mutant.change}  {detail}", flush=True)
            return outcome

        copy = copies.get()
        baseline, detail = run_tests(
            copy, sorted({test for each in mutants for test in each.tests})
        )
        copies.put(copy)
        if baseline != "survived":
            print(f"Without a mutant the tests do not pass: {detail}")
            return False
        with ThreadPoolExecutor(jobs) as workers:
            outcomes = list(workers.map(run_one, mutants))
    caught = outcomes.count("caught")
    print(f"{caught} of {len(outcomes)} caught: {100 * caught / max(1, len(outcomes)):.1f} %")
    return "broken" not in outcomes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("patterns", nargs="*", default=["*"], help="shell patterns")
    parser.add_argument("--jobs", type=int, default=2, help="workers (default: 2)")
    options = parser.parse_args()
    chosen = [
        mutant
        for mutant in read_mutants()
        if any(
            fnmatch.fnmatch(name, pattern)
            for pattern in options.patterns
            for name in (mutant.file, mutant.tests[0])
        )
    ]
    return 0 if score(chosen, options.jobs) else 1


if __name__ == "__main__":
    sys.exit(main())
