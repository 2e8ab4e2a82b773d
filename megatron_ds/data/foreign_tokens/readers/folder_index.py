"""Files that an index of their folder lists: index.json of MDS and litdata, state.json of datasets.

An index may be written by anyone: it names only files inside its folder, also through links.
"""

from __future__ import annotations

import json
import os
from typing import Any

from megatron_ds.config.problems import user_error
from megatron_ds.fileio.safe_names import is_safe_name


def read_index(path: str) -> dict[str, Any]:
    """The JSON object of an index.

    Raises:
        UserError: If it is missing, or no JSON object.
    """
    if os.path.islink(path):
        check_inside(path, os.path.dirname(path))
    try:
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
    except FileNotFoundError:
        raise user_error("token-file-missing", path=path) from None
    except (ValueError, RecursionError, OSError) as error:
        raise user_error("foreign-index-damaged", path=path, reason=error) from error
    if not isinstance(content, dict):
        raise user_error("foreign-index-damaged", path=path, reason="it is no JSON object")
    return content


def listed_path(folder: str, name: object, index: str) -> str:
    """The path of a file that an index names.

    Args:
        folder: The folder of the index.
        name: Its name for the file.
        index: Path of the index, for messages.

    Raises:
        UserError: If the name or a link leads out of the folder, or the file is missing.
    """
    if not isinstance(name, str) or not is_safe_name(name):
        raise user_error("foreign-name-leads-out", index=index, name=name)
    path = os.path.join(folder, name)
    check_inside(path, folder)
    if not os.path.isfile(path):
        raise user_error("foreign-shard-missing", path=path, index=index)
    return path


def check_inside(path: str, folder: str) -> None:
    """Raises UserError: If a path leads out of its folder by a link."""
    target = os.path.realpath(path)
    if not target.startswith(os.path.realpath(folder).rstrip("/") + "/"):
        raise user_error("foreign-link-leads-out", path=path, target=target)
