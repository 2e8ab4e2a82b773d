"""The stand-in for torch's compiler, with a package of its own: torch's may be imported already."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from megatron_ds.engine.deferred_compiler import CACHED, DeferredCompiler

NAME = "deferred_package.compiler"


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DeferredCompiler]:
    """Of a module that reads its own attributes through its parent while it is imported."""
    folder = tmp_path / "deferred_package" / "compiler"
    folder.mkdir(parents=True)
    (folder.parent / "__init__.py").touch()
    (folder / "__init__.py").write_text(
        f"import {NAME}.part\nvalue = 7\ndef disable(fn): return ('disabled', fn)\n"
    )
    (folder / "part.py").write_text(f"import {NAME}\nnumber = 5\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    parent = importlib.import_module("deferred_package")
    module = DeferredCompiler(NAME)
    sys.modules[NAME] = module
    parent.__dict__["compiler"] = module
    yield module
    for name in [name for name in sys.modules if name.startswith("deferred_package")]:
        del sys.modules[name]


def is_imported() -> bool:
    return f"{NAME}.part" in sys.modules


def test_eager_code_does_not_import_the_compiler(stand_in: DeferredCompiler) -> None:
    compiler = importlib.import_module(NAME)
    assert compiler is stand_in
    assert compiler.graph_break() is None
    assert compiler.disable(len, False, wrapping=False) is len
    assert compiler.disable(recursive=False)(len) is len
    assert importlib.util.find_spec(NAME) is not None
    assert not hasattr(compiler, "__file__")
    assert not is_imported()


def test_anything_else_imports_it(stand_in: DeferredCompiler) -> None:
    assert stand_in.value == 7
    assert is_imported()
    real = sys.modules[NAME]
    assert real is not stand_in
    assert sys.modules["deferred_package"].__dict__["compiler"] is real
    assert stand_in.value == 7  # also of a reference that was kept


def test_part_of_it_can_be_imported(stand_in: DeferredCompiler) -> None:
    part: ModuleType = importlib.import_module(f"{NAME}.part")
    assert part.number == 5
    assert sys.modules[NAME] is not stand_in


def test_functions_are_disabled_again_by_the_real_one(stand_in: DeferredCompiler) -> None:
    def step() -> None: ...

    setattr(step, CACHED, stand_in.disable(step))
    assert stand_in.value == 7
    assert not hasattr(step, CACHED)
    assert sys.modules[NAME].disable(step) == ("disabled", step)
