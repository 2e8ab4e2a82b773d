"""The software of a host: versions of packages, and the files of this one."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from megatron_ds.version import VERSION

PACKAGES = ("torch", "deepspeed", "numpy", "tokenizers")
"""Packages whose versions decide what a run computes, besides this one."""
SOURCES = (".py", ".toml", ".json")
INSTALLED = {"site-packages", "dist-packages"}
"""Folders of installed packages."""


def versions() -> dict[str, str]:
    """Versions of Python and the packages."""
    from importlib import metadata  # slow to import, and most programs do not need it

    installed = {"megatron_ds": VERSION}
    for package in PACKAGES:
        try:
            installed[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            installed[package] = "(not installed)"
    return {**installed, "Python": platform.python_version()}


def version_text() -> str:
    """The most important ones in a line."""
    installed = versions()
    names = ("megatron_ds", "torch", "deepspeed", "Python")
    return ", ".join(f"{name} {installed[name]}" for name in names)


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
    digests = {}
    for path in [*sorted(_sources(str(package))), sys.argv[0]]:
        with suppress(OSError):
            name = os.path.relpath(path, package.parent) if path != sys.argv[0] else "the program"
            digests[name] = _digest(path)
    return digests


def module_digests() -> dict[str, str]:
    """A digest of each file below the program's folder that has been imported.

    Without this package, Python's own library, installed packages and the program itself.
    """
    folder = os.path.dirname(os.path.realpath(sys.argv[0]))
    digests = {}
    others = [str(Path(__file__).parents[1]), *map(sysconfig.get_path, ("stdlib", "platstdlib"))]
    outside = tuple(os.path.join(other, "") for other in {*others, *map(os.path.realpath, others)})
    modules = [module for name, module in [*sys.modules.items()] if name != "__main__"]
    for path in {getattr(module, "__dict__", {}).get("__file__") for module in modules}:
        if not isinstance(path, str) or not path.endswith(SOURCES) or path.startswith(outside):
            continue
        if INSTALLED.isdisjoint(path.split(os.sep)):
            real = os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))
            name = os.path.relpath(real, folder)
            if not name.startswith(os.pardir + os.sep):
                with suppress(OSError):
                    digests[name] = _digest(path)
    return dict(sorted(digests.items()))


def _digest(path: str) -> str:
    with open(path, "rb", buffering=0) as file:
        return hashlib.sha256(file.read()).hexdigest()[:12]


def _sources(folder: str) -> Iterator[str]:
    for entry in os.scandir(folder):
        if entry.is_dir() and entry.name != "__pycache__":
            yield from _sources(entry.path)
        elif entry.name.endswith(SOURCES):
            yield entry.path
