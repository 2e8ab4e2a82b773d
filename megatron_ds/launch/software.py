"""The software of a host: versions of packages, and the files of this one."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

PACKAGES = ("megatron_ds", "torch", "deepspeed", "numpy", "tokenizers")
"""Packages whose versions decide what a run computes."""
SOURCES = (".py", ".toml", ".json")


def versions() -> dict[str, str]:
    """Versions of Python and the packages."""
    from importlib import metadata  # slow to import, and most programs do not need it

    found = {}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "(not installed)"
    return {**found, "Python": platform.python_version()}


def version_text() -> str:
    """The most important ones in a line."""
    found = versions()
    names = ("megatron_ds", "torch", "deepspeed", "Python")
    return ", ".join(f"{name} {found[name]}" for name in names)


def commit() -> str:
    """The commit of the repository that this package is in; "" outside of one."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    with suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(command, capture_output=True, text=True, timeout=5).stdout.strip()
    return ""


def source_digests() -> dict[str, str]:
    """A digest of each source file of this package and of the program, in a few milliseconds.

    The version of a package that is installed from a repository stays the same from one change to
    the next.
    """
    package = Path(__file__).parents[1]
    found = {}
    for path in [*sorted(_sources(str(package))), sys.argv[0]]:
        with suppress(OSError), open(path, "rb", buffering=0) as file:
            name = os.path.relpath(path, package.parent) if path != sys.argv[0] else "the program"
            found[name] = hashlib.sha256(file.read()).hexdigest()[:12]
    return found


def _sources(folder: str) -> Iterator[str]:
    for entry in os.scandir(folder):
        if entry.is_dir() and entry.name != "__pycache__":
            yield from _sources(entry.path)
        elif entry.name.endswith(SOURCES):
            yield entry.path
