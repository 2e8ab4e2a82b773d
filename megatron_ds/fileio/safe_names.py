"""Names of files that come from a file or a store, whose writers may be anyone."""

from __future__ import annotations


def is_safe_name(name: str) -> bool:
    """Whether a name, joined to a folder, is the path of a file inside it on any system.

    A safe name has no empty part, no `.` and no `..` between its slashes, neither a backslash nor a
    null byte, and does not begin with a drive.
    """
    is_elsewhere = name[1:2] == ":" or {"", ".", ".."} & {*name.split("/")}
    return not is_elsewhere and not {"\\", "\0"} & {*name}
