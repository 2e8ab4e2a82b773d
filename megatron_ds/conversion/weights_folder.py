"""The native folder of weights alone: what a training starts from, and the server loads.

FOLDER/model*.safetensors   full tensors by canonical name, without padding, of any layout
FOLDER/weights.json         options of the model, its tokenizer, special ids, parts of fused tensors
FOLDER/tokenizer/           a copy of the tokenizer's files
FOLDER/manifest.json        size and checksum of every other file, as in a checkpoint
"""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Collection, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from megatron_ds.checkpoint.files.local_files import (
    checksum_mismatch,
    files_damaged,
    find_damaged_files,
    json_content,
    write_files,
)
from megatron_ds.checkpoint.folders.output_folder import OnTensor, output_folder
from megatron_ds.checkpoint.metadata import (
    MANIFEST,
    TOKENIZER,
    listed_files,
    manifest_text,
    read_manifest,
)
from megatron_ds.config import ModelConfig, MoEConfig, TokenizerConfig
from megatron_ds.config.fields import with_tuples
from megatron_ds.config.problems import Problem, UserError, ignore, user_error
from megatron_ds.conversion.finite_tensors import finite
from megatron_ds.conversion.model_settings import ModelSettings, malformed_values, read_json_object
from megatron_ds.conversion.published import Publication
from megatron_ds.conversion.safetensors_files import open_safetensors, write_sharded
from megatron_ds.conversion.source import (
    READ_UNVERIFIED,
    WRITE_DEFAULTS,
    ReadOptions,
    SourceCheckpoint,
    WriteOptions,
    check_sizes,
    declared_weights,
    fused_parts,
)
from megatron_ds.conversion.weights_locations import SETTINGS
from megatron_ds.engine.states.state_reader import TensorReader
from megatron_ds.tokenizer.stored_files import read_files, with_copies

FORMAT_VERSION = 1


def open_weights_folder(path: Path, options: ReadOptions = READ_UNVERIFIED) -> SourceCheckpoint:
    """Opens the weights of a folder.

    Raises:
        UserError: If the folder is damaged or of another version.
    """
    if options.checksums and (damage := check_checksums(path, options.pending)) is not None:
        raise UserError(damage)
    confirm = functools.partial(_confirm, path, options.pending)
    try:
        return dataclasses.replace(_open(path), confirm=confirm)
    except UserError:
        confirm()  # damage may look like anything else
        raise


def _confirm(path: Path, pending: Mapping[Path, Future[bool]]) -> None:
    """Raises UserError if a file turns out not to match its checksum."""
    differing = (str(file.relative_to(path)) for file in pending if not pending[file].result())
    damage = files_damaged({name: checksum_mismatch(name) for name in differing})
    if damage is not None:
        raise UserError(damage)


def _open(path: Path) -> SourceCheckpoint:
    values = read_json_object(path / SETTINGS)
    if values.get("format_version") != FORMAT_VERSION:
        version = values.get("format_version")
        age = "another"
        raise user_error("checkpoint-of-other-format", name=SETTINGS, version=version, age=age)
    with malformed_values(path / SETTINGS):
        settings = _settings_of(values, path)
        declared = values.get("parts", {})  # absent from folders of older versions
        parts = {name: tuple(map(str, sections)) for name, sections in declared.items()}
    tensors: dict[str, TensorReader] = {}
    for name in listed_files(path):
        if name.endswith(".safetensors"):
            opened = open_safetensors(path / name).items()
            tensors |= {key: finite(tensor, key, path) for key, tensor in opened}
    check_sizes(settings, tensors, path / SETTINGS)
    return SourceCheckpoint(path, "native", settings, tensors, parts=parts).checked()


def check_checksums(path: Path, pending: Collection[Path] = ()) -> Problem | None:
    """Reads all files and compares them with their checksums.

    Args:
        path: The folder.
        pending: Files that something else compares.
    """
    try:
        files = read_manifest(path).items()
        compared = {name: record for name, record in files if path / name not in pending}
        return files_damaged(find_damaged_files(path, compared))
    except UserError as error:
        return error.problems[0]


def write_weights_folder(
    source: SourceCheckpoint,
    folder: Path,
    options: WriteOptions = WRITE_DEFAULTS,
    on_tensor: OnTensor = ignore,
) -> None:
    """Writes a folder that exists, complete, or not at all.

    Raises:
        UserError: If the folder has files already.
        OSError: If the disk fails.
    """
    settings = source.settings
    with output_folder(folder, source.confirm) as temporary:
        records = write_sharded(
            temporary, source.tensors, shard_bytes=options.shard_bytes, on_tensor=on_tensor
        )
        parts = fused_parts(declared_weights(settings.model, settings.moe))
        values = {"format_version": FORMAT_VERSION, **dataclasses.asdict(settings), "parts": parts}
        contents = {SETTINGS: json_content(values)}
        if (tokenizer := settings.tokenizer_config) is not None:
            files = read_files(tokenizer)
            contents |= {f"{TOKENIZER}/{name}": content for name, content in files.items()}
        records |= write_files(temporary, contents)
        write_files(temporary, {MANIFEST: manifest_text(records).encode()})


def _settings_of(values: Mapping[str, Any], path: Path) -> ModelSettings:
    # Absent from folders of older versions.
    values = {"generation": {}, "published": {}, **values}
    names = [item.name for item in dataclasses.fields(ModelSettings)]
    settings = ModelSettings(**{name: values[name] for name in names})
    for name in ("generation", "published"):
        if not isinstance(content := getattr(settings, name), dict):
            raise TypeError(f"{name} is {content!r}")
    Publication.of(settings)
    if (window := values.get("longest_sequence")) is not None:
        # Older versions had no windows, and limited the length of sequences instead.
        fixed = {**settings.fixed, "window_size": f"{window - 1},0"}
        settings = dataclasses.replace(settings, fixed=fixed)
    tokenizer = dict(settings.tokenizer)
    if tokenizer:
        tokenizer = with_copies(tokenizer, path / TOKENIZER)
    kinds = (ModelConfig, MoEConfig)
    known = {item.name for cls in kinds for item in dataclasses.fields(cls)}
    if unknown := ", ".join(sorted({*settings.fixed, *settings.defaults} - known)):
        raise user_error(
            "checkpoint-of-newer-version",
            path=path / SETTINGS,
            group=ModelConfig.__name__,
            unknown=unknown,
        )
    _check_types(settings)
    groups = ({**group} for group in (settings.fixed, settings.defaults, tokenizer))
    fixed, defaults, tokenizer = map(with_tuples, groups)
    return dataclasses.replace(settings, fixed=fixed, defaults=defaults, tokenizer=tokenizer)


def _check_types(settings: ModelSettings) -> None:
    """Raises TypeError if values are not of the types of their fields."""
    hints = {
        name: hint
        for cls in (ModelConfig, MoEConfig, TokenizerConfig)
        for name, hint in typing.get_type_hints(cls).items()
    }
    hints |= {"model_type": str | None}
    values = {**settings.fixed, **settings.defaults, **settings.tokenizer}
    values["model_type"] = settings.model_type
    for name, value in values.items():
        hint = hints[name]
        choices = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
        # The types of a list's elements are not compared.
        kinds = {typing.get_origin(choice) or choice for choice in choices}
        kinds |= {int} if float in kinds else set()
        value_type = tuple if isinstance(value, list) else type(value)
        if value_type not in kinds:
            raise TypeError(f"{name} is {value!r}")
