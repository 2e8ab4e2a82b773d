"""Runs the tests of `make quick` with other versions of the packages that setup.py admits.

    make test-versions VERSIONS="lowest torch==2.14.1 transformers==5.24.0"

`lowest` has the lower bounds of setup.py together; other versions run alone, beside the pins.

Each run has an environment of its own in build/versions, into which pip installs this project with
its extras, so that a version that pip itself would not choose is an error of the run. The lower
bounds of torch and DeepSpeed are tried alone, since torch's builds are large. The results are kept
in bounds.json and printed as a table.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))
from tests.reports import Case, read_cases  # noqa: E402 (the repository is on the path now)
from tests.unit.test_requirements import pins, ranges  # noqa: E402

ENVIRONMENTS = REPOSITORY / "build" / "versions"
RESULTS = Path(__file__).with_name("bounds.json")
EXTRAS = "preprocess,tokenizers,cleaning,plot,server,test"
"""Extras of setup.py that the tests use; the rest is large or needs a service."""
TRIED_ALONE = ("torch", "deepspeed")
SETS = {
    "unit tests": ["tests/unit", "--deselect=tests/unit/test_requirements.py"],
    "one case of each proof": ["-m", "smoke", "tests/dist", "tests/e2e"],
}
"""What is run, with pytest's arguments: the tests of `make quick`."""
HEAD = """\
# Versions of the other packages

A cell has the number of failed tests and of all that ran.

"""

Result = dict[str, Any]
"""Of a set of tests: how many "tests" ran, and the first error of each that "failed"."""


def lower_bounds() -> dict[str, str]:
    """The lower bounds of setup.py by package, without those that are tried alone."""
    bounds = {}
    for requirement in ranges():
        lowest = [part.version for part in requirement.specifier if part.operator == ">="]
        name = canonicalize_name(requirement.name)
        if lowest and name not in TRIED_ALONE:
            bounds[name] = lowest[0]
    return bounds


def constraints(version: str) -> dict[str, str]:
    """The exact versions of a run by package; what has none is chosen by pip."""
    if version == "lowest":
        of_tests = {canonicalize_name(requirement.name) for requirement in ranges("test")}
        return lower_bounds() | {name: pins()[name] for name in (*TRIED_ALONE, *of_tests)}
    requirement = Requirement(version)
    tried = {canonicalize_name(requirement.name): str(requirement.specifier).removeprefix("==")}
    named = {canonicalize_name(requirement.name) for requirement in ranges()}
    return {name: pin for name, pin in pins().items() if name in named} | tried


def install(version: str) -> Path:
    """Installs the project with the versions of a run, if missing; returns its interpreter."""
    folder = ENVIRONMENTS / version.replace("==", "-")
    python = folder / "bin" / "python"
    if not (folder / ".installed").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        file = folder / "constraints.txt"
        file.write_text("".join(f"{name}=={pin}\n" for name, pin in constraints(version).items()))
        pip = [str(python), "-m", "pip", "install", "--quiet", "--no-compile"]
        subprocess.run(
            [*pip, "--constraint", str(file), "setuptools", "wheel", "ninja"], check=True
        )
        project = f"{REPOSITORY}[{EXTRAS}]"
        torch = f"torch=={constraints(version)['torch']}"
        subprocess.run([*pip, "--constraint", str(file), torch, "numpy"], check=True)
        command = [*pip, "--constraint", str(file), "--no-build-isolation", "--editable", project]
        subprocess.run(command, check=True)
        (folder / ".installed").touch()
    return python


def run_tests(python: Path) -> dict[str, Result]:
    """The results of the sets of tests with an environment."""
    results = {}
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "TORCH_EXTENSIONS_DIR": str(python.parents[1] / "torch_extensions"),
        "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}",
    }
    for name, arguments in SETS.items():
        report = python.parents[1] / "report.xml"
        report.unlink(missing_ok=True)
        command = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "2"]
        command += ["--dist", "loadfile", f"--junitxml={report}", *arguments]
        subprocess.run(command, cwd=REPOSITORY, env=environment, check=False)
        results[name] = result_of([case for case in read_cases(report) if not case.is_skipped])
    return results


def result_of(cases: Sequence[Case]) -> Result:
    """The result of a set of tests."""
    failed = {f"{case.test} {case.name}": case.error for case in cases if case.error is not None}
    return {"tests": len(cases), "failed": failed}


def page(results: dict[str, dict[str, Result]]) -> str:
    """The results as a page of Markdown."""
    lines = [HEAD, f"| | {' | '.join(SETS)} |\n", f"|---|{'---|' * len(SETS)}\n"]
    for version, by_set in sorted(results.items()):
        cells = [_cell(by_set[name]) for name in SETS]
        lines.append(f"| {version} | {' | '.join(cells)} |\n")
    for version, by_set in sorted(results.items()):
        failed = {
            name: error for result in by_set.values() for name, error in result["failed"].items()
        }
        if failed:
            lines.append(f"\n## Failures with {version}\n\n| test | error |\n|---|---|\n")
            lines += [
                f"| `{name}` | {error.replace('|', chr(92) + '|')} |\n"
                for name, error in failed.items()
            ]
    return "".join(lines)


def _cell(result: Result) -> str:
    failed = len(result["failed"])
    return f"**{failed} of {result['tests']}**" if failed else f"0 of {result['tests']}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("versions", nargs="+", help="lowest, or such as torch==2.14.1")
    stored = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    for version in parser.parse_args().versions:
        print(f"== {version}", flush=True)
        stored[version] = run_tests(install(version))
        RESULTS.write_text(json.dumps(stored, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    print(page(stored))


if __name__ == "__main__":
    main()
