"""Detects folders of weights alone, and checkpoints of transformers' Trainer. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path

from megatron_ds.checkpoint.metadata import list_checkpoints, read_manifest
from megatron_ds.config.problems import UserError
from megatron_ds.conversion.foreign.contents import FolderContents
from megatron_ds.conversion.json_files import read_json
from megatron_ds.fileio.read_ahead import reading
from megatron_ds.tokenizer.gguf.keys import is_gguf as has_magic

NATIVE = "native"
HF = "hf"
SETTINGS = "weights.json"
"""File of a native folder of weights with the options of its model."""
HF_CONFIG = "config.json"
TRAINER_STATE = "trainer_state.json"
GGUF_ENDING = ".gguf"


def is_weights_folder(path: Path) -> bool:
    """Whether a folder is a native one of weights alone."""
    return (path / SETTINGS).is_file()


def is_hf(path: Path) -> bool:
    """Whether a folder is a model of Hugging Face's transformers."""
    try:
        return "model_type" in read_json(path / HF_CONFIG)
    except (OSError, ValueError, TypeError):
        return False


def gguf_file(path: Path) -> Path | None:
    """The GGUF file at a path, or the only one in a folder."""
    files = [path] if path.is_file() else sorted(path.glob(f"*{GGUF_ENDING}"))
    return files[0] if len(files) == 1 and has_magic(files[0]) else None


def is_gguf(path: Path) -> bool:
    """Whether a path is a GGUF file, or a folder with one and no other."""
    return gguf_file(path) is not None


def is_trainer_checkpoint(path: Path) -> bool:
    """Whether a folder is a checkpoint of transformers' Trainer with the weights of the model.

    With DeepSpeed it has a folder global_stepN, too, whose files have other names than ours.
    """
    contents = FolderContents(path)
    return (path / TRAINER_STATE).is_file() and contents.is_model_of_transformers


def has_weights(path: Path) -> bool:
    """Whether a folder has weights alone, and no checkpoints of a run that saves to it."""
    if is_trainer_checkpoint(path):
        return True
    if list_checkpoints(path):
        return False
    return is_weights_folder(path) or is_hf(path) or is_gguf(path)


@contextmanager
def reading_weights(path: Path) -> Iterator[dict[Path, Future[bool]]]:
    """Reads the weights at a path in a thread, if they are weights alone, until the block ends.

    Yields:
        For files of a native folder, whether they match their checksums, once that is known.
    """
    records = {}
    if is_weights_folder(path):
        try:
            records = {path / name: record for name, record in read_manifest(path).items()}
        except (UserError, OSError):
            records = {}  # the reader that follows says why
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    with reading(files, records) as pending:
        yield pending
