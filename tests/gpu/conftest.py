"""Fixtures of whole runs, shared with tests/e2e."""

from tests.e2e.conftest import _no_process_left_behind, base, corpus, launcher

__all__ = ["_no_process_left_behind", "base", "corpus", "launcher"]
