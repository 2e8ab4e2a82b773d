"""What all unit tests share: a process whose imported objects are never collected."""

from __future__ import annotations

import gc


def pytest_collection() -> None:
    # Until all files are imported, nothing is garbage.
    gc.disable()


def pytest_collection_finish() -> None:
    # The libraries are a million objects, which each collection of the oldest ones would visit.
    gc.enable()
    gc.collect()
    gc.freeze()
