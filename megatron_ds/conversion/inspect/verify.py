"""Finds every damage of a checkpoint: reads all of its files and compares them with its manifest.

A load stops at the first damage, because it needs an intact checkpoint; here all of it is listed,
with the name of each file. Formats of other programs have no manifest: the checksums inside
torch's files are verified, and every tensor is read.
"""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron_ds.checkpoint import metadata, selection
from megatron_ds.checkpoint.files import local_files
from megatron_ds.checkpoint.metadata import (
    MANIFEST,
    POINTER_PENDING,
    list_checkpoints,
    read_manifest,
)
from megatron_ds.checkpoint.universal.folders import list_universal
from megatron_ds.config.problems import Problem, UserError
from megatron_ds.conversion.source import SourceCheckpoint
from megatron_ds.conversion.weights_locations import SETTINGS
from megatron_ds.fileio.atomic import FileRecord

Open = Callable[[Path], SourceCheckpoint]


@dataclass(frozen=True)
class Verification:
    """The result for one folder."""

    path: Path
    num_files: int
    """Files that were read completely."""
    num_bytes: int
    has_checksums: bool
    """Whether a manifest lists the checksum of every file."""
    problems: tuple[Problem, ...]


def verify_manifest(path: Path, open_source: Open) -> list[Verification]:
    """Verifies a checkpoint of a training run, or a folder of weights, by its manifest."""
    return [_verify_manifest(path)]


def verify_save_folder(path: Path, open_source: Open) -> list[Verification]:
    """Verifies all checkpoints of a --save folder, and its pointers."""
    universal = [
        _verify_manifest(folder)
        if (folder / MANIFEST).is_file()  # DeepSpeed's converter writes none
        else _verify_tensors(folder, open_source)
        for folder in list_universal(path)
    ]
    checkpoints = [_verify_manifest(folder) for folder in list_checkpoints(path)]
    pointers = [_verify_pointers(path)] if checkpoints else []
    return [*checkpoints, *universal, *pointers]


def verify_tensors(path: Path, open_source: Open) -> list[Verification]:
    """Verifies a checkpoint of another program: reads what can be read."""
    return [_verify_tensors(path, open_source)]


def _verify_manifest(path: Path) -> Verification:
    """A checkpoint of a training run, or a folder of weights."""
    try:
        files = read_manifest(path)
    except UserError as error:
        return Verification(path, 0, 0, True, error.problems)
    except OSError as error:
        missing = Problem("checkpoint-file-missing", name=MANIFEST)
        is_missing = isinstance(error, FileNotFoundError)
        problem = missing if is_missing else metadata.unreadable_checkpoint(error)
        return Verification(path, 0, 0, True, (problem,))
    problems = [
        *(problem for name, record in files.items() for problem in _damage(path, name, record)),
        *_unlisted(path, files),
    ]
    if not problems and not (path / SETTINGS).is_file():
        # What no checksum shows: another version, or a renamed folder.
        damage = metadata.find_record_damage(path)
        problems += [] if damage is None else [damage]
    size = sum(record.size for record in files.values())
    return Verification(path, len(files) + 1, size, True, tuple(problems))


def _damage(path: Path, name: str, record: FileRecord) -> Iterator[Problem]:
    """Problem of one file, if any."""
    file = path / name
    try:
        if not file.is_file():
            yield Problem("checkpoint-file-missing", name=name)
        elif (actual := file.stat().st_size) != record.size:
            yield Problem("checkpoint-file-size", name=name, actual=actual, expected=record.size)
        else:
            damages = local_files.find_damaged_files(path, {name: record})
            if (problem := local_files.files_damaged(damages)) is not None:
                yield problem
    except (OSError, ValueError) as error:
        yield Problem("checkpoint-files-damaged", damages=f"{name} cannot be read ({error})")


def _unlisted(path: Path, files: dict[str, FileRecord]) -> Iterator[Problem]:
    known = {*files, MANIFEST, POINTER_PENDING}
    for file in sorted(path.rglob("*")):
        name = file.relative_to(path).as_posix()
        if name not in known and not file.is_dir():
            yield Problem("checkpoint-file-unlisted", unlisted=name, manifest=MANIFEST)


def _verify_pointers(path: Path) -> Verification:
    """Whether the pointers of a --save folder name one of its checkpoints, and the same one."""
    listing = selection.list_folder(path)
    names = [file.name for file in listing.paths]
    problems = [
        Problem("checkpoint-pointer-stale", pointer=stale, names=", ".join(names))
        for stale in listing.stale
    ]
    return Verification(path, 0, 0, False, tuple(problems))


def _verify_tensors(path: Path, open_source: Open) -> Verification:
    source = open_source(path)
    files = files_of(source.path)
    problems = []
    for file in files:
        damage = _zip_damage(source.path / file)
        if damage is not None:
            problems.append(Problem("checkpoint-files-damaged", damages=f"{file} {damage}"))
    if not problems:
        try:
            for tensors in (source.weights().tensors, *source.optimizer.values()):
                for tensor in tensors.values():
                    tensor.read()
        except (UserError, OSError) as error:
            problems.append(Problem("checkpoint-files-damaged", damages=str(error)))
    sizes = files.values()
    return Verification(source.path, len(sizes), sum(sizes), False, tuple(problems))


def files_of(folder: Path) -> dict[str, int]:
    """Bytes of each file, by path in the folder."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.stat().st_size for path in paths}


def _zip_damage(path: Path) -> str | None:
    """Problem of a file of torch's zip format; None for another format."""
    with path.open("rb") as file:
        if file.read(4) != b"PK\x03\x04" or path.suffix == ".distcp":
            return None  # a .distcp has several of them, one after the other
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as error:
        return f"is not a complete zip file ({error})"
    return None if damaged is None else f"does not match its CRC-32 at {damaged}"
