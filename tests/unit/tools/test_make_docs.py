"""docs/reference/flags.md documents what the code declares."""

from __future__ import annotations

from megatron_ds.cli.flags import training_flags
from megatron_ds.cli.help import other_names
from tests import import_graph
from tools import make_docs, support_matrix


def test_flags_page_is_current() -> None:
    """Regenerate with `python tools/make_docs.py`."""
    assert make_docs.OUTPUT.read_text(encoding="utf-8") == make_docs.page()


def test_support_matrix_is_current() -> None:
    """Regenerate with `python tools/make_docs.py`."""
    assert support_matrix.OUTPUT.read_text(encoding="utf-8") == support_matrix.page()


def test_import_diagram_is_current() -> None:
    """Regenerate with `python tools/make_docs.py`."""
    assert import_graph.PAGE.read_text(encoding="utf-8") == import_graph.page()


def test_flags_page_lists_every_flag() -> None:
    page = make_docs.page()

    for flag in training_flags().by_name.values():
        for name in (flag.names[0], *other_names(flag)):
            assert f"`--{name}`" in page or f"`--{name} " in page, name
