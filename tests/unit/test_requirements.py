"""Pins and ranges agree, and the environment is the pinned one."""

from __future__ import annotations

import ast
import re
from importlib.metadata import version
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

REPOSITORY = Path(__file__).resolve().parents[2]


def pins(*more: str) -> dict[str, str]:
    files = ("requirements.txt", "requirements-dev.txt", *more)
    lines = [line for file in files for line in (REPOSITORY / file).read_text().splitlines()]
    requirements = [Requirement(line) for line in lines if line and line[0] not in "#-"]
    return {
        canonicalize_name(requirement.name): str(requirement.specifier).removeprefix("==")
        for requirement in requirements
    }


def ranges() -> list[Requirement]:
    """What setup.py asks for, extras included."""
    call = next(
        node
        for node in ast.walk(ast.parse((REPOSITORY / "setup.py").read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "setup"
    )
    values = {keyword.arg: keyword.value for keyword in call.keywords}
    needed = ast.literal_eval(values["install_requires"])
    extras = ast.literal_eval(values["extras_require"])
    return [Requirement(text) for text in [*needed, *(t for e in extras.values() for t in e)]]


def test_every_pin_is_exact() -> None:
    assert all(Version(pin) for pin in pins().values())


def test_the_pins_lie_in_the_ranges() -> None:
    pinned = pins("tests/ray/requirements.txt")
    assert [
        requirement
        for requirement in ranges()
        if not requirement.specifier.contains(pinned[canonicalize_name(requirement.name)])
    ] == []


def test_the_pinned_versions_are_installed() -> None:
    assert {name: Version(version(name)).public for name in pins()} == pins()


def test_the_file_with_hashes_has_the_pins_and_nothing_of_a_machine() -> None:
    text = (REPOSITORY / "requirements-hashes.txt").read_text()
    body = "".join(f"{line}\n" for line in text.splitlines() if line and line[0] != "#")
    pin = r"^(\S+)==(\S+)((?: \\\n    --hash=sha256:[0-9a-f]{64})+)\n"
    found = re.findall(pin, body, re.M)
    assert re.sub(pin, "", body, flags=re.M) == ""  # no other option, index or path
    lines = (REPOSITORY / "requirements.txt").read_text().splitlines()
    torch = f"torch=={pins()['torch']}"
    assert f"pip install {torch}\n" in (REPOSITORY / "README.md").read_text()
    wanted = {line for line in lines if line and line[0] != "#"} - {torch}
    assert {f"{name}=={version}" for name, version, _ in found} == wanted, "run `make hashes`"
    hashes = [value for _, _, values in found for value in values.split(" \\\n")[1:]]
    assert len(set(hashes)) == len(hashes) >= len(wanted)


def test_the_name_apex_is_never_required() -> None:
    """On the package index it is another project than NVIDIA's."""
    assert "apex" not in pins()
    assert "apex" not in {requirement.name for requirement in ranges()}
