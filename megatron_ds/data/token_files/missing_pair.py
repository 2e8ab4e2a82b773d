"""Diagnoses a prefix without a pair of `.bin` and `.idx`: a file or folder of another format.

Owns the messages of `--data-path` and the tools about such files: what they are, which program
reads them, and the command that makes a pair of their tokens or their text where there is one.
"""

from __future__ import annotations

import glob
import itertools
import os
import re
import shlex
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress

from megatron_ds.config.problems import Problem, UserError
from megatron_ds.data.remote.token_cache import TokenCache, is_url
from megatron_ds.data.token_files.file_formats import (
    BARE_NUMBERS,
    PAIR,
    TEXT_FILE,
    Holds,
    Recognized,
    columns_of,
    most_specific,
    recognize,
)
from megatron_ds.data.token_files.probed_files import Files, LocalFiles, ProbedFile, StoreFiles
from megatron_ds.fileio.object_store import ObjectStore

INDEX_NAMES = (
    "state.json",
    "dataset_dict.json",
    "dataset_info.json",
    "index.json",
    "shard_ledger.json",
    "zarr.json",
)
"""Files that say what their folder is, which are tried before others."""
RECORD_SUFFIXES = (".tokenizer.json", ".progress.json", ".quarantine", ".lock", ".partial")
HTML = re.compile(rb"\s*<(!doctype html|html)", re.IGNORECASE)
FOLDER_FORMATS = ("mds", "litdata", "saved-dataset", "levanter")
"""Formats whose files a folder describes, by their names for tools/import_tokens.py."""
ARRAY_OF_CACHE = re.compile(r"(^|/)[^/]+/(data|offsets|shapes)$")
"""Folder of an array of Levanter below the folder of its cache."""
SIDECARS = re.compile(r"(?<=\.ds)\.(index|metadata|loss)$|\.csv\.gz$")
"""Ends of the names of files that describe the tokens of others."""
MAX_PROBED = 64
"""Most files of a folder that are tried."""
MAX_SUBFOLDERS = 16
"""Most folders of a folder that are looked into."""
CODES = {
    Holds.IDS: "data-of-other-program",
    Holds.RECORDS: "data-in-records",
    Holds.TEXT: "data-is-text",
    Holds.SAVED_DATASET: "data-is-saved-dataset",
    Holds.DATASET_CACHE: "data-is-dataset-cache",
    Holds.PAIR: "data-prefix-differs",
    Holds.POINTER: "data-is-pointer",
}


def missing_files(prefix: str, cache: TokenCache) -> Iterator[Problem]:
    """Checks that both files of a pair exist, or says what the prefix names instead.

    Raises:
        UserError: If the store of a URL does not answer.
    """
    exists: Callable[[str], bool] = cache.exists if is_url(prefix) else os.path.exists
    missing = [path for path in (f"{prefix}.bin", f"{prefix}.idx") if not exists(path)]
    others = list(other_format_problems(prefix)) if missing else []
    yield from others
    for path in () if others else missing:
        yield Problem("data-file-missing", prefix=prefix, path=path)


def other_format_problems(prefix: str) -> Iterator[Problem]:
    """The problem of a prefix without a pair, if it names a file of a known format.

    Args:
        prefix: Path or URL, which may also be of a file with its suffix or of a folder.
    """
    files, path = _open(prefix)
    if not prefix or files.size(f"{path}.idx") >= 0:
        return  # its .bin is missing
    text = None
    for group in _candidates(files, path):
        probed = itertools.islice(group, MAX_PROBED)
        recognized = [one for file in probed if (one := recognize(file)) and _is_useful(one)]
        pairs = [one for one in recognized if one.format.holds is Holds.PAIR]
        best = most_specific(pairs or recognized)
        if best is not None and best.format.holds is not Holds.TEXT:
            yield _problem(prefix, best)
            return
        text = text or best  # a README, if there is data in a folder below
    if text is not None:
        yield _problem(prefix, text)


def describe_other(path: str) -> str:
    """Describes a local file that is in the place of a token file, such as "a NumPy array"; "" if
    its format is unknown or right."""
    recognized = recognize(ProbedFile(LocalFiles(), path))
    is_other = recognized is not None and recognized.format not in (PAIR, BARE_NUMBERS)
    return recognized.description if recognized and is_other else ""


def _is_useful(recognized: Recognized) -> bool:
    """Whether a file says what is wrong: one of a pair does if the other exists."""
    file = recognized.file
    if recognized.format.holds is not Holds.PAIR:
        return True
    stem = file.name.rpartition(".")[0]
    return all(file.beside(f"{stem}{suffix}").size >= 0 for suffix in (".bin", ".idx"))


