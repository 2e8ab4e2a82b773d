"""Runs the proofs with other versions of DeepSpeed, and writes which version fails what.

    make test-deepspeed VERSIONS="0.19.8 0.19.4"
    python tests/versions/run.py --only "*test_parity*" 0.19.4      adds the results of some tests

Each version is installed alone into build/deepspeed/VERSION, from the package index and without its
requirements: everything else, torch included, is that of the environment. Its C++ ops are built
there, too. The results are kept in results.json, from which docs/development/deepspeed_versions.md
and the versions in docs/reference/support_matrix.md are written.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))
from tests.dist.proofs import PROOFS  # noqa: E402 (the repository is on the path now)
from tests.reports import Case, run_pytest  # noqa: E402

INSTALLED = REPOSITORY / "build" / "deepspeed"
RESULTS = Path(__file__).with_name("results.json")
OUTPUT = REPOSITORY / "docs" / "development" / "deepspeed_versions.md"
SUITE = {
    "every pair of values of the support matrix equals one process": (
        "tests/dist/test_layouts.py::test_layout_equals_one_process"
    ),
    "every ZeRO stage equals one process, with Muon and groups of parameters": (
        "tests/dist/test_parity.py::test_layout_equals_one_process"
    ),
    "a step with a non-finite gradient is skipped on all ranks": "tests/dist/test_nonfinite.py",
    "a killed and resumed run equals an uninterrupted one, bit for bit": (
        "tests/e2e/test_resume.py::test_killed_and_resumed_equals_uninterrupted"
    ),
}
"""What is tested -> the test, of the tests that say most."""
TESTS = tuple(dict.fromkeys([*SUITE.values(), *(proof.test for proof in PROOFS)]))
"""All tests of the support matrix, and others."""
HEAD = """\
# Versions of DeepSpeed

For people who must use another version of DeepSpeed, or raise the one that is required.

Written by `make test-deepspeed VERSIONS="..."`, which installs each version alone, with the torch
of `requirements.txt` on a CPU, and runs some of the proofs with it. A cell has the number of failed
cases and of all that there were. `setup.py` admits none that fails; the version of
`requirements.txt` passes all tests.

Versions before 0.19.8 lack several things at once, so that no rejected setting would be enough: a
step with a NaN in a gradient in bf16 or fp32 is not skipped, nor can a spike be; on a CPU
DeepSpeed's activation checkpointing fails, and fp16 with ZeRO 1 does not follow fp32.

"""

Result = dict[str, Any]
"""Of a test: "cases", and "failed": the names of the failed cases with their first errors. Of the
layouts also "layouts": the values of each case."""


def install(version: str) -> Path:
    """The folder that has a version; installs it if it is missing."""
    folder = INSTALLED / version
    if not (folder / "deepspeed").is_dir():
        pip = (sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
        alone = ("--no-deps", "--no-build-isolation", "--target", str(folder))
        subprocess.run([*pip, *alone, f"deepspeed=={version}"], check=True)
    return folder


def run_suite(folder: Path, tests: Sequence[str]) -> dict[str, Result]:
    """The results of tests with the version in a folder."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(folder), str(REPOSITORY)]),
        "TORCH_EXTENSIONS_DIR": str(folder / "torch_extensions"),
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
    }
    arguments = ["-m", "not interop and not gpu", *tests]  # with the cases of the proofs
    return results_of(run_pytest(folder / "report.xml", arguments, environment), tests)


def results_of(cases: Iterable[Case], tests: Sequence[str] = TESTS) -> dict[str, Result]:
    """The results of cases by test."""
    results: dict[str, Result] = {test: {"cases": 0, "failed": {}} for test in tests}
    for case in cases:
        result = results.get(case.test) or results.get(case.test.partition("::")[0])
        if result is None:
            continue
        result["cases"] += 1
        if "layout" in case.properties:
            result.setdefault("layouts", {})[case.name] = json.loads(case.properties["layout"])
        if case.error is not None:
            result["failed"][case.name] = case.error
    return results


def page(results: dict[str, dict[str, Result]]) -> str:
    """The text of docs/development/deepspeed_versions.md."""
    versions = sorted(results, key=_numbers, reverse=True)
    rows = [["", *versions], ["---"] * (1 + len(versions))]
    claims = {test: f"{claim} (`{test}`)" for claim, test in SUITE.items()}
    for test in TESTS:
        cells = [_cell(results[each].get(test)) for each in versions]
        rows.append([claims.get(test, f"`{test}`"), *cells])
    lines = [HEAD, *(f"| {' | '.join(row)} |\n" for row in rows)]
    for version in versions:
        lines += _failures(version, results[version].values())
    return "".join(lines)


def _failures(version: str, results: Iterable[Result]) -> list[str]:
    """The failed cases of a version by their first error."""
    by_error: dict[str, list[str]] = {}
    for result in results:
        for name, error in result["failed"].items():
            by_error.setdefault(error.replace("|", "\\|"), []).append(name)
    rows = [f"| {len(names)} | `{names[0]}` | {error} |\n" for error, names in by_error.items()]
    head = (
        f"\n## Failures with {version}\n\n| cases | first of them | error |\n| --- | --- | --- |\n"
    )
    return [head, *rows] if rows else []


def _cell(result: Result | None) -> str:
    if result is None or not result["cases"]:
        return "not run"
    failed = len(result["failed"])
    return f"**{failed} of {result['cases']}**" if failed else f"0 of {result['cases']}"


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def update(numbers: Sequence[str], tests: Sequence[str]) -> dict[str, dict[str, Result]]:
    """Runs tests with versions, writes what they gave, and returns it by version."""
    stored = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    found = {}
    for version in numbers:
        print(f"== DeepSpeed {version}", flush=True)
        found[version] = run_suite(install(version), tests)
        stored[version] = {**stored.get(version, {}), **found[version]}
        RESULTS.write_text(json.dumps(stored, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        OUTPUT.write_text(page(stored), encoding="utf-8")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("versions", nargs="+", help="such as 0.19.8")
    parser.add_argument("--only", action="append", default=[], help="patterns of tests")
    arguments = parser.parse_args()
    patterns = arguments.only or ["*"]
    tests = [test for test in TESTS if any(fnmatch.fnmatch(test, pattern) for pattern in patterns)]
    update(arguments.versions, tests)
    print(f"wrote {OUTPUT}; python -m tests.pages writes docs/reference/support_matrix.md")


if __name__ == "__main__":
    main()
