"""Staging folders: the local folders that replace the URLs of --save and --load.

A run works on a staging folder of each node. Before it starts, `mirror` downloads what describes
the checkpoints of the store, so that they are selected and compared like the checkpoints of a
folder; `fetch` downloads the files of the selected one. A checkpoint is complete in the store when
it has a manifest, which is written last and removed first. Imports no torch.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from megatron_ds.checkpoint.folders.run_lock import LOCK
from megatron_ds.checkpoint.metadata import (
    MANIFEST,
    POINTER_PENDING,
    POINTERS,
    RUN,
    TOKENIZER,
    list_checkpoints,
    read_manifest,
)
from megatron_ds.config.problems import Problem, user_error
from megatron_ds.fileio.atomic import FileRecord, write_atomically
from megatron_ds.fileio.file_lock import WaitPolicy, locked
from megatron_ds.fileio.node_folder import create_node_folder, default_node_folder
from megatron_ds.fileio.object_store import PARALLEL, ObjectStore
from megatron_ds.launch import environment

METRICS = "metrics.jsonl"
STAGING_LOCK = ".staging.lock"
CHECKPOINT_FOLDER = re.compile(r"(global_step\d+)/(.+)")


def staging_folder(url: str, staging_dir: str | None) -> Path:
    """The folder of this host for the files of a URL, which is created.

    Raises:
        UserError: If it cannot be created, or the default one belongs to another user.
    """
    name = re.sub(r"[^A-Za-z0-9.]+", "-", url).strip("-")[-60:]
    name += f"-{hashlib.sha256(url.rstrip('/').encode()).hexdigest()[:8]}"
    base = default_node_folder()
    if staging_dir is not None:
        base = Path(environment.expand_variables(staging_dir))
    try:
        create_node_folder(base)
        (base / name).mkdir(exist_ok=True)
    except OSError as error:
        raise user_error("staging-folder-unusable", url=url, folder=base, error=error) from error
    return base / name


def mirror(store: ObjectStore, folder: Path, *, everything: bool | None = None) -> None:
    """Brings a staging folder up to date: pointers, and what describes each checkpoint.

    Args:
        store: The store.
        folder: Staging folder.
        everything: Whether to download all files. None: unless the store has checkpoints of this
            program.

    Raises:
        UserError: If the store fails, or the disk does.
    """
    try:
        with locked(folder / STAGING_LOCK, WaitPolicy()):
            sizes = store.sizes()
            if everything is None:
                everything = not has_own_checkpoints(sizes)
            if everything:
                _download_all(store, folder, sizes)
                return
            names = [match for name in sizes if (match := CHECKPOINT_FOLDER.fullmatch(name))]
            complete = {match[1] for match in names if match[2] == MANIFEST}
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


def has_own_checkpoints(names: Collection[str]) -> bool:
    """Whether a store has files that only this program writes: a run's lock, or what describes a
    checkpoint.

    Pointers and folders global_stepN are no sign: Megatron-LM and DeepSpeed write them, too.
    """
    matches = filter(None, map(CHECKPOINT_FOLDER.fullmatch, names))
    return LOCK in names or any(match[2] in (RUN, MANIFEST) for match in matches)


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
    missing = {name: records[name] for name in names if not is_intact(path / name, records[name])}

    def download(name: str) -> int:
        file = path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        lock = file.with_name(f".{file.name}.lock")
        with locked(lock, WaitPolicy()):
            try:
                # Another run on this node may have downloaded it meanwhile, and be reading it.
                if is_intact(file, missing[name]):
                    return 0
                _download(store, f"{path.name}/{name}", file, missing[name].size)
            finally:
                lock.unlink(missing_ok=True)
        return missing[name].size

    with ThreadPoolExecutor(PARALLEL) as pool:
        return sum(pool.map(download, missing))


def is_intact(path: Path, record: FileRecord) -> bool:
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
