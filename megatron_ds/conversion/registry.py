"""The formats of checkpoints: how a folder is recognized, opened, verified and written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megatron_ds.checkpoint.folders.output_folder import OnTensor
from megatron_ds.checkpoint.metadata import MANIFEST, RUN
from megatron_ds.config.options.checkpoint import FORMATS as NAMES
from megatron_ds.config.problems import Problem, UserError, ignore, user_error
from megatron_ds.conversion.foreign.recognition import find_foreign
from megatron_ds.conversion.foreign.trainers import detect_trainer
from megatron_ds.conversion.gguf.read_write import open_gguf, write_gguf
from megatron_ds.conversion.huggingface.read_write import open_hf, write_hf
from megatron_ds.conversion.inspect.verify import (
    Verification,
    verify_manifest,
    verify_save_folder,
    verify_tensors,
)
from megatron_ds.conversion.megatron.detect import (
    DEEPSPEED,
    LEGACY,
    TORCH_DIST,
    UNIVERSAL,
    has_kind,
)
from megatron_ds.conversion.megatron.write_legacy import write_megatron
from megatron_ds.conversion.native import (
    is_native,
    is_own_universal,
    open_native,
    open_universal,
    write_universal,
)
from megatron_ds.conversion.source import (
    READ_DEFAULTS,
    WRITE_DEFAULTS,
    ReadOptions,
    SourceCheckpoint,
    WriteOptions,
)
from megatron_ds.conversion.trainers.litgpt import open_litgpt
from megatron_ds.conversion.trainers.nanotron import open_nanotron
from megatron_ds.conversion.trainers.write_litgpt import write_litgpt
from megatron_ds.conversion.weights_folder import open_weights_folder, write_weights_folder
from megatron_ds.conversion.weights_locations import is_gguf, is_hf, is_weights_folder

Warn = Callable[[str], None]
AUTO = "auto"
"""Instead of a name: the format is recognized."""


@dataclass(frozen=True)
class Format:
    """A format of checkpoints."""

    name: str
    matches: Callable[[Path], bool]
    """Whether a folder has it."""
    open: Callable[[Path, ReadOptions], SourceCheckpoint]
    """Opens the checkpoint of a folder; padding of its vocabulary is not yet removed."""
    verify: Callable[[Path, Callable[[Path], SourceCheckpoint]], list[Verification]]
    """Finds all damage in a folder; its checkpoints are opened by the second argument."""
    write: Callable[[SourceCheckpoint, Path, WriteOptions, OnTensor], None] | None = None
    """Writes a new folder, complete or not at all. None: another one of its name does."""


def _is_of(name: str) -> Callable[[Path], bool]:
    """Gives a function that returns whether a folder has a checkpoint of another trainer."""

    def matches(path: Path) -> bool:
        checkpoint = detect_trainer(path)
        return checkpoint is not None and checkpoint.name == name

    return matches


def _is_neox(path: Path) -> bool:
    """Whether a folder has a checkpoint of gpt-neox; its folders have the names of native ones."""
    return detect_trainer(path, "neox") is not None


# Formats of torch's distributed checkpoints, whose library takes a second to import.


def _open_torchtitan(path: Path, options: ReadOptions) -> SourceCheckpoint:
    from megatron_ds.conversion.trainers.torchtitan import open_torchtitan

    return open_torchtitan(path, options)


def _open_olmo_core(path: Path, options: ReadOptions) -> SourceCheckpoint:
    from megatron_ds.conversion.trainers.olmo_core import open_olmo_core

    return open_olmo_core(path, options)


def _open_megatron(path: Path, options: ReadOptions) -> SourceCheckpoint:
    from megatron_ds.conversion.megatron.open import open_megatron

    return open_megatron(path, options)


def _open_neox(path: Path, options: ReadOptions) -> SourceCheckpoint:
    from megatron_ds.conversion.trainers.neox import open_neox

    return open_neox(path, options)


def _write_torchtitan(
    source: SourceCheckpoint, folder: Path, options: WriteOptions, on_tensor: OnTensor
) -> None:
    from megatron_ds.conversion.trainers.write_distributed import write_torchtitan

    write_torchtitan(source, folder, options, on_tensor)


def _write_olmo_core(
    source: SourceCheckpoint, folder: Path, options: WriteOptions, on_tensor: OnTensor
) -> None:
    from megatron_ds.conversion.trainers.write_distributed import write_olmo_core

    write_olmo_core(source, folder, options, on_tensor)


def _write_torch_dist(
    source: SourceCheckpoint, folder: Path, options: WriteOptions, on_tensor: OnTensor
) -> None:
    from megatron_ds.conversion.megatron.write_torch_dist import write_torch_dist

    write_torch_dist(source, folder, options, on_tensor)


FORMATS = (
    # Some have a file that is a mark of torch_dist.
    Format("torchtitan", _is_of("torchtitan"), _open_torchtitan, verify_tensors, _write_torchtitan),
    Format("olmo_core", _is_of("olmo_core"), _open_olmo_core, verify_tensors, _write_olmo_core),
    Format("nanotron", _is_of("nanotron"), open_nanotron, verify_tensors),
    Format("litgpt", _is_of("litgpt"), open_litgpt, verify_tensors, write_litgpt),
    Format("neox", _is_neox, _open_neox, verify_tensors),
    # Megatron-DeepSpeed's folders have the names of native ones.
    Format("megatron", has_kind(LEGACY, DEEPSPEED), _open_megatron, verify_tensors, write_megatron),
    Format("torch_dist", has_kind(TORCH_DIST), _open_megatron, verify_tensors, _write_torch_dist),
    Format("universal", is_own_universal, open_universal, verify_save_folder, write_universal),
    Format("universal", has_kind(UNIVERSAL), _open_megatron, verify_tensors),
    Format("native", is_native, open_native, verify_save_folder),
    Format("native", is_weights_folder, open_weights_folder, verify_manifest, write_weights_folder),
    Format("hf", is_hf, open_hf, verify_tensors, write_hf),
    Format("gguf", is_gguf, open_gguf, verify_tensors, write_gguf),
)
"""Formats in the order in which they are tried. A folder of weights may have become the --save
folder of a training, whose checkpoints are then the newer ones."""


def recognize(path: Path, name: str = AUTO) -> Format:
    """The format of a folder.

    Args:
        path: The folder.
        name: Name of the format; "auto" recognizes it. If the folder has another one, the error of
            `Format.open` names what is missing.

    Raises:
        UserError: If it is none of the known ones, or of a program whose checkpoints are not read.
    """
    if (problem := find_foreign(path, name=name)) is not None:
        raise UserError(problem)
    possible = [entry for entry in FORMATS if name in (AUTO, entry.name)]
    result = next((entry for entry in possible if entry.matches(path)), None)
    if result is None and name != AUTO:
        result = possible[0]
    if result is None:
        raise user_error("weights-format-unknown", path=path, known=", ".join(NAMES))
    return result


def open_source(
    path: Path, name: str = AUTO, options: ReadOptions = READ_DEFAULTS
) -> SourceCheckpoint:
    """Opens the checkpoint in a folder, without padding of the vocabulary; prints its notes.

    Raises:
        UserError: If the folder has another format, is damaged, or has parts that the model lacks.
    """
    source = recognize(path, name).open(path, options)
    notes = [*source.notes]
    if source.run is not None and source.settings.may_have_padding:
        rows = source.settings.model.vocab_size
        notes.append(Problem("megatron-vocabulary-unknown", path=source.path, rows=rows))
    for note in notes:
        options.warn(f"WARNING: {note.render()}")
    return source if options.optimizer else source.weights()


def write(
    source: SourceCheckpoint,
    folder: Path,
    name: str,
    options: WriteOptions = WRITE_DEFAULTS,
    on_tensor: OnTensor = ignore,
) -> None:
    """Writes a checkpoint in the format of a name to a new folder, complete or not at all.

    Raises:
        UserError: If the format lacks a part of the model, or the folder has files already.
        OSError: If the disk fails.
    """
    writers = [entry.write for entry in FORMATS if entry.name == name and entry.write is not None]
    try:
        writers[0](source, folder, options, on_tensor)
    except UserError:
        source.confirm()  # damage may look like anything else
        raise


def verify(path: Path, name: str = AUTO, warn: Warn = ignore) -> list[Verification]:
    """Verifies a checkpoint, or all checkpoints and the pointers of a --save folder.

    Args:
        path: The folder.
        name: Its format; "auto" recognizes it.
        warn: Called with each warning.

    Returns:
        A result for each checkpoint, the newest first, then for each universal one, and one for
        the pointers.

    Raises:
        UserError: If the folder has no checkpoint.
    """
    options = ReadOptions(warn=warn, optimizer=True, checksums=False)

    def open_described(folder: Path) -> SourceCheckpoint:
        return open_source(folder, name if folder == path else AUTO, options)

    if (path / MANIFEST).is_file() or (path / RUN).is_file():
        return verify_manifest(path, open_described)  # whatever is damaged
    return recognize(path, name).verify(path, open_described)
