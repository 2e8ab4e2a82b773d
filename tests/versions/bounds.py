"""Runs what users do, and tests, with other versions of the packages that setup.py admits.

    make test-versions VERSIONS="lowest torch==2.14.1 transformers==5.23.0 python3.14"

`lowest` has the lower bounds of setup.py together, and `newest` the newest versions that pip finds
within its ranges. Other versions replace those of requirements.txt; the rest stays as it is there.

Each run has an environment of its own in build/versions. For `lowest` and `newest` pip installs
this project with its extras, so that versions that contradict each other are an error of the run.
An environment such as `python3.14` has requirements.txt with that interpreter, which PATH names.
The other environments have only the named versions, in front of the packages of the interpreter
that runs this script. The results are kept in bounds.json, from which
docs/development/package_versions.md is written. `--sets` repeats some sets of tests and keeps the
results of the others.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))
from tests.reports import Case, machine, read_cases  # noqa: E402 (the path is set now)
from tests.unit.conftest import MEMORY  # noqa: E402
from tests.unit.test_requirements import extras, pins, ranges  # noqa: E402

ENVIRONMENTS = REPOSITORY / "build" / "versions"
RESULTS = Path(__file__).with_name("bounds.json")
OUTPUT = REPOSITORY / "docs" / "development" / "package_versions.md"
LEFT_OUT = ("gigatoken", "ray", "dev")
"""Extras of setup.py that `lowest` and `newest` do not install. Their packages are tried where an
environment names them."""
EXTRAS = tuple(extra for extra in extras() if extra not in LEFT_OUT)
"""Extras that are installed."""
LOWEST = "lowest"
NEWEST = "newest"
PYTHON = re.compile(r"python3\.\d+")
"""Names of environments with another interpreter."""
COMMANDS = "tests/e2e/package_commands.py"
FOLDERS = {
    "torch": ("engine", "parallel", "model", "checkpoint"),
    "transformers": ("conversion", "tokenizer"),
    "": (
        "preprocess",
        "cleaning",
        "data",
        "fileio",
        "loading",
        "inference",
        "server",
        "reports",
        "training",
        "cli",
        "config",
        "evaluation",
    ),
}
"""Package -> folders of tests/unit that depend on it; "": that depend on others."""
LINT = "lint"
ALONE = {
    "awkward": {"fast encoders": "tests/unit/tokenizer/test_fast_backend.py"},
    "gigatoken": {"fast encoders": "tests/unit/tokenizer/test_fast_backend.py"},
    "ray": {"two nodes of Ray": "tests/cluster/test_ray.py"},
    "mypy": {LINT: ""},
    "ruff": {LINT: ""},
}
"""Packages of LEFT_OUT -> the sets of tests that need them, with the path of each."""
FOLDER_OF_A_TEST = r"(?:/pytest-of-[^/\s]+/pytest-\d+(?:/popen-gw\d+)?/[^/\s]+)?"
"""What pytest adds to the temporary folder."""
INSTALLATION = "installation"
COMMAND_SET = "commands"
PACKAGES = """
## Packages

The lowest and the newest version of environments in which what depends on the package ran, and
nothing failed:

