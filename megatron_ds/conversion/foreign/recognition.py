"""Recognizes checkpoints of other programs that are not read, and names what reads them.

Owns where they are looked for: in a folder, in the folders below it, and behind a file. Imports no
torch, so that command lines are checked without it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron_ds.config.options.checkpoint import (
    REFUSED_FORMATS,
    is_remote,
    missing_folder,
    split_location,
)
from megatron_ds.config.problems import Problem, option
from megatron_ds.conversion.foreign.contents import FolderContents
from megatron_ds.conversion.foreign.formats import ALIKE, CERTAIN, GENERAL, ForeignFormat
from megatron_ds.conversion.foreign.trainers import detect_trainer, is_own
from megatron_ds.conversion.megatron.detect import MegatronCheckpoint, detect_megatron
from megatron_ds.conversion.weights_locations import HF, is_gguf

DEPTH = 2
"""Levels of folders below one, in which checkpoints are looked for: OUTPUT/checkpoint/step-10."""
FOLDERS_READ = 50
"""Folders of a level that are compared, the ones with the highest numbers first."""
DEPTH_ABOVE = 3
"""Levels of folders above a file, of which it may be a part: STEP_universal/zero/NAME/fp32.pt."""
SPECIFIC = (*ALIKE, *CERTAIN)
FORMATS = (*SPECIFIC, *GENERAL)


def find_foreign(
    path: Path, shown: object = None, *, name: str = "auto", depth: int = DEPTH
) -> Problem | None:
    """The message on a file, or on a folder with a checkpoint that is not read.

    Args:
        path: The file or folder.
        shown: Its name in the message, if it is another one.
        name: The format that was given for it.
        depth: Levels of folders below it that are searched.

    Returns:
        None if the folder has a checkpoint that is read, or none of a known program.
    """
    shown = path if shown is None else shown
    if path.is_file() and is_gguf(path):
        return None
    if path.is_file():
        return _find_file(path, shown)
    return find_foreign_in(path, detect_megatron(path), shown, name=name, depth=depth)


def find_foreign_in(
    path: Path,
    checkpoint: MegatronCheckpoint | None,
    shown: object,
    *,
    name: str = "auto",
    depth: int = DEPTH,
) -> Problem | None:
    """Like `find_foreign`, for a folder in which Megatron's files have been looked for.

    Args:
        path: The folder, or a path that does not exist.
        checkpoint: The result of `detect_megatron` for it.
        shown: Its name in the message.
        name: The format that was given for it.
        depth: Levels of folders below it that are searched.
    """
    problem = _find_in(path, checkpoint, shown, name, depth)
    if problem is None and name in REFUSED_FORMATS:
        return Problem(f"foreign-{name}", path=shown, file=path)
    return problem


def _find_in(
    path: Path, checkpoint: MegatronCheckpoint | None, shown: object, name: str, depth: int
) -> Problem | None:
    if detect_trainer(path, name) is not None:
        return None
    if (trainer := detect_trainer(path)) is not None:
        texts = {"file": trainer.file, "name": trainer.name, "named": name}
        return Problem("foreign-of-other-format", path=shown, **texts)
    contents = FolderContents(path)
    is_model = contents.is_model_of_transformers
    checkpoint = None if is_model and name == HF else checkpoint
    if is_model and checkpoint is None:
        return None
    folder = path if checkpoint is None else checkpoint.path
    if (problem := _find(FolderContents(folder), ALIKE, shown)) is not None:
        return problem
    if checkpoint is not None or is_own(path):
        return None
    problems = (
        _find(contents, CERTAIN, shown),
        _find_below([contents], shown, depth),
        _find(contents, GENERAL, shown),
    )
    return next(filter(None, problems), None)


def location_problems(location: str, name: str = "auto") -> Iterator[Problem]:
    """Checks that a value of --load names a folder, if it is to be a local one, with a checkpoint
    that is not known to be unread.

    Args:
        location: The value, which may begin with a format, as in hf:FOLDER.
        name: The format, if another option gives it.
    """
    prefix, folder = split_location(location)
    path = Path(folder)
    if not location or is_remote(location) or not path.exists():
        yield from missing_folder(location)
    elif problem := find_foreign(path, name=name if prefix == "auto" else prefix):
        yield problem


def _find(
    contents: FolderContents,
    formats: Sequence[ForeignFormat],
    shown: object,
    beside: Path | None = None,
) -> Problem | None:
    """The message of the first format that a folder has.

    Args:
        contents: The folder.
        formats: The formats.
        shown: Its name in the message.
        beside: A file: the files that show the format are to be in the same folder.
    """
    for entry in formats:
        file = entry.find(contents)
        if file is not None and (
            beside is None or file.absolute().parent == beside.absolute().parent
        ):
            return Problem(entry.code, path=shown, file=file)
    return None


def _find_below(above: Sequence[FolderContents], shown: object, depth: int) -> Problem | None:
    """The format of the newest checkpoint in the folders below some, one level after the other."""
    below = [
        FolderContents(path)
        for contents in above
        for path in [path for path in reversed(contents.matching(r"[^.].*")) if path.is_dir()]
    ][:FOLDERS_READ]
    for folder in below if depth else []:
        if folder.is_model_of_transformers:
            return Problem("foreign-model-below", path=shown, folder=folder.path)
        if (trainer := detect_trainer(folder.path)) is not None:
            texts = {"folder": folder.path, "name": trainer.name}
            return Problem("foreign-checkpoint-below", path=shown, **texts)
        if (problem := _find(folder, SPECIFIC, shown)) is not None:
            return problem
    return _find_below(below, shown, depth - 1) if depth and below else None


def _find_file(path: Path, shown: object) -> Problem:
    """The message on a file: its folder, or its format by itself and by the files next to it."""
    if FolderContents(path.parent).is_model_of_transformers:
        return _is_a_file(shown, f"{HF}:{path.parent}")
    above = path.absolute().parents[:DEPTH_ABOVE]
    for folder in above:
        trainer = detect_trainer(folder)
        if trainer is not None and trainer.path == folder:
            return _is_a_file(shown, f"{trainer.name}:{folder}")
        if is_own(folder) or detect_megatron(folder) is not None:
            return find_foreign(folder, shown, depth=0) or _is_a_file(shown, folder)
    alone = FolderContents(path.parent, only=path.name)
    problems = (
        *(_find(FolderContents(folder), SPECIFIC, shown, beside=path) for folder in above),
        _find(alone, SPECIFIC, shown),
        _find(alone, GENERAL, shown),
    )
    return next(filter(None, problems), None) or _is_a_file(shown)


def _is_a_file(shown: object, location: object = None) -> Problem:
    hint = "" if location is None else f": {option('load')} {location}"
    return Problem("load-is-a-file", path=shown, hint=hint)
