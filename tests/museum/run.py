"""Runs the museum: programs that show errors of other packages, each with several versions.

    make proofs ONLY=museum                          all programs with all versions
    python tests/museum/run.py "deepspeed_*" --versions 0.19.8         some of both
    python tests/museum/run.py --pages               runs nothing, writes the pages

`exhibits/PACKAGE.yaml` has the exhibits, `NAME.py` is the program of one, `results/PACKAGE.json`
has what each version gave, and docs/development/museum is written from both. A version is
installed alone into build/museum/PACKAGE-VERSION, from the package index and without its
requirements: everything else, torch included, is that of the environment.
"""

from __future__ import annotations

import argparse
import fnmatch
import importlib.metadata
import json
import os
import re
import resource
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))
from tests.museum.frame import NOT_SHOWN, SHOWN  # noqa: E402 (the repository is on the path now)
from tests.tables import UniqueNames, parse_tables  # noqa: E402

MUSEUM = Path(__file__).parent
INSTALLED = REPOSITORY / "build" / "museum"
PAGES = REPOSITORY / "docs" / "development" / "museum"
INDEX = PAGES / "README.md"
SECONDS = 60
"""Most seconds on a CPU that a program may take."""
PATIENCE = 300
"""Most seconds by the clock."""
OUTCOMES = {SHOWN: "shown", NOT_SHOWN: "not shown"}
FAILS = "does not run"
END_OF_TEXT = "<!-- what follows is written by `make proofs ONLY=museum` -->\n"
"""What precedes it in a page is written by hand."""
HEAD = """\
# Museum of errors

For people who ask what can go wrong in silence: known errors of other packages that change the
numbers of a training without a word, in gradients, norms, losses, schedules, data or conversions.

Each page has the source, and what megatron_ds does instead, with the test that holds it. Where the
package index still has the versions, `make proofs ONLY=museum` runs a program with each, on CPUs
with torch {torch}: "shown" says that this version has the error, "no" that it computes what it
should, "fails" that the program stopped, with the error on its page.

"""

Result = dict[str, Any]
"""Of a program with a version: "outcome", "figures" and "seconds" on CPUs."""


