"""Runs the complete proofs, in sections, and keeps a record of each.

    make proofs                              everything, more than an hour on two cores
    make proofs ONLY="layouts interop"       some sections
    python tests/proofs/run.py --names       writes the names of new tests as not run

The record is results.json, from which docs/development/proofs.md is written: where and when each
section ran, its counts, and those of each test that `make test` leaves out. The DeepSpeed versions
and the mutants have runners of their own.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))
from tests.museum import run as museum  # noqa: E402
from tests.mutants import run as mutants  # noqa: E402 (the path is set now)
from tests.proofs.marked import MARKERS, marked_tests  # noqa: E402
from tests.reports import Case, machine, run_pytest  # noqa: E402
from tests.versions import run as versions  # noqa: E402

RESULTS = Path(__file__).with_name("results.json")
OUTPUT = REPOSITORY / "docs" / "development" / "proofs.md"
INTEROP = REPOSITORY / "build" / "interop"
LOWERED = REPOSITORY / "tests" / "golden" / "lowering.json"
PACKAGES = ("torch", "deepspeed", "transformers", "numpy", "pytest")
HEAD = """\
# Record of the proofs

For people who ask whether the tests were run: where and when each last ran, with its result.

Written by `make proofs`, which runs every test, with and without the marker `proof`, in sections;
[testing.md](testing.md#two-tiers) describes them. The last run of each section:

"""

Counts = dict[str, int]
"""Number of cases by outcome: passed, failed, skipped."""
Record = dict[str, Any]
"""Of a section: counts, "seconds", "failures": the first error by case, "tests": counts by marked
test, and where it ran."""


@dataclass(frozen=True)
class Tests:
    """Files of tests, which two workers run."""

    paths: tuple[str, ...]
    without: tuple[str, ...] = ()
    """Files of other sections."""
    selected: str = "not interop and not gpu"
    workers: bool = True
    environment: dict[str, str] = field(default_factory=dict)

    def run(self) -> Record:
        arguments = [*self.paths, *(f"--ignore={path}" for path in self.without)]
        arguments += ["-m", self.selected]
        if self.workers:
            arguments += ["-n", "2", "--dist", "loadfile", "--no-loadscope-reorder"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **self.environment}
        with tempfile.TemporaryDirectory() as folder:
            return summary(run_pytest(Path(folder) / "report.xml", arguments, environment))


LAYOUTS = ("tests/dist/test_layouts.py", "tests/dist/test_parity.py")
RESHARDING = (
    "tests/dist/test_resharding.py",
    "tests/dist/test_resharding_memory.py",
    "tests/dist/test_universal.py",
    "tests/dist/test_resume_settings.py",
)
CRASHES = (
    "tests/e2e/test_checkpoint_crash.py",
    "tests/e2e/test_checkpoint_faults.py",
    "tests/e2e/test_dead_ranks.py",
    "tests/e2e/test_random_kills.py",
    "tests/e2e/test_signals.py",
)
BENCHMARKS = ("tests/e2e/test_benchmarks.py", "tests/e2e/test_gpu_programs.py")
TRANSFER = ("tests/e2e/test_transfer.py",)
LADDER = ("tests/e2e/test_ladder.py",)


def summary(cases: Sequence[Case]) -> Record:
    """The record of the cases that ran.

    Raises:
        ValueError: No test ran, or markers are not found where they are.
    """
    if not cases:
        raise ValueError("no test ran")
    by_test: dict[str, list[Case]] = {}
    for each in cases:
        if each.properties.keys() & set(MARKERS):
            by_test.setdefault(each.test, []).append(each)
    if unknown := by_test.keys() - marked_tests().keys():
        raise ValueError(f"tests/proofs/marked.py does not find the markers of {sorted(unknown)}")
    failures = {f"{each.test} {each.name}": each.error for each in cases if each.error}
    tests = {test: counts(by_test[test]) for test in sorted(by_test)}
    return {**counts(cases), "failures": failures, "tests": tests}


def counts(cases: Sequence[Case]) -> Counts:
    failed = sum(each.error is not None for each in cases)
    skipped = sum(each.is_skipped for each in cases)
    return {"passed": len(cases) - failed - skipped, "failed": failed, "skipped": skipped}


def run_versions() -> Record:
    """The tests of the support matrix with the recorded versions that setup.py admits.

    Others are known to fail some.
    """
    recorded = json.loads(versions.RESULTS.read_text(encoding="utf-8"))
    required = map(Requirement, importlib.metadata.requires("megatron_ds") or ())
    admitted = next(each.specifier for each in required if each.name == "deepspeed")
    results = versions.update(sorted(admitted.filter(recorded)), versions.TESTS)
    failures = {
        f"{version} {name}": error
        for version, tests in results.items()
        for result in tests.values()
        for name, error in result["failed"].items()
    }
    cases = sum(result["cases"] for tests in results.values() for result in tests.values())
    passed = {"passed": cases - len(failures), "failed": len(failures), "skipped": 0}
    return {**passed, "failures": failures, "tests": {}}


def run_mutants() -> Record:
    """The score of the mutants, of which a caught one counts as passed."""
    mutations = mutants.fit(mutants.read_mutants(), REPOSITORY / "megatron_ds")
    outcomes = mutants.score(mutations, jobs=2) or ["broken"] * len(mutations)
    failures = {
        f"{each.mutant.target}: {each.mutant.change}": outcome
        for each, outcome in zip(mutations, outcomes, strict=True)
        if outcome != "caught"
    }
    passed = {"passed": outcomes.count("caught"), "failed": len(failures), "skipped": 0}
    return {**passed, "failures": failures, "tests": {}}


def run_types() -> Record:
    """The types of all layouts, and what they say about each parallel mutant."""
    record = Tests(("tests/typed",), workers=False).run()
    from tests.typed import score  # needs spmd_types

    return {**record, "found": score.find(score.parallel_mutants())}


def run_engines() -> Record:
    """Exported models in the inference engines that have wheels for this machine."""
    from tests.engines import run as engines  # needs torch

    return engines.run_all()


SECTIONS: dict[str, tuple[str, Callable[[], Record]]] = {
    "unit": (
        "unit and fuzz tests",
        Tests(("tests/unit", "tests/fuzz"), environment={"FUZZ_EXAMPLES": "200"}).run,
    ),
    "layouts": ("layouts, all pairs and random ones", Tests(LAYOUTS).run),
    "types": (
        "[types of tensors](testing.md#types-of-tensors) on 8, 1,024 and 4,096 ranks",
        run_types,
    ),
    "resharding": ("checkpoints of every layout in every other one", Tests(RESHARDING).run),
    "dist": (
        "all other tests of several ranks",
        Tests(("tests/dist",), without=(*LAYOUTS, *RESHARDING)).run,
    ),
    "crashes": ("kills, signals and full disks during saves", Tests(CRASHES).run),
    "benchmarks": ("benchmarks and programs for GPUs, at tiny sizes", Tests(BENCHMARKS).run),
    "transfer": (
        "[learning rates over widths and depths](../training/transfer.md), with muP and without",
        Tests(TRANSFER, workers=False).run,
    ),
    "ladder": (
        "[a real ladder](../training/ladder.md#how-well-it-works) and the size that it predicts",
        Tests(LADDER, workers=False).run,
    ),
    "e2e": (
        "all other command lines",
        Tests(
            ("tests/e2e", "tests/commands"), without=(*CRASHES, *BENCHMARKS, *TRANSFER, *LADDER)
        ).run,
    ),
    "cluster": ("two nodes", Tests(("tests/cluster",), workers=False).run),
    "lowering": (
        "[kernels compiled for an H100](#kernels-compiled-for-an-h100)",
        Tests(("tests/lowering",), workers=False).run,
    ),
    "interop": (
        "token files, samples and checkpoints of `megatron-core`, files of llama.cpp",
        Tests(
            ("tests/interop",),
            selected="interop",
            workers=False,
            environment={"PYTHONPATH": str(INTEROP)},
        ).run,
    ),
    "engines": ("exported models in [inference engines](../use/engines.md)", run_engines),
    "deepspeed": ("[versions of DeepSpeed](deepspeed_versions.md)", run_versions),
    "museum": ("[errors of other packages](museum/README.md), run with them", museum.run_all),
    "mutants": ("[mutants](testing.md#mutants) that the tests catch", run_mutants),
}  # fmt: skip
"""What each section proves, and how it runs."""


def place() -> Record:
    """Commit, date, machine and versions."""
    written = (RESULTS, OUTPUT, versions.RESULTS, versions.OUTPUT)
    left_out = [f":!{path.relative_to(REPOSITORY)}" for path in written]
    changed = _git("status", "--porcelain", "--untracked-files=no", "--", ".", *left_out)
    return {
        "commit": _git("rev-parse", "--short=10", "HEAD") + (" and changes" if changed else ""),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "machine": machine(),
        "versions": {
            "python": platform.python_version(),
            **{name: importlib.metadata.version(name) for name in PACKAGES},
        },
    }


def _git(*arguments: str) -> str:
    command = ["git", *arguments]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def read_record() -> dict[str, Any]:
    return dict(json.loads(RESULTS.read_text(encoding="utf-8"))) if RESULTS.exists() else {}


def write_record(sections: dict[str, Record]) -> None:
    """Writes the record and its page. Tests that are gone are removed, new ones are not run."""
    names = marked_tests().keys()
    for section in sections.values():
        section["tests"] = {name: n for name, n in section["tests"].items() if name in names}
    ran = {name for section in sections.values() for name in section["tests"]}
    record = {"sections": sections, "not run": sorted(names - ran)}
    RESULTS.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    OUTPUT.write_text(page(record), encoding="utf-8")


def page(record: dict[str, Any]) -> str:
    """The text of docs/development/proofs.md."""
    rows = []
    where = {}
    failures = []
    tests = dict.fromkeys(record["not run"], "**not run**")
    for name, (title, _) in SECTIONS.items():
        section = record["sections"].get(name)
        if section is None:
            rows.append(f"| {name} | {title} | **not run** | | | |\n")
            continue
        cells = (name, title, _passed(section), f"{section['seconds'] / 60:.1f}")
        rows.append(f"| {' | '.join((*cells, section['commit'], section['date']))} |\n")
        versions = ", ".join(f"{name} {each}" for name, each in sorted(section["versions"].items()))
        where.setdefault(f"{section['machine']}; {versions}", []).append(name)
        for case, error in section["failures"].items():
            error = error.replace("|", "\\|")
            failures.append(f"| {name} | `{case}` | {error} |\n")
        tests |= {test: _passed(counts) for test, counts in section["tests"].items()}
    lines = [
        HEAD,
        "| section | what | passed | minutes | commit | date |\n|---|---|---|---|---|---|\n",
    ]
    lines += [*rows, "\n", *(f"* {', '.join(names)}: {each}\n" for each, names in where.items())]
    if failures:
        lines += ["\n## Failures\n\n| section | case | error |\n|---|---|---|\n", *failures]
    lines += ["\n## Tests of which `make test` leaves out cases, or all\n\n"]
    lines += ["| test | passed |\n|---|---|\n"]
    lines += [f"| `{test}` | {cell} |\n" for test, cell in sorted(tests.items())]
    return "".join([*lines, *_types(record["sections"].get("types", {})), *_kernels()])


def _types(section: Record) -> Iterator[str]:
    """The mutants that `tests/typed` finds, and those it does not."""
    if not (found := section.get("found")):
        return
    score = f"{sum(map(bool, found.values()))} of {len(found)}"
    yield "\n## Mutants that types find\n\n"
    yield "Of the mutants of `parallel/` and `model/` that a test of several ranks catches,\n"
    yield f"[types](testing.md#types-of-tensors) find {score} without running numbers.\n\n"
    yield "| mutant | what the types say |\n|---|---|\n"
    for name, message in sorted(found.items(), key=lambda item: (not item[1], item[0])):
        yield f"| {name} | {message.replace('|', chr(92) + '|') or '-'} |\n"


def _kernels() -> Iterator[str]:
    """The table of the kernels that `tests/lowering` compiles."""
    yield "\n## Kernels compiled for an H100\n\n"
    yield "`tests/lowering` compiles them for bf16, 8 samples of 1,024 tokens, without a device. "
    yield "Registers and\nspilled bytes are the most of any configuration that would be tried.\n\n"
    yield "| function | kernels | launches | registers | spilled bytes | calls |\n"
    yield "|---|---|---|---|---|---|\n"
    for name, used in json.loads(LOWERED.read_text(encoding="utf-8")).items():
        calls = used["calls of libraries"] | used["collectives"]
        named = ", ".join(f"{number} `{call.strip('_')}`" for call, number in calls.items())
        launches = used.get("launches", "")
        cells = name, used["kernels"], launches, used["registers"], used["spilled bytes"]
        yield f"| {' | '.join(map(str, cells))} | {named or 'none'} |\n"


def _passed(counts: Counts) -> str:
    cell = f"{counts['passed']} of {counts['passed'] + counts['failed']}"
    skipped = f", {counts['skipped']} skipped" if counts["skipped"] else ""
    return (f"**{cell}**" if counts["failed"] else cell) + skipped


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("sections", nargs="*", help=f"of {', '.join(SECTIONS)}; default: all")
    parser.add_argument("--names", action="store_true", help="run nothing")
    options = parser.parse_args()
    unknown = set(options.sections) - SECTIONS.keys()
    if unknown:
        parser.error(f"no section {', '.join(sorted(unknown))}; there are {', '.join(SECTIONS)}")
    sections = read_record().get("sections", {})
    chosen = [] if options.names else options.sections or list(SECTIONS)
    where = place()
    failed = 0
    for name in chosen:
        title, run = SECTIONS[name]
        print(f"== {name}: {title}", flush=True)
        start = time.monotonic()
        results = run()
        sections[name] = {**where, **results, "seconds": round(time.monotonic() - start)}
        failed += results["failed"]
        write_record(sections)
    write_record(sections)
    print(f"wrote {RESULTS} and {OUTPUT}")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