def _open(prefix: str) -> tuple[Files, str]:
    """The files of a path or URL, and the path there."""
    if is_url(prefix):
        with suppress(UserError, OSError):
            system, path = ObjectStore(prefix).client()
            return StoreFiles(system), path
    return LocalFiles(), prefix.rstrip("/") or prefix


def _candidates(files: Files, path: str) -> Iterator[Iterable[ProbedFile]]:
    """The file; or the files of the folder, then of its folders; or those whose names continue the
    path; or those that match it."""
    file = ProbedFile(files, path)
    if file.size >= 0:
        yield [file]
        if not HTML.match(file.head):  # which web servers have for a folder
            return
    # As preprocessing names the pair of the key "text".
    yield _files_in(files, "", [f"{path}_text_document.idx"])
    names = _by_importance(files.names(path))
    yield _files_in(files, path, names)
    for name in names[:MAX_SUBFOLDERS]:
        folder = f"{path}/{name}"
        yield _files_in(files, folder, _by_importance(files.names(folder)))
    if not names:
        folder, _, start = path.rpartition("/")
        starting = [name for name in files.names(folder) if name.startswith(f"{start}.")]
        yield _files_in(files, folder, starting)
        if isinstance(files, LocalFiles) and glob.has_magic(path):
            yield (ProbedFile(files, path) for path in glob.iglob(path))


def _by_importance(names: list[str]) -> list[str]:
    return sorted(names, key=lambda name: name not in INDEX_NAMES)


def _files_in(files: Files, folder: str, names: Iterable[str]) -> Iterator[ProbedFile]:
    """The names that are files, without the records that this package writes next to a pair."""
    kept = (name for name in names if not name.endswith(RECORD_SUFFIXES))
    listed = (ProbedFile(files, os.path.join(folder, name)) for name in kept)
    return (file for file in listed if file.size >= 0)


def readable_as(recognized: Recognized) -> str:
    """The name of the format for `--format` of tools/import_tokens.py; "" if that does not read the
    file. Of files that may hold text, those with columns of ids are read."""
    format = recognized.format
    if format.holds is Holds.TEXT:
        columns = columns_of(recognized.file)
        has_ids = bool(columns.ids) if columns else format is not TEXT_FILE  # a damaged table
        return format.import_name if has_ids else ""
    return format.import_name


def import_command(prefix: str, recognized: Recognized) -> str:
    """The command that makes a pair of a file, or of the folder that describes it.

    Args:
        prefix: The path or folder that the user gave.
    """
    path = recognized.file.files.shown(recognized.file.path)
    folder = path.rpartition("/")[0] or "."
    is_folder = path.startswith(f"{prefix.rstrip('/')}/")
    if recognized.format.import_name in FOLDER_FORMATS:
        is_folder = True
        folder = re.sub(ARRAY_OF_CACHE, "", folder) or "."
    else:
        path = SIDECARS.sub(_tokens_of, path)
    source = folder if is_folder else path
    stem = source if is_folder else re.sub(r"\.\w+$", "", path)
    words = ["python tools/import_tokens.py --input", shlex.quote(source)]
    words += ["--output-prefix", shlex.quote(f"{stem}_tokens")]
    return " ".join([*words, *([] if recognized.format.has_documents else ["--end-token ID"])])


def _tokens_of(match: re.Match[str]) -> str:
    """The end of the name of the tokens that a file describes."""
    return ".npy" if match[0] == ".csv.gz" else ""


def _problem(prefix: str, recognized: Recognized) -> Problem:
    file = recognized.file
    format = recognized.format
    path = file.files.shown(file.path)
    is_folder = path.startswith(f"{prefix.rstrip('/')}/")
    values = {
        "prefix": prefix,
        "where": "" if path == prefix else f"{prefix}: ",
        "path": path,
        "input": prefix if is_folder else path,
        "folder": path.rpartition("/")[0] or ".",
        "stem": path.removesuffix(".bin").removesuffix(".idx"),
        "description": recognized.description,
        "read_by": format.read_by,
        "keys": "",
        "ids": "",
        "command": import_command(prefix, recognized),
    }
    if format.holds is Holds.TEXT and (columns := columns_of(file)):
        ids = ", ".join(map(repr, columns.ids))
        if columns.ids and "text" not in columns.text:
            return Problem("data-is-table-of-ids", **(values | {"ids": ids}))
        if columns.text and "text" not in columns.text:
            values["keys"] = f" --json-keys {columns.text[0]}"
        if columns.ids:
            values["ids"] = f"; the ids in {ids} become one by: {values['command']}"
    if format is BARE_NUMBERS:
        return Problem("data-without-header", **values)
    if format.holds in (Holds.IDS, Holds.RECORDS) and format.import_name:
        return Problem("data-of-other-trainer", **values)
    return Problem(CODES[format.holds], **values)
