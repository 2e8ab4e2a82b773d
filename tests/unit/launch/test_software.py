"""What identifies the software of a host."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from megatron_ds.launch import software


def test_every_source_file_and_the_program_have_a_digest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "train.py"
    program.write_text("1")
    monkeypatch.setattr(sys, "argv", [str(program)])
    package = Path(software.__file__).parents[1]
    found = software.source_digests()
    code = {str(path.relative_to(package.parent)) for path in package.rglob("*.py")}
    assert {*found} >= code | {"the program", "megatron_ds/config/messages.toml"}
    program.write_text("2")
    changed = software.source_digests()
    assert [name for name in found if changed[name] != found[name]] == ["the program"]


def test_a_package_that_is_missing_has_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(software, "PACKAGES", ("torch", "no_such_package"))
    found = software.versions()
    assert {*found} == {"torch", "no_such_package", "Python"}
    assert found["no_such_package"] == "(not installed)"
    assert found["torch"][0].isdigit()
