"""Locations of --load and --save: URLs get staging folders before anything reads them.

Owns the download of what describes the checkpoints of a store, of complete weights, and of models
of the Hugging Face hub. Imports no torch.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path

from megatron_ds.checkpoint.location import Location, local_location
from megatron_ds.checkpoint.metadata import (
    check_names,
    list_checkpoints,
    read_manifest,
    unreadable_checkpoint,
)
from megatron_ds.checkpoint.selection import list_folder, select_checkpoint
from megatron_ds.checkpoint.store.mirror import (
    STAGING_LOCK,
    fetch,
    find_missing,
    has_own_checkpoints,
    is_intact,
    mirror,
    staging_folder,
)
from megatron_ds.config import CheckpointConfig
from megatron_ds.config.options.checkpoint import (
    FORMATS,
    hub_model,
    is_remote,
    is_url,
    split_location,
)
from megatron_ds.config.problems import Problem, UserError, renaming_fields, user_error
from megatron_ds.conversion.weights_locations import HF_CONFIG
from megatron_ds.fileio.file_lock import WaitPolicy, locked
from megatron_ds.fileio.object_store import ObjectStore
from megatron_ds.tokenizer.base import library_errors
from megatron_ds.tokenizer.huggingface import HUB_FILES


def locate_save(options: CheckpointConfig) -> Location | None:
    """The location of --save. Local: the processes of a host take turns at a staging folder.

    Raises:
        UserError: If its URL cannot be used.
    """
    if options.save is None or not is_url(options.save):
        return local_location(options.save)
    url = options.save.rstrip("/")
    folder = _mirrored("save", url, options.checkpoint_staging_dir, everything=False)
    return Location(folder, url)


def locate_weights(
    field: str, options: CheckpointConfig, mirrored: Location | None = None
) -> Location | None:
    """The location of an option that names checkpoints or weights, as `locate_save`.

    Args:
        field: The option.
        options: Its value, and --checkpoint-staging-dir.
        mirrored: A location that is up to date.

    Raises:
        UserError: If its URL, or the model of the Hub, cannot be used.
    """
    value = getattr(options, field)
    staging_dir = options.checkpoint_staging_dir
    if value is None or not is_remote(value):
        return local_location(value)
    if (model := hub_model(value)) is not None:
        return Location(_download_model(field, model, staging_dir))
    name, url = split_location(value)
    url = url.rstrip("/")
    parent, _, last = url.rpartition("/")
    if last.startswith("global_step"):
        shown = CheckpointConfig(load=url)
        raise user_error("load-is-one-checkpoint", settings=shown, name=last, folder=parent)
    if mirrored is not None and url == mirrored.url:
        return mirrored
    everything = None if name == "auto" else True
    return Location(_mirrored(field, url, staging_dir, everything=everything), url)


def _mirrored(field: str, url: str, staging_dir: str | None, *, everything: bool | None) -> Path:
    """The staging folder of a URL, up to date."""
    folder = staging_folder(url, staging_dir)
    mirror(_reachable(field, url), folder, everything=everything)
    return folder


def download_config(field: str, model: str) -> Path:
    """The folder with the config.json of a model of the Hub.

    Raises:
        UserError: If it cannot be downloaded.
    """
    import huggingface_hub

    with renaming_fields(load=field), library_errors("model-download-failed", name=model):
        return Path(huggingface_hub.hf_hub_download(model, HF_CONFIG)).parent


def _download_model(field: str, model: str, staging_dir: str | None) -> Path:
    """Downloads a model of the Hub to Hugging Face's cache; processes of a host take turns.

    Raises:
        UserError: If this fails.
    """
    import huggingface_hub

    folder = staging_folder(f"hf://{model}", staging_dir)
    with (
        renaming_fields(load=field),
        library_errors("model-download-failed", name=model),
        locked(folder / STAGING_LOCK, WaitPolicy()),
    ):
        for weights in ("*.safetensors", "*.bin"):
            path = huggingface_hub.snapshot_download(
                model, allow_patterns=[*HUB_FILES, weights], ignore_patterns=["*/*"]
            )
            if any(Path(path).glob(weights)):
                break
    return Path(path)


def _reachable(field: str, url: str) -> ObjectStore:
    """The store of a URL, after asking it for its files.

    Raises:
        UserError: If it does not answer, has no such bucket, or rejects the credentials.
    """
    try:
        store = ObjectStore(url)
        store.sizes()
    except UserError as error:
        raise UserError(*(Problem.of(p.code, str(p), field) for p in error.problems)) from error
    except OSError as error:
        raise user_error("store-unusable", field, url=url, error=error) from error
    return store


def staged_location(location: str, staging_dir: str | None, warn: Callable[[str], None]) -> str:
    """Downloads what a tool's --load names unless it is local; returns it with a local folder.

    For a --save URL, downloads the newest undamaged checkpoint. Several processes may call it.

    Args:
        location: Value of --load. A local folder is returned as it is.
        staging_dir: Value of --checkpoint-staging-dir.
        warn: Called with a line for each newer checkpoint that is damaged.

    Raises:
        UserError: If the store cannot be used, or has no undamaged checkpoint.
    """
    if not is_remote(location):
        return location
    if (model := hub_model(location)) is not None:
        return f"hf:{_download_model('load', model, staging_dir)}"
    name, url = split_location(location)
    url = url.rstrip("/")
    parent, _, last = url.rpartition("/")
    store = _reachable("load", url)
    sizes = store.sizes()
    if not sizes:
        raise user_error("weights-format-unknown", path=url, known=", ".join(FORMATS))
    if re.fullmatch(r"global_step\d+", last):
        folder = staging_folder(parent, staging_dir) / last
        folder.mkdir(exist_ok=True)
        mirror(store, folder, everything=True)
    else:
        folder = staging_folder(url, staging_dir)
        mirror(store, folder, everything=None if name == "auto" else True)
        if list_checkpoints(folder) and has_own_checkpoints(sizes):
            with locked(folder / STAGING_LOCK, WaitPolicy()):
                select_checkpoint(
                    list_folder(folder),
                    None,
                    functools.partial(_fetch_and_check, store),
                    lambda problem: warn(f"WARNING: {problem.render()}"),
                )
    return f"{folder}" if name == "auto" else f"{name}:{folder}"


def _fetch_and_check(store: ObjectStore, path: Path) -> Problem | None:
    try:
        damage = find_missing(store, path)
        if damage is None:
            files = read_manifest(path)
            fetch(store, path, files)
            damaged = [name for name in files if not is_intact(path / name, files[name])]
            damage = check_names(path)
            if damaged and damage is None:
                reasons = (
                    f"{file} does not match its checksum in the manifest" for file in damaged
                )
                damage = Problem("checkpoint-files-damaged", damages="; ".join(reasons))
    except UserError as error:
        return error.problems[0]
    except OSError as error:
        return unreadable_checkpoint(error)
    return damage
