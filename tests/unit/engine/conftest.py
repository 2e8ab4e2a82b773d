from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.unit.engine.ds_files import Merge, Merged, merged


@pytest.fixture
def merge(tmp_path: Path) -> Merge:
    """Merges a file, as text or as an object, into FLAGS and further flags; see `merged`."""
    path = tmp_path / "ds.json"

    def merge(file: Any, flags: str = "", **options: Any) -> Merged:
        path.write_text(file if isinstance(file, str) else json.dumps(file))
        return merged(f"{flags} --deepspeed_config {path}", **options)

    return merge
