"""What identifies the software of a host."""

from __future__ import annotations

import importlib
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


def test_modules_beside_the_program_have_a_digest_and_installed_ones_have_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {
        "train.py": "",
        "my_helper.py": "1",
        "parts/my_part.py": "",
        "not_imported.py": "",
        ".venv/lib/python3/site-packages/my_installed.py": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "link").symlink_to(tmp_path / "train.py")
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "link")])
    for name in ("", ".venv/lib/python3/site-packages"):
        monkeypatch.syspath_prepend(str(tmp_path / name))
    for name in ("my_helper", "parts.my_part", "my_installed"):
        monkeypatch.delitem(sys.modules, name, raising=False)
        importlib.import_module(name)
        monkeypatch.delitem(sys.modules, "parts", raising=False)
    found = software.module_digests()
    assert list(found) == ["my_helper.py", "parts/my_part.py"]
    (tmp_path / "my_helper.py").write_text("2")
    changed = software.module_digests()
    assert [name for name in found if changed[name] != found[name]] == ["my_helper.py"]
    monkeypatch.setattr(sys, "argv", [str(Path(software.__file__).parents[2] / "pretrain_gpt.py")])
    assert not [name for name in software.module_digests() if name.startswith("megatron_ds")]


def test_a_package_that_is_missing_has_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(software, "PACKAGES", ("torch", "no_such_package"))
    found = software.versions()
    assert {*found} == {"megatron_ds", "torch", "no_such_package", "Python"}
    assert found["no_such_package"] == "(not installed)"
    assert found["torch"][0].isdigit()
