"""Fixtures: the launcher of the end-to-end tests, which cleans up its processes."""

from __future__ import annotations

from tests.e2e.conftest import _no_process_left_behind, environment, launcher

__all__ = ["_no_process_left_behind", "environment", "launcher"]
