"""Locations of --load and --save: URLs are replaced by staging folders before anything reads them.

Owns the download of what describes the checkpoints of a store, of complete weights, and of models
of the Hugging Face hub. Imports no torch.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_ds.checkpoint.metadata import (
    find_damage,
    list_checkpoints,
    read_manifest,
    unreadable_checkpoint,
)
from megatron_ds.checkpoint.selection import list_folder, select_checkpoint
from megatron_ds.checkpoint.store.mirror import (
    STAGING_LOCK,
    fetch,
    find_missing,
    is_intact,
    mirror,
    staging_folder,
)
from megatron_ds.checkpoint.store.object_store import ObjectStore
from megatron_ds.config import CheckpointConfig, Config
from megatron_ds.config.checkpoint import hub_model, is_remote, is_url, split_location
from megatron_ds.config.problems import Problem, UserError, collect, problems_about, user_error
from megatron_ds.fileio.file_lock import WaitPolicy, locked
from megatron_ds.loading.options_from_checkpoint import has_checkpoint
from megatron_ds.tokenizer.base import library_errors
from megatron_ds.tokenizer.huggingface import HUB_FILES


def stage(config: Config) -> tuple[Config, list[Problem]]:
    """Replaces the URLs of a configuration by their staging folders.

    Local: every process calls it before the process group exists; those of one host take turns.

    Returns:
        The configuration, and why a URL cannot be used.
    """
    options, problems = config.checkpoint, list[Problem]()
    staging_dir = options.checkpoint_staging_dir
    changes: dict[str, Any] = {}
    if options.save is not None and is_url(options.save):
        save_url = options.save.rstrip("/")
        with collect(problems):
            folder = staging_folder(save_url, staging_dir)
            mirror(_reachable("save", save_url), folder, everything=False)
            changes |= {"save": str(folder), "save_url": save_url}
    if options.load is not None and is_remote(options.load):
        with collect(problems):
            staged, url = _stage_weights("load", options.load, staging_dir, changes.get("save_url"))
            changes |= {"load": staged, "load_url": url}
    options = dataclasses.replace(options, **changes)
    weights = options.pretrained_checkpoint
    if (
        weights is not None
        and is_remote(weights)
        and not problems
        and not has_checkpoint(options.load)
    ):
        with collect(problems):
            staged, url = _stage_weights("pretrained_checkpoint", weights, staging_dir)
            options = dataclasses.replace(options, pretrained_checkpoint=staged, pretrained_url=url)
    return dataclasses.replace(config, checkpoint=options), problems


def _stage_weights(
    field: str, location: str, staging_dir: str | None, staged_url: str | None = None
) -> tuple[str, str | None]:
    """Stages the URL, or the model of the Hub, of a field that names checkpoints or weights.

    Args:
        field: The option.
        location: Its value.
        staging_dir: Value of --checkpoint-staging-dir.
        staged_url: A URL whose staging folder is up to date.

    Returns:
        The value without the URL, and the URL.
    """
    if (model := hub_model(location)) is not None:
        return _download_model(field, model, staging_dir), None
    name, url = split_location(location)
    url = url.rstrip("/")
    if url.rpartition("/")[2].startswith("global_step"):
        raise UserError(_is_one_checkpoint(url))
    folder = staging_folder(url, staging_dir)
    if url != staged_url:
        mirror(_reachable(field, url), folder, everything=None if name == "auto" else True)
    return f"{folder}" if name == "auto" else f"{name}:{folder}", url


def _download_model(field: str, model: str, staging_dir: str | None) -> str:
    """Downloads a model of the Hub to Hugging Face's cache; processes of a host take turns.

    Raises:
        UserError: If this fails.
    """
    import huggingface_hub

    folder = staging_folder(f"hf://{model}", staging_dir)
    with (
        problems_about(load=field),
        library_errors("model-download-failed", name=model),
        locked(folder / STAGING_LOCK, WaitPolicy()),
    ):
        for weights in ("*.safetensors", "*.bin"):
            path = huggingface_hub.snapshot_download(
                model, allow_patterns=[*HUB_FILES, weights], ignore_patterns=["*/*"]
            )
            if any(Path(path).glob(weights)):
                break
    return f"hf:{path}"


def _is_one_checkpoint(url: str) -> Problem:
    folder, _, name = url.rstrip("/").rpartition("/")
    shown = CheckpointConfig(load=url)
    return Problem("load-is-one-checkpoint", settings=shown, name=name, folder=folder)


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

    Of a --save URL, these are the files of the last undamaged checkpoint. Several processes may
    call it.

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
        return _download_model("load", model, staging_dir)
    name, url = split_location(location)
    url = url.rstrip("/")
    parent, _, last = url.rpartition("/")
    store = _reachable("load", url)
    if re.fullmatch(r"global_step\d+", last):
        folder = staging_folder(parent, staging_dir) / last
        folder.mkdir(exist_ok=True)
        mirror(store, folder, everything=True)
    else:
        folder = staging_folder(url, staging_dir)
        mirror(store, folder, everything=None if name == "auto" else True)
        if list_checkpoints(folder):
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
            damage = find_damage(path)
            if damaged and damage is None:
                reasons = (
                    f"{each} does not match its checksum in the manifest" for each in damaged
                )
                damage = Problem("checkpoint-files-damaged", damages="; ".join(reasons))
    except UserError as error:
        return error.problems[0]
    except OSError as error:
        return unreadable_checkpoint(error)
    return damage
