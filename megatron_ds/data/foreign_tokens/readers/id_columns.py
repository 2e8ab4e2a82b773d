"""Which column or key holds the ids, in formats whose rows have several."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_ds.config.problems import user_error

USUAL_NAMES = ("input_ids", "tokens", "token_ids", "ids")
"""Names by which one of several columns is chosen, in this order."""


def choose_name(
    candidates: Sequence[str], columns: Sequence[str], asked: str | None, path: str
) -> str:
    """The column of ids: the one that the user names, the only one, or the one of a usual name.

    Args:
        candidates: Columns that hold ids.
        columns: All columns, for messages.
        asked: The column that the user names.
        path: The file, for messages.

    Raises:
        UserError: If there is no such column, or none or several without a usual name.
    """
    if asked is not None:
        if asked not in candidates:
            raise user_error(
                "foreign-column-missing", path=path, asked=asked, columns=", ".join(columns)
            )
        return asked
    usual = [name for name in USUAL_NAMES if name in candidates]
    if len(candidates) == 1 or usual:
        return usual[0] if usual else candidates[0]
    raise user_error(
        "foreign-column-not-unique",
        path=path,
        columns=", ".join(columns),
        candidates=", ".join(candidates) or "none",
    )
