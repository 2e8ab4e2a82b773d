"""Every exhibit of the museum has its page, source, program, results and test."""

from __future__ import annotations

import ast
import re

import pytest

from tests.museum import run
from tests.museum.run import Exhibit
from tests.unit.test_docs import names_of_tests

EXHIBITS = run.exhibits()


def test_pages_are_current() -> None:
    """`python tests/museum/run.py --pages` writes them."""
    texts = run.pages()
    assert set(run.PAGES.iterdir()) == texts.keys()
    for path, text in texts.items():
        assert path.read_text(encoding="utf-8") == text, path.name


@pytest.mark.parametrize("exhibit", EXHIBITS, ids=lambda exhibit: exhibit.name)
def test_an_exhibit_is_complete(exhibit: Exhibit) -> None:
    text = exhibit.page.read_text(encoding="utf-8").partition(run.END_OF_TEXT)[0]
    assert text.startswith(f"# {exhibit.title}\n\n")
    assert len(text.split()) > 40
    assert exhibit.links
    assert all(re.fullmatch(r"https://\S+", link) for link in exhibit.links)
    assert exhibit.ours
    assert exhibit.tests
    for test in exhibit.tests:
        file, _, name = test.partition("::")
        assert name in names_of_tests(run.REPOSITORY / file), test
    assert exhibit.program.exists() == bool(exhibit.versions) != bool(exhibit.not_run)
    results = run.read_results().get(exhibit.name, {})
    assert results.keys() == set(exhibit.versions)
    assert all(result["seconds"] <= run.SECONDS for result in results.values())
    if exhibit.versions:
        assert "shown" in {result["outcome"] for result in results.values()}


def test_programs_import_nothing_of_this_package() -> None:
    files = {path.stem for path in run.MUSEUM.glob("*.py")} - {"frame", "run"}
    assert files == {exhibit.name for exhibit in EXHIBITS if exhibit.versions}
    for name in files:
        source = (run.MUSEUM / f"{name}.py").read_text(encoding="utf-8")
        modules = {
            module
            for node in ast.walk(ast.parse(source))
            if isinstance(node, ast.Import | ast.ImportFrom)
            for module in [getattr(node, "module", None), *(alias.name for alias in node.names)]
        }
        assert not any((module or "").startswith("megatron_ds") for module in modules), name
