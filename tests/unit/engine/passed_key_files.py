"""A file and flags that turn each key of `engine.ds_config.passthrough` on. Has no tests."""

from __future__ import annotations

from typing import Any

from tests.tables import tables

TABLES = tables(__file__)

KEYS: dict[str, tuple[dict[str, Any], str]] = TABLES["keys"]
