"""Writes requirements-hashes.txt: requirements.txt with the hashes that the package index states.

Run as `make hashes` after a change of requirements.txt. pip's own client selects, for every type of
machine and version of Python below, the archive that it would install, and reports its hash.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

REPOSITORY = Path(__file__).resolve().parents[1]
LEFT_OUT = "torch"
"""Its build depends on the accelerator, and each index has another archive of the same version."""
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
MACHINES = ("x86_64", "aarch64")
GLIBC = (28, 27, 26, 24, 17, 12, 5)
"""Minor versions of glibc 2 whose archives pip may select, the best first."""
HEADER = f"""\
# requirements.txt with the hashes of its archives, written by `make hashes`. For Linux on x86_64
# and aarch64 with Python {PYTHONS[0]} to {PYTHONS[-1]}. torch is left out, since its archive \
depends on the
# accelerator: install the version of requirements.txt first, then this file:
#   pip install --require-hashes -r requirements-hashes.txt
"""


def archives(pins: list[str], python: str, machine: str) -> dict[str, str]:
    """Hash of the archive that pip selects for each pin."""
    tags = [f"manylinux_2_{minor}" for minor in GLIBC] + ["manylinux2014", "manylinux1", "linux"]
    platforms = [option for tag in tags for option in ("--platform", f"{tag}_{machine}")]
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed"]
    command += ["--no-deps", "--quiet", "--report", "-", "--target", "unused", *platforms]
    command += ["--python-version", python, *pins]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    items = json.loads(done.stdout)["install"]
    hashes = {
        canonicalize_name(item["metadata"]["name"]): item["download_info"]["archive_info"]["hashes"]
        for item in items
    }
    names = {pin: canonicalize_name(Requirement(pin).name) for pin in pins}
    return {pin: f"sha256:{hashes[name]['sha256']}" for pin, name in names.items()}


def main() -> None:
    """Writes the file."""
    lines = (REPOSITORY / "requirements.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if line and line[0] != "#"]
    pins = sorted((pin for pin in pins if not pin.startswith(f"{LEFT_OUT}==")), key=str.lower)
    found: dict[str, set[str]] = defaultdict(set)
    for python, machine in itertools.product(PYTHONS, MACHINES):
        for pin, value in archives(pins, python, machine).items():
            found[pin].add(value)
    blocks = [
        " \\\n".join([pin, *(f"    --hash={value}" for value in sorted(found[pin]))])
        for pin in pins
    ]
    text = HEADER + "\n" + "\n".join(blocks) + "\n"
    (REPOSITORY / "requirements-hashes.txt").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
