"""Staging folders: the local folders that replace the URLs of --save and --load.

A run works on a staging folder of each node. Before it starts, `stage` downloads what describes the
checkpoints of the store, so that they are selected and compared like those of a folder; `fetch`
downloads the files of the selected one. A checkpoint is complete in the store when it has a
manifest, which is written last and removed first. Imports no torch.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from megatron_ds.checkpoint.metadata import (
    MANIFEST,
    POINTER_PENDING,
    POINTERS,
    RUN,
    TOKENIZER,
    find_damage,
    list_checkpoints,
    read_manifest,
    unreadable_checkpoint,
)
from megatron_ds.checkpoint.saved_options import has_checkpoint
from megatron_ds.checkpoint.selection import list_folder, select_checkpoint
from megatron_ds.config import CheckpointConfig, Config
from megatron_ds.config.checkpoint import hub_model, is_remote, is_url, split_location
from megatron_ds.config.problems import Problem, UserError, collect, problems_about, user_error
from megatron_ds.fileio.atomic import FileRecord, write_atomically
from megatron_ds.fileio.file_lock import WaitPolicy, locked
from megatron_ds.fileio.object_store import PARALLEL, ObjectStore
from megatron_ds.launch import environment
from megatron_ds.tokenizer.base import library_errors
from megatron_ds.tokenizer.huggingface import HUB_FILES

METRICS = "metrics.jsonl"
STAGING_LOCK = ".staging.lock"
CHECKPOINT_FOLDER = re.compile(r"(global_step\d+)/(.+)")


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


def staging_folder(url: str, staging_dir: str | None) -> Path:
    """The folder of this host for the files of a URL, which is created.

    Raises:
        UserError: If it cannot be created, or the default one belongs to another user.
    """
    name = re.sub(r"[^A-Za-z0-9.]+", "-", url).strip("-")[-60:]
    name += f"-{hashlib.sha256(url.rstrip('/').encode()).hexdigest()[:8]}"
    base = Path(tempfile.gettempdir()) / f"megatron_ds-{os.getuid()}"
    try:
        if staging_dir is not None:
            base = Path(environment.expand_variables(staging_dir))
            base.mkdir(parents=True, exist_ok=True)
        else:
            base.mkdir(mode=0o700, exist_ok=True)
            found = base.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
                raise PermissionError(f"{base} belongs to another user")
        (base / name).mkdir(exist_ok=True)
    except OSError as error:
        raise user_error("staging-folder-unusable", url=url, folder=base, error=error) from error
    return base / name


def mirror(store: ObjectStore, folder: Path, *, everything: bool | None = None) -> None:
    """Brings a staging folder up to date: pointers, and what describes each checkpoint.

    Args:
        store: The store.
        folder: Staging folder.
        everything: Whether to download all files. None: if the store has no checkpoints of this
            program, but a model of Hugging Face, for example.

    Raises:
        UserError: If the store fails, or the disk does.
    """
    try:
        with locked(folder / STAGING_LOCK, WaitPolicy()):
            sizes = store.sizes()
            names = [found for name in sizes if (found := CHECKPOINT_FOLDER.fullmatch(name))]
            is_ours = bool(names or sizes.keys() & {*POINTERS})
            if everything if everything is not None else not is_ours:
                _download_all(store, folder, sizes)
                return
            complete = {found[1] for found in names if found[2] == MANIFEST}
            for path in list_checkpoints(folder):
                if path.name not in complete:
                    shutil.rmtree(path, ignore_errors=True)
            for name in sorted(complete):
                try:
                    mirror_checkpoint(store, folder / name)
                except FileNotFoundError:  # its run has removed it meanwhile
                    shutil.rmtree(folder / name, ignore_errors=True)
            for pointer in POINTERS:
                if pointer in sizes:
                    write_atomically(folder / pointer, store.read(pointer))
                else:
                    (folder / pointer).unlink(missing_ok=True)
    except OSError as error:
        raise user_error("store-unusable", url=store.url, error=error) from error


def mirror_checkpoint(store: ObjectStore, path: Path) -> None:
    """Downloads what describes a checkpoint: run.json, the tokenizer's files, the manifest.

    Raises:
        OSError: If the store or the disk fails.
    """
    files = [name.removeprefix(f"{path.name}/") for name in store.sizes(path.name)]
    manifest = store.read(f"{path.name}/{MANIFEST}")
    if not (path / MANIFEST).is_file() or (path / MANIFEST).read_bytes() != manifest:
        shutil.rmtree(path, ignore_errors=True)  # another checkpoint of the same iteration
    for name in files:
        is_wanted = name == RUN or name.startswith(f"{TOKENIZER}/")
        if is_wanted and not (path / name).is_file():
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path / name, store.read(f"{path.name}/{name}"))
    path.mkdir(exist_ok=True)
    if POINTER_PENDING in files:
        (path / POINTER_PENDING).touch()
    else:
        (path / POINTER_PENDING).unlink(missing_ok=True)
    write_atomically(path / MANIFEST, manifest)


def _download_all(store: ObjectStore, folder: Path, sizes: Mapping[str, int]) -> None:
    """Downloads every file that is not there with the same size."""
    for name, size in sizes.items():
        path = folder / name
        if not path.is_file() or path.stat().st_size != size:
            path.parent.mkdir(parents=True, exist_ok=True)
            _download(store, name, path, size)


def _download(store: ObjectStore, name: str, path: Path, size: int) -> None:
    """Downloads a file under another name first: a reader of the old one keeps it."""
    partial = path.with_name(f".{path.name}.partial")
    store.download(name, partial, size)
    os.replace(partial, path)


def fetch(store: ObjectStore, path: Path, names: Iterable[str]) -> int:
    """Downloads files of a checkpoint that its staging folder does not have intact.

    Args:
        store: The store.
        path: Staging folder of the checkpoint, with its manifest.
        names: Files of the manifest.

    Returns:
        Bytes that were downloaded. Their contents are not verified.

    Raises:
        UserError: If the manifest is damaged.
        OSError: If the store or the disk fails.
    """
    records = read_manifest(path)
    missing = {name: records[name] for name in names if not _is_intact(path / name, records[name])}

    def download(name: str) -> int:
        file = path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        lock = file.with_name(f".{file.name}.lock")
        with locked(lock, WaitPolicy()):
            try:
                # Another run on this node may have downloaded it meanwhile, and be reading it.
                if _is_intact(file, missing[name]):
                    return 0
                _download(store, f"{path.name}/{name}", file, missing[name].size)
            finally:
                lock.unlink(missing_ok=True)
        return missing[name].size

    with ThreadPoolExecutor(PARALLEL) as pool:
        return sum(pool.map(download, missing))


def _is_intact(path: Path, record: FileRecord) -> bool:
    return path.is_file() and path.stat().st_size == record.size and record.matches(path)


def find_missing(store: ObjectStore, path: Path) -> Problem | None:
    """Compares the names and sizes of a checkpoint in the store with its manifest.

    Raises:
        UserError: If the manifest is damaged.
        OSError: If the store fails.
    """
    sizes = store.sizes(path.name)
    for name, (size, _) in read_manifest(path).items():
        actual = sizes.get(f"{path.name}/{name}")
        if actual is None:
            return Problem("checkpoint-file-missing", name=name)
        if actual != size:
            return Problem("checkpoint-file-size", name=name, actual=actual, expected=size)
    return None


def restore_metrics(store: ObjectStore, folder: Path) -> None:
    """Downloads the metrics of the run that is continued, on the rank that appends to them."""
    try:
        write_atomically(folder / METRICS, store.read(METRICS))
    except FileNotFoundError:
        (folder / METRICS).unlink(missing_ok=True)  # of a run that is no longer in the store


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
            damaged = [name for name in files if not _is_intact(path / name, files[name])]
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
