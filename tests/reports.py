"""Runs of pytest, what their reports have, and the machine they ran on."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

REPOSITORY = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Case:
    """A test with its parameters."""

    test: str
    """File and function: `tests/unit/test_docs.py::test_links_resolve`."""
    name: str
    """Function and parameters."""
    seconds: float
    is_skipped: bool
    error: str | None
    """The first error of a failed case."""
    properties: Mapping[str, str]


def run_pytest(
    report: Path, arguments: Sequence[str], environment: Mapping[str, str]
) -> list[Case]:
    """Runs tests, whose output is that of this process, and returns the reported cases."""
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += [f"--junitxml={report}", *arguments]
    subprocess.run(command, cwd=REPOSITORY, env=dict(environment), check=False)
    return list(read_cases(report))


def read_cases(report: Path) -> Iterator[Case]:
    """The cases in a report of pytest."""
    for case in ElementTree.parse(report).iter("testcase"):
        file = case.get("classname", "").replace(".", "/") + ".py"
        name = case.get("name", "")
        error = next((found for kind in ("failure", "error") for found in case.iter(kind)), None)
        yield Case(
            test=f"{file}::{name.partition('[')[0]}",
            name=name,
            seconds=float(case.get("time", 0)),
            is_skipped=case.find("skipped") is not None,
            error=None if error is None else _first_error(error),
            properties={
                each.get("name", ""): each.get("value", "") for each in case.iter("property")
            },
        )


def machine() -> str:
    """Processor, cores and memory of this machine."""
    text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    name = re.search(r"^model name\s*: (.*)$", text, re.MULTILINE)
    processor = name[1] if name else platform.machine()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{processor}, {len(os.sched_getaffinity(0))} cores, {memory:.0f} GiB"


def _first_error(failure: ElementTree.Element) -> str:
    """The line of a failure that says most: the exception of a rank, or what the test says."""
    message = failure.get("message", "").partition("\n")[0]
    errors = re.findall(r"^(?:E +)?(\w+(?:\.\w+)*Error: .*)", failure.text or "", re.MULTILINE)
    is_of_a_rank = message.endswith("did not finish") or "did not finish Traceback" in message
    return (errors[-1] if is_of_a_rank and errors else message)[:200]
