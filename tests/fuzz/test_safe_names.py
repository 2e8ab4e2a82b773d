"""A name of a file or a store that is accepted is the path of a file inside any folder."""

from __future__ import annotations

import ntpath
import os.path
import posixpath
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ds.fileio.safe_names import is_safe_name
from tests.fuzz.fuzz_helpers import FUZZ_SETTINGS

PARTS = st.sampled_from([*"/\\.:~$*\0 ", "..", "...", "C:", "a", "NUL", "é"])
NAMES = st.lists(PARTS, max_size=6).map("".join) | st.text(max_size=8)


@given(name=NAMES)
@FUZZ_SETTINGS
@pytest.mark.parametrize(
    ("path", "folder"), [(posixpath, "/folder/below"), (ntpath, "D:\\folder\\below")]
)
def test_an_accepted_name_stays_inside(path: Any, folder: str, name: str) -> None:
    """Claim (checkpoints): names of objects and manifests in a store neither write nor delete a
    file outside the staging folder"""
    if not is_safe_name(name):
        return
    joined = path.normpath(path.join(folder, name))
    assert path.dirname(joined).startswith(folder)
    assert path.splitdrive(joined)[0] == path.splitdrive(folder)[0]
    assert "\0" not in name


@given(parts=st.lists(st.from_regex(r"[a-z_.]*[a-z]", fullmatch=True), min_size=1, max_size=4))
@FUZZ_SETTINGS
def test_ordinary_names_are_accepted(parts: list[str]) -> None:
    assert is_safe_name("/".join(parts))
    assert os.path.normpath("/".join(parts)) == "/".join(parts)
