"""The formats of other trainers' tokens that are read, by the name that `--format` gives them.

`token_files/file_formats.py` recognizes them. A new format is a module of `readers/` with a
function that implements `Reader`, an entry here, and the name in its `FileFormat`.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_ds.data.foreign_tokens.foreign_file import Reader
from megatron_ds.data.foreign_tokens.readers import (
    arrays,
    datatrove,
    flat,
    json_lines,
    levanter,
    litdata,
    mds,
    tables,
)


@dataclass(frozen=True)
class ForeignKind:
    """How a format is read.

    Attributes:
        open: Opens its files.
        suffixes: Ends of the names of the files that hold tokens; others describe them. None if
            the format is a folder, which is opened by its path.
    """

    open: Reader
    suffixes: tuple[str, ...] | None = ("",)

    @property
    def is_folder(self) -> bool:
        return self.suffixes is None


KINDS: dict[str, ForeignKind] = {
    "nanogpt": ForeignKind(flat.open_bare),
    "llm.c": ForeignKind(flat.open_with_header),
    "olmo": ForeignKind(arrays.open_olmo, (".npy",)),
    "numpy": ForeignKind(arrays.open_numpy),
    "datatrove": ForeignKind(datatrove.open_files, (".ds",)),
    "mds": ForeignKind(mds.open_folder, None),
    "litdata": ForeignKind(litdata.open_folder, None),
    "levanter": ForeignKind(levanter.open_folder, None),
    "parquet": ForeignKind(tables.open_parquet),
    "arrow": ForeignKind(tables.open_arrow),
    "saved-dataset": ForeignKind(tables.open_saved_dataset, None),
    "jsonl": ForeignKind(json_lines.open_files),
}
AUTO = "auto"
FORMATS = (AUTO, *KINDS)
