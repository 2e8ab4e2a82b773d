"""Files of other trainers that hold no text, recognized by their names and first bytes.

The one table of these formats for inputs. A saved folder of `datasets` is among them: only the
Arrow files that its `state.json` lists belong to it, and `map` or a second save leave more there.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from typing import NamedTuple

from megatron_ds.config.problems import Problem

HEAD_BYTES = 4096
JSON_START = rb"(?:\xef\xbb\xbf)?\s*[{\[]"


class ForeignFormat(NamedTuple):
    """A format that is refused.

    Attributes:
        description: The format and the program that writes it.
        name: Pattern of the file's whole name.
        begins: Pattern at its first bytes.
        beside: Name of a file that must exist in its folder, with `{stem}` for the file's name
            without its suffix; empty if none is needed.
    """

    description: str
    name: str
    begins: bytes = b""
    beside: str = ""


NOT_JSON = rb"(?!" + JSON_START + rb")"
FORMATS = (
    ForeignFormat("a token file of datatrove", r".+\.ds(\.index|\.metadata)?", NOT_JSON),
    ForeignFormat("a shard of a MosaicML streaming dataset (MDS)", r".+\.mds(\.\w+)?"),
    ForeignFormat(
        "the index of a MosaicML streaming dataset (MDS)",
        r"index\.json",
        rb'\s*\{\s*("version"\s*:\s*\d+\s*,\s*)?"shards"\s*:\s*\[',
    ),
    ForeignFormat("the index of a litdata dataset", r"index\.json", rb'\s*\{\s*"chunks"\s*:\s*\['),
    ForeignFormat("a chunk of a litdata dataset", r"chunk-.+\.bin", NOT_JSON, "index.json"),
    ForeignFormat("the ledger of a Levanter cache", r"shard_ledger\.json"),
    ForeignFormat("a token file of Megatron, for training", r".+\.bin", NOT_JSON, "{stem}.idx"),
    ForeignFormat(
        "a token file of llm.c or modded-nanogpt",
        r".+\.bin",
        # 20240520 (uint16 tokens) and 20240801 (uint32 tokens), little-endian.
        rb"(?:\x88\xd8\x34\x01|\xa1\xd9\x34\x01)",
    ),
    ForeignFormat("a token file without a header, as nanoGPT writes", r".+\.bin", NOT_JSON),
    ForeignFormat("a NumPy array", r".+\.npy", rb"\x93NUMPY"),
    ForeignFormat("a token file of OLMo-core or dolma", r".+\.npy", NOT_JSON),
    ForeignFormat("the document index of OLMo-core or dolma", r".+\.csv\.gz", b"", "{stem}.npy"),
)


def foreign_problems(file: str) -> Iterator[Problem]:
    """The problem of a local file that belongs to another program. Special files are not opened."""
    for path in dict.fromkeys((file, os.path.realpath(file))):
        folder = os.path.dirname(path) or "."
        if _is_of_saved_dataset(path):
            yield Problem("input-is-saved-dataset", path=file, folder=folder)
            return
        for format in FORMATS:
            if _is_of(format, path):
                yield Problem("input-of-other-program", path=file, found=format.description)
                return


def _is_of(format: ForeignFormat, path: str) -> bool:
    folder, name = os.path.split(path)
    if not re.fullmatch(format.name, name):
        return False
    stem = re.sub(r"(\.csv\.gz|\.bin)$", "", name)
    beside = os.path.join(folder, format.beside.replace("{stem}", stem))
    if format.beside and not os.path.isfile(beside):
        return False
    return not format.begins or re.match(format.begins, head_of(path), re.DOTALL) is not None


def _is_of_saved_dataset(path: str) -> bool:
    folder, name = os.path.split(path)
    if name == "dataset_dict.json":
        return re.match(rb'\s*\{\s*"splits"\s*:', head_of(path)) is not None
    if not (name.endswith(".arrow") or name in ("dataset_info.json", "state.json")):
        return False
    return b'"_data_files"' in head_of(os.path.join(folder, "state.json"))


def head_of(path: str) -> bytes:
    """The first bytes of a regular file; none of another or of one that cannot be read."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            return b""
        with open(path, "rb") as file:
            return file.read(HEAD_BYTES)
    except OSError:
        return b""