@dataclass(frozen=True)
class Exhibit:
    """An error of a package. Its page has what happened."""

    name: str
    package: str
    """Name in the package index."""
    title: str
    links: tuple[str, ...]
    """Addresses of issues, or of the code."""
    ours: str
    """What megatron_ds does instead."""
    tests: tuple[str, ...]
    """That hold it: file and function."""
    versions: tuple[str, ...] = ()
    """That its program is run with."""
    not_run: str = ""
    """Why there is no program."""
    beside: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Version -> other requirements to install with it."""

    @property
    def program(self) -> Path:
        return MUSEUM / f"{self.name}.py"

    @property
    def page(self) -> Path:
        return PAGES / f"{self.name}.md"


def exhibits() -> list[Exhibit]:
    """All exhibits, by package and in the order of its file."""
    result = UniqueNames[Exhibit]()
    for path in sorted((MUSEUM / "exhibits").glob("*.yaml")):
        file = parse_tables(path.read_text(encoding="utf-8"))
        beside = {version: tuple(names) for version, names in file.get("beside", {}).items()}
        for name, entry in file["exhibits"].items():
            values = {key: tuple(v) if isinstance(v, list) else v for key, v in entry.items()}
            result[name] = Exhibit(name, file["package"], beside=beside, **values)
    return list(result.values())


def read_results() -> dict[str, dict[str, Result]]:
    """Exhibit -> version -> result."""
    files = sorted((MUSEUM / "results").glob("*.json"))
    read = [json.loads(path.read_text(encoding="utf-8")) for path in files]
    return {name: results for file in read for name, results in file.items()}


def write_results(results: Mapping[str, Mapping[str, Result]]) -> None:
    """Writes the results of the exhibits that there are, by package, and the pages."""
    by_package: dict[str, dict[str, Any]] = {}
    for exhibit in exhibits():
        of_versions = {
            v: r for v, r in results.get(exhibit.name, {}).items() if v in exhibit.versions
        }
        if of_versions:
            by_package.setdefault(exhibit.package, {})[exhibit.name] = of_versions
    for package, record in by_package.items():
        text = json.dumps(record, indent=1, sort_keys=True) + "\n"
        (MUSEUM / "results" / f"{package}.json").write_text(text, encoding="utf-8")
    write_pages()


def install(exhibit: Exhibit, version: str) -> Path | None:
    """The folder that has a version, which is installed if it is missing; None for torch's own."""
    if _version_of_environment(exhibit.package) == version:
        return None
    folder = INSTALLED / f"{exhibit.package}-{version}"
    if not (folder / ".installed").exists():
        pip = (sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
        alone = ("--no-deps", "--no-build-isolation", "--ignore-requires-python")
        names = (f"{exhibit.package}=={version}", *exhibit.beside.get(version, ()))
        subprocess.run([*pip, *alone, "--target", str(folder), *names], check=True)
        (folder / ".installed").touch()
    return folder


def _version_of_environment(package: str) -> str | None:
    try:
        return importlib.metadata.version(package).partition("+")[0]
    except importlib.metadata.PackageNotFoundError:
        return None


def run(exhibit: Exhibit, version: str) -> Result:
    """Runs the program of an exhibit with a version."""
    folder = install(exhibit, version)
    path = [str(folder)] if folder else []
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*path, str(REPOSITORY)]),
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "CUDA_VISIBLE_DEVICES": "",
        "TORCH_EXTENSIONS_DIR": str((folder or INSTALLED) / "torch_extensions"),
    }
    start = _seconds_of_children()
    try:
        done = subprocess.run(
            [sys.executable, str(exhibit.program)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"outcome": FAILS, "figures": "not finished", "seconds": PATIENCE}
    seconds = round(_seconds_of_children() - start)
    outcome = OUTCOMES.get(done.returncode, FAILS)
    lines = [line for line in done.stdout.splitlines() if line.startswith(f"{outcome}: ")]
    if lines:
        return {"outcome": outcome, "figures": lines[-1].partition(": ")[2], "seconds": seconds}
    errors = re.findall(r"^(?:\[rank\d+\]: )?(\w[\w.]*(?:Error|Exception)\b.*)", done.stderr, re.M)
    last = errors[-1] if errors else f"exit status {done.returncode}"
    return {"outcome": FAILS, "figures": last[:200], "seconds": seconds}


def _seconds_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def update(patterns: list[str], versions: list[str] | None = None) -> dict[str, dict[str, Result]]:
    """Runs the programs of exhibits, writes what they gave, and returns all results."""
    results = read_results()
    for exhibit in exhibits():
        if not any(fnmatch.fnmatch(exhibit.name, pattern) for pattern in patterns):
            continue
        for version in versions or exhibit.versions:
            if version not in exhibit.versions:
                continue
            result = run(exhibit, version)
            print(f"{exhibit.name} {version}: {result['outcome']}: {result['figures']}", flush=True)
            results.setdefault(exhibit.name, {})[version] = result
        write_results(results)
    return results


def record(results: Mapping[str, Mapping[str, Result]]) -> dict[str, Any]:
    """Counts of the exhibits with a program: one passes if a version shows it."""
    programs = [exhibit for exhibit in exhibits() if exhibit.versions]
    failures = {}
    for exhibit in programs:
        outcomes = {v: results[exhibit.name][v]["outcome"] for v in exhibit.versions}
        if "shown" not in outcomes.values():
            failures[exhibit.name] = ", ".join(f"{v} {o}" for v, o in outcomes.items())
    passed = len(programs) - len(failures)
    counts = {"passed": passed, "failed": len(failures), "skipped": 0}
    return {**counts, "failures": failures, "tests": {}}


def run_all() -> dict[str, Any]:
    """The section of `make proofs`."""
    return record(update(["*"]))


def pages() -> dict[Path, str]:
    """The text of each page."""
    results = read_results()
    texts = {INDEX: "".join(_index(results))}
    for exhibit in exhibits():
        text = exhibit.page.read_text(encoding="utf-8") if exhibit.page.exists() else ""
        text = text.partition(END_OF_TEXT)[0] or f"# {exhibit.title}\n\n"
        rest = "".join(_of_exhibit(exhibit, results.get(exhibit.name, {})))
        texts[exhibit.page] = text + END_OF_TEXT + rest
    return texts


def write_pages() -> None:
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")


def _index(results: Mapping[str, Mapping[str, Result]]) -> Iterator[str]:
    """The lines of README.md."""
    yield HEAD.format(torch=importlib.metadata.version("torch").partition("+")[0])
    every = exhibits()
    programs = sum(bool(exhibit.versions) for exhibit in every)
    yield f"{len(every)} exhibits, {programs} of them run with the package itself.\n"
    for package in dict.fromkeys(exhibit.package for exhibit in every):
        of_package = [exhibit for exhibit in every if exhibit.package == package]
        versions = sorted({v for e in of_package for v in e.versions}, key=_parts, reverse=True)
        yield f"\n## {package}\n\n| {' | '.join(('error', *versions))} |\n"
        yield "|---" * (1 + len(versions)) + "|\n"
        for exhibit in of_package:
            of_versions = results.get(exhibit.name, {})
            cells = [_cell(of_versions.get(version)) for version in versions]
            if not exhibit.versions and versions:
                cells[0] = "not run here"
            named = f"[{exhibit.title}]({exhibit.page.name})"
            yield f"| {' | '.join((named, *cells))} |\n"


def _cell(result: Result | None) -> str:
    if result is None:
        return ""
    return {"shown": "**shown**", "not shown": "no", FAILS: "fails"}[result["outcome"]]


def _of_exhibit(exhibit: Exhibit, results: Mapping[str, Result]) -> Iterator[str]:
    """The lines of a page that are not written by hand."""
    yield "\n## Versions\n\n"
    if exhibit.not_run:
        yield f"Not run here: {exhibit.not_run}\n"
    else:
        yield f"Of `{exhibit.package}`, with the program `tests/museum/{exhibit.program.name}`:\n\n"
        yield "| version | outcome | figures |\n|---|---|---|\n"
        for version in sorted(exhibit.versions, key=_parts, reverse=True):
            result = results.get(version, {"outcome": "not run", "figures": ""})
            figures = result["figures"].replace("|", "\\|")
            yield f"| {version} | {result['outcome']} | {figures} |\n"
    yield f"\n## Ours\n\n* {exhibit.ours}\n"
    yield from (f"* `{test}`\n" for test in exhibit.tests)
    yield "\n## Sources\n\n"
    yield from (f"* <{link}>\n" for link in exhibit.links)


def _parts(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("exhibits", nargs="*", help="patterns of names")
    parser.add_argument("--versions", nargs="+", help="only with these")
    parser.add_argument("--pages", action="store_true", help="run nothing")
    options = parser.parse_args()
    if options.pages:
        write_results(read_results())
    else:
        update(options.exhibits or ["*"], options.versions)
    print(f"wrote {PAGES}")


if __name__ == "__main__":
    main()