| package | `setup.py` | `requirements.txt` | lowest | newest |
|---|---|---|---|---|
"""
REASONS = {
    "Jinja2": "`apply_chat_template` of transformers refuses older versions",
    "fsspec": "older versions do not save a data set to a `pathlib.Path`",
    "mypy": "2.0.0 and 1.14.0 report errors that 2.4 does not; those between were not tried",
    "nltk": "3.9 is imported only where the resource wordnet is installed",
    "obstore": "files of older versions refuse to read past their end",
    "prometheus-client": "older versions have no `CONTENT_TYPE_PLAIN_0_0_4`",
    "pyarrow": "older versions are built for numpy 1",
    "regex": "transformers 5.23.0 requires it",
    "ruff": "older versions sort an import with a comment in another way, or have rules that went",
    "safetensors": "transformers 5.23.0 requires it",
    "sentencepiece": "0.2.1 makes other tokens of long runs of a character, whose splits have the "
    "same score, so that token files differ",
    "tensorboard": "older versions use a name that numpy 2.0 removed",
    "tokenizers": "transformers 5.23.0 requires it",
    "torch": "parameters of older versions have no `grad_dtype`",
    "tqdm": "datasets 3.6.0 requires it",
    "transformers": "4.56.0 fails tests of conversion; those between were not tried",
}
"""Package -> why its lower bound is not lower, as far as it was seen."""
FIND_VERSIONS = """
import importlib.metadata, json, sys
versions = {}
for name in sys.argv[1:]:
    try:
        versions[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        pass
print(json.dumps(versions))
"""
"""Prints the versions of the named packages that are installed."""
FIND_PYTHON = "import platform; print(platform.python_version())"
HEAD = f"""\
# Versions of other packages

For people who must use other versions of torch, transformers or Python, or raise a bound.

Written by `make test-versions VERSIONS="..."`, which makes an environment for each. `lowest` has
the lower bounds of `setup.py` together, `newest` the newest versions that pip found within its
ranges. `python3.14` has `requirements.txt` with that interpreter. The other environments have the
named versions, and the rest as in `requirements.txt`. Each of them runs

- *commands* (`{COMMANDS}`): text, tokenizer and token files; training on one rank and
  on two tensor-parallel ranks, each ended halfway, resumed, and compared with an uninterrupted run;
  export to a Hugging Face model, whose logits `transformers` confirms, and back; generation; a plot
  and a report;
- *unit tests* of the folders of `tests/unit` that depend on the named package: for torch
  {", ".join(FOLDERS["torch"])}; for transformers {", ".join(FOLDERS["transformers"])};
  for `lowest` and `newest` also
  {", ".join(FOLDERS[""])}.

Packages that neither of them installs are tried where an environment names them, by what needs
them alone: for Ray `{ALONE["ray"]["two nodes of Ray"]}`, for gigatoken
`{ALONE["gigatoken"]["fast encoders"]}`, for mypy and ruff what `make lint` runs.
They are counted as unit tests.

A cell has the number of failed tests and of all that ran. DeepSpeed has
[its own page](deepspeed_versions.md).

"""

Result = dict[str, Any]
"""Of a set of tests: how many "tests" ran, and the first error of each that "failed"."""
Run = dict[str, Any]
"""Of an environment: "sets" of tests with their results (installation, commands, and each folder of
unit tests), "versions" of packages, "python", "date" and "machine"."""


def lower_bound(requirement: Requirement) -> str | None:
    """The lower bound of a range."""
    versions = [part.version for part in requirement.specifier if part.operator == ">="]
    return versions[0] if versions else None


def exact(name: str) -> dict[str, str]:
    """The versions of `lowest` or `newest` by package; pip chooses the others."""
    if name == NEWEST:
        return {}
    bounds = {canonicalize_name(each.name): lower_bound(each) for each in ranges()}
    return {package: bound for package, bound in bounds.items() if bound is not None}


def interpreter(name: str) -> Path:
    return ENVIRONMENTS / name.replace("==", "-").replace(",", "-") / "bin" / "python"


def install(name: str) -> Result:
    """Makes an environment, if it is missing; the result of its installation."""
    python = interpreter(name)
    folder = python.parents[1]
    result: Result = {"tests": 1, "failed": {}}
    if (folder / ".installed").exists():
        return result
    python_of_it = shutil.which(name) if PYTHON.fullmatch(name) else sys.executable
    if python_of_it is None:
        return result | {"failed": {"python": f"{name} is not installed"}}
    subprocess.run([python_of_it, "-m", "venv", folder], check=True)
    pip = [str(python), "-m", "pip", "install", "--no-compile"]
    if name in (LOWEST, NEWEST):
        file = folder / "constraints.txt"
        file.write_text("".join(f"{each}=={version}\n" for each, version in exact(name).items()))
        pip += ["--constraint", str(file)]
        # DeepSpeed's build imports torch.
        torch = [str(requirement) for requirement in ranges() if requirement.name == "torch"]
        project = ["--no-build-isolation", "--editable", f"{REPOSITORY}[{','.join(EXTRAS)}]"]
        steps = [["setuptools", "wheel", "ninja", "numpy", *torch], project]
    elif PYTHON.fullmatch(name):
        files = [REPOSITORY / "requirements.txt", REPOSITORY / "requirements-dev.txt"]
        steps = [["-r", str(file)] for file in files]
    else:
        site = next(path for path in (folder / "lib").glob("python*/site-packages"))
        packages = [path for path in sys.path if path.endswith("site-packages")]
        (site / "pinned.pth").write_text("\n".join(packages))
        steps = [name.split(",")]
    for step in steps:
        done = subprocess.run([*pip, *step], stderr=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            return result | {"failed": {"pip": pip_error(done.stderr)}}
    (folder / ".installed").touch()
    return result


def pip_error(output: str) -> str:
    """The requirements that contradict each other, or the last error."""
    conflict = re.search(r"^The conflict is caused by:\n((?: .*\n)+)", output, re.MULTILINE)
    errors = re.findall(r"^ *ERROR: (.*)", output, re.MULTILINE)
    if conflict:
        return "; ".join(line.strip() for line in conflict[1].splitlines())
    return errors[-1] if errors else output[-300:]


def versions_of(python: Path) -> dict[str, str]:
    """The versions that an interpreter finds of the packages that setup.py names."""
    packages = sorted({canonicalize_name(requirement.name) for requirement in ranges()})
    command = [str(python), "-c", FIND_VERSIONS, *packages]
    printed = subprocess.run(command, capture_output=True, check=True).stdout
    return dict(json.loads(printed))


def version_of_python(python: Path) -> str:
    """The version of an interpreter; that of this one, if there is none."""
    command = [str(python if python.exists() else sys.executable), "-c", FIND_PYTHON]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def sets_of_tests(name: str) -> dict[str, str]:
    """The sets of tests that an environment runs, with the path of each."""
    packages = named_packages(name)
    alone = {
        test_set: path for each in packages & ALONE.keys() for test_set, path in ALONE[each].items()
    }
    if alone:
        return alone
    folders = [
        folder for package in packages & FOLDERS.keys() or FOLDERS for folder in FOLDERS[package]
    ]
    return {COMMAND_SET: COMMANDS} | {folder: f"tests/unit/{folder}" for folder in folders}


def named_packages(name: str) -> set[str]:
    return {canonicalize_name(Requirement(text).name) for text in name.split(",")}


def run_tests(name: str, test_set: str, path: str, workers: int) -> Result:
    """The result of a set of tests in an environment."""
    python = interpreter(name)
    programs = (str(python.parent), str(Path(sys.executable).parent))
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "TORCH_EXTENSIONS_DIR": str(python.parents[1] / "torch_extensions"),
        "PATH": os.pathsep.join([*programs, os.environ["PATH"]]),
    }
    if test_set == LINT:
        return lint(python, environment)
    report = python.parents[1] / "report.xml"
    report.unlink(missing_ok=True)
    command = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += [f"-n{0 if test_set == COMMAND_SET else workers}", "--dist", "loadfile"]
    command += [f"--junitxml={report}", path]
    subprocess.run(command, cwd=REPOSITORY, env=environment, check=False)
    return result_of([case for case in read_cases(report) if not case.is_skipped])


def lint(python: Path, environment: Mapping[str, str]) -> Result:
    """What `make lint` runs, with the ruff that `environment` finds first."""
    commands = {
        "ruff check": ["ruff", "check", "--no-cache", "."],
        "ruff format": ["ruff", "format", "--check", "--no-cache", "."],
        "mypy": [str(python), "-m", "mypy", "--cache-dir", str(python.parents[1] / "mypy_cache")],
    }
    failed = {}
    for name, command in commands.items():
        # Through a shell, which finds programs by the PATH of `environment`.
        done = subprocess.run(
            shlex.join(command),
            shell=True,
            cwd=REPOSITORY,
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
        if done.returncode:
            failed[name] = without_folders(done.stdout.strip().rpartition("\n")[2])
    return {"tests": len(commands), "failed": failed}


def result_of(cases: Sequence[Case]) -> Result:
    """The result of a set of tests."""
    failed = {
        f"{case.test} {case.name}": without_folders(case.error)
        for case in cases
        if case.error is not None
    }
    return {"tests": len(cases), "failed": failed}


def without_folders(error: str) -> str:
    """An error that names files by what follows the repository or the folder of a test."""
    folders = [REPOSITORY, ENVIRONMENTS, MEMORY, tempfile.gettempdir(), Path.home()]
    for folder in sorted(map(str, folders), key=len, reverse=True):
        error = re.sub(rf"{re.escape(folder)}{FOLDER_OF_A_TEST}/", "", error)
    return error


def run(name: str, workers: int, only: Collection[str], earlier: Run) -> Iterator[Run]:
    """Installs and tests an environment; its results so far after each set.

    Args:
        only: The sets to run, of `sets_of_tests`; all, if empty.
        earlier: The results of an earlier run of this environment, whose other sets are kept.
    """
    sets = dict(earlier.get("sets", {})) if only else {}
    sets[INSTALLATION] = install(name)
    where = {
        "python": version_of_python(interpreter(name)),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "machine": machine(),
    }
    if sets[INSTALLATION]["failed"]:
        yield {"sets": {INSTALLATION: sets[INSTALLATION]}, "versions": {}, **where}
        return
    versions = versions_of(interpreter(name))
    for test_set, path in sets_of_tests(name).items():
        if not only or test_set in only:
            sets[test_set] = run_tests(name, test_set, path, workers)
            yield {"sets": sets, "versions": versions, **where}


def passing_versions(package: str, runs: Mapping[str, Run]) -> set[str]:
    """The versions of a package in environments that ran what depends on it and failed nothing."""
    versions = set()
    for name, run in runs.items():
        needed = ALONE.get(package, (COMMAND_SET, *FOLDERS.get(package, ())))
        is_tried = package not in ALONE or package in named_packages(name)
        ran = all(run["sets"].get(each, {}).get("tests") for each in needed)
        failed = any(result["failed"] for result in run["sets"].values())
        if is_tried and ran and not failed and package in run["versions"]:
            versions.add(run["versions"][package])
    return versions


def page(runs: Mapping[str, Run]) -> str:
    """The text of docs/development/package_versions.md."""
    return "".join([HEAD, *_environments(runs), *_packages(runs), *_reasons(), *_failures(runs)])


def _environments(runs: Mapping[str, Run]) -> Iterator[str]:
    yield "| environment | installation | commands | unit tests | Python | date | machine |\n"
    yield "|---|---|---|---|---|---|---|\n"
    for name, run in sorted(runs.items()):
        sets = run["sets"]
        folders = [
            result for name, result in sets.items() if name not in (INSTALLATION, COMMAND_SET)
        ]
        groups = [[sets[each]] if each in sets else [] for each in (INSTALLATION, COMMAND_SET)]
        cells = [*map(_cell, [*groups, folders]), run["python"], run["date"], run["machine"]]
        yield f"| `{name}` | {' | '.join(cells)} |\n"
    yield "\n"
    for name, run in sorted(runs.items()):
        if left_out := [each for each in sets_of_tests(name) if each not in run["sets"]]:
            text = f"- Of `{name}` these sets did not run: {', '.join(left_out)}."
            yield textwrap.fill(text, 120, subsequent_indent="  ", break_on_hyphens=False) + "\n"


def _packages(runs: Mapping[str, Run]) -> Iterator[str]:
    yield PACKAGES
    specifiers = {canonicalize_name(each.name): str(each.specifier) for each in ranges()}
    pinned = pins("tests/ray/requirements.txt", "tests/gigatoken/requirements.txt")
    for package, specifier in sorted(specifiers.items()):
        passing = sorted(passing_versions(package, runs), key=Version)
        lowest, newest = (passing[0], passing[-1]) if passing else ("not run", "not run")
        yield f"| {package} | `{specifier}` | {pinned[package]} | {lowest} | {newest} |\n"


def _reasons() -> Iterator[str]:
    yield "\n## Lower bounds\n\nWhy these are not lower:\n\n"
    for package, reason in REASONS.items():
        yield textwrap.fill(f"- {package}: {reason}.", 120, subsequent_indent="  ") + "\n"


def _failures(runs: Mapping[str, Run]) -> Iterator[str]:
    for name, run in sorted(runs.items()):
        failed = [item for result in run["sets"].values() for item in result["failed"].items()]
        if failed:
            yield f"\n## Failures with `{name}`\n\n| test | error |\n|---|---|\n"
        for test, error in failed:
            yield f"| `{test}` | {error.replace('|', chr(92) + '|')} |\n"


def _cell(results: Sequence[Result]) -> str:
    """How many tests of some sets failed, of all that ran."""
    tests = sum(result["tests"] for result in results)
    failed = sum(len(result["failed"]) for result in results)
    text = f"{failed} of {tests}"
    return "not run" if not tests else f"**{text}**" if failed else text


def read_results() -> dict[str, Run]:
    return dict(json.loads(RESULTS.read_text(encoding="utf-8"))) if RESULTS.exists() else {}


def write_results(runs: Mapping[str, Run]) -> None:
    RESULTS.write_text(json.dumps(runs, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    OUTPUT.write_text(page(runs), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("names", nargs="*", help="lowest, newest, or such as torch==2.14.1")
    parser.add_argument("--workers", type=int, default=2, help="processes of pytest")
    parser.add_argument("--sets", nargs="+", default=[], help="only these sets of tests")
    arguments = parser.parse_args()
    for name in arguments.names:
        print(f"== {name}", flush=True)
        earlier = read_results().get(name, {})
        for result in run(name, arguments.workers, arguments.sets, earlier):
            write_results(read_results() | {name: result})
    write_results(read_results())
    print(f"wrote {OUTPUT}")


if __name__ == "__main__":
    main()
