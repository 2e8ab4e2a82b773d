"""Pins and ranges agree, and the environment is the pinned one."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version
from setuptools import Distribution, find_namespace_packages  # type: ignore[import-untyped]

import megatron_ds
from tests.import_graph import imports, sources

REPOSITORY = Path(__file__).resolve().parents[2]


def pins(*more: str) -> dict[str, str]:
    files = ("requirements.txt", "requirements-dev.txt", *more)
    lines = [line for file in files for line in (REPOSITORY / file).read_text().splitlines()]
    requirements = [Requirement(line) for line in lines if line and line[0] not in "#-"]
    return {
        canonicalize_name(requirement.name): str(requirement.specifier).removeprefix("==")
        for requirement in requirements
    }


def setup_arguments() -> dict[str, ast.expr]:
    """What setup.py calls `setup` with."""
    call = next(
        node
        for node in ast.walk(ast.parse((REPOSITORY / "setup.py").read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "setup"
    )
    return {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg is not None}


def extras() -> dict[str, list[str]]:
    """Requirements of each extra of setup.py."""
    values: dict[str, list[str]] = ast.literal_eval(setup_arguments()["extras_require"])
    return values


def ranges(extra: str | None = None) -> list[Requirement]:
    """What setup.py asks for, extras included; or what one extra asks for."""
    needed = ast.literal_eval(setup_arguments()["install_requires"])
    texts = extras()[extra] if extra else [*needed, *(t for e in extras().values() for t in e)]
    requirements = [Requirement(text) for text in texts]
    return [requirement for requirement in requirements if requirement.name != "megatron_ds"]


def data_files(package_data: dict[str, list[str]]) -> set[str]:
    """The files besides modules that setuptools packages."""
    packages = find_namespace_packages(str(REPOSITORY), include=["megatron_ds", "megatron_ds.*"])
    settings = {"packages": packages, "package_data": package_data}
    distribution = Distribution({**settings, "package_dir": {"": str(REPOSITORY)}})
    command = distribution.get_command_obj("build_py")
    command.ensure_finalized()
    paths = [Path(folder, file) for _, folder, _, files in command.data_files for file in files]
    return {str(path.relative_to(REPOSITORY)) for path in paths}


def test_every_file_beside_the_modules_is_packaged() -> None:
    listed = ["git", "ls-files", "megatron_ds"]
    tracked = subprocess.run(listed, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    names = {name for name in tracked.stdout.split() if not name.endswith(".py")}
    assert "megatron_ds/cli/doctor/frameworks.toml" in names
    package_data = ast.literal_eval(setup_arguments()["package_data"])
    assert names - data_files(package_data) == set()
    assert names - data_files({"megatron_ds.cli": ["*.toml"]})  # which is seen, if it is not


def test_every_pin_is_exact() -> None:
    assert all(Version(pin) for pin in pins().values())


def test_the_pins_lie_in_the_ranges() -> None:
    pinned = pins("tests/ray/requirements.txt", "tests/gigatoken/requirements.txt")
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


LIBRARIES_OF_OTHERS = {
    "hjson": "deepspeed",
    "huggingface_hub": "tokenizers",
    "pydantic": "deepspeed",
    "starlette": "fastapi",
}
"""Packages that another one brings, because its interface consists of their objects."""
DISTRIBUTIONS = {"jinja2": "Jinja2", "yaml": "PyYAML"}
"""Modules that do not have their distribution's name."""


def test_every_imported_package_is_required_or_in_an_extra() -> None:
    """Claim (command-line): the extras of the package have every other package that it imports"""
    listed = {canonicalize_name(requirement.name) for requirement in ranges()}
    modules = {name.split(".")[0] for path in sources() for name in imports(path)} - {""}
    foreign = modules - sys.stdlib_module_names - {"megatron_ds"}
    brought = {LIBRARIES_OF_OTHERS.get(name, DISTRIBUTIONS.get(name, name)) for name in foreign}
    assert {canonicalize_name(name) for name in brought} - listed == set()
    assert "datasets" in foreign


def test_the_extra_all_has_every_extra_of_a_user() -> None:
    (everything,) = [Requirement(text) for text in extras()["all"]]
    # bitsandbytes and Ray are large, and few programs use them; gigatoken is a faster choice.
    assert everything.extras == extras().keys() - {"all", "test", "dev", "8bit", "ray", "gigatoken"}


def test_the_version_is_the_one_that_files_name() -> None:
    """Claim (command-line): CHANGELOG.md and CITATION.cff name the version of the package"""
    citation = yaml.safe_load((REPOSITORY / "CITATION.cff").read_text())
    assert citation["version"] == megatron_ds.__version__
    assert {"cff-version", "message", "title", "authors", "license"} <= citation.keys()
    changes = (REPOSITORY / "CHANGELOG.md").read_text()
    versions = re.findall(r"^## (\S+)", changes, re.M)
    assert versions[0] == megatron_ds.__version__
    assert [*map(Version, versions)] == sorted(map(Version, versions), reverse=True)
