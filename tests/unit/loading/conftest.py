"""Fixtures of the tests of checkpoints."""

from tests.unit.checkpoint.conftest import checkpoints, config, folder, logged, manager

__all__ = ["checkpoints", "config", "folder", "logged", "manager"]
