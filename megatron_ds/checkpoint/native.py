"""Checkpoints that are complete or not there: DeepSpeed's files below an atomic rename.

    SAVE/latest                             name of the newest folder
    SAVE/latest_checkpointed_iteration.txt  its iteration
    SAVE/global_stepN/                      appears under this name only when it is whole
        *_states.pt                         DeepSpeed's
        run.json                            state, configuration, layout, how parameters are cut
        manifest.json                       size and SHA-256 of every other file

A save writes below a temporary name, flushes, lists what it wrote in the manifest, renames, and
moves the pointers last; a crash at any moment leaves the older checkpoints as they were. A load
takes the newest folder whose manifest holds. All ranks see the same folder.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_ds.checkpoint.found import (
    FORMAT_VERSION,
    MANIFEST,
    RUN,
    Found,
    candidates,
    layout,
    mismatches,
    order,
    problem_with,
    read_json,
    read_run,
)
from megatron_ds.config import Config
from megatron_ds.engine.base import Engine
from megatron_ds.parallel.mesh import Mesh
from megatron_ds.parallel.sharding import spec_of
from megatron_ds.state import TrainState


class Checkpoints:
    """Saves and restores one run. Every method is collective.

    say: prints a line on one rank.
    """

    def __init__(self, config: Config, mesh: Mesh, say: Callable[[str], None]) -> None:
        self._config = config
        self._mesh = mesh
        self._say = say

    def save(self, engine: Engine, state: TrainState) -> None:
        """Writes SAVE/global_stepN. Raises OSError where the disk does."""
        assert self._config.checkpoint.save is not None
        folder = Path(self._config.checkpoint.save)
        self._say(f"saving checkpoint at iteration {state.iteration:7d} to {folder}")
        tag = f"global_step{state.iteration}"
        temporary = folder / f".incomplete-{tag}"
        first = self._mesh.rank == 0
        if first:
            _remove_leftovers(folder)
            temporary.mkdir(parents=True)
        dist.barrier()
        engine.save(folder, temporary.name)
        if first:
            write_json(temporary / RUN, self._run_facts(engine, state))
        dist.barrier()
        entries = self._share(temporary, _flush_and_describe)
        if first:
            manifest = {"format_version": FORMAT_VERSION, "files": dict(sorted(entries.items()))}
            write_json(temporary / MANIFEST, manifest)
            _put_in_place(temporary, folder / tag)
            write_text(folder / "latest", tag)
            write_text(folder / "latest_checkpointed_iteration.txt", str(state.iteration))
        dist.barrier()
        self._say(f"  successfully saved checkpoint at iteration {state.iteration:7d} to {folder}")

    def load(self, engine: Engine) -> TrainState | None:
        """Restores the newest complete checkpoint of LOAD; None if there is none.

        Raises ValueError if it belongs to another model or layout.
        """
        assert self._config.checkpoint.load is not None
        folder = Path(self._config.checkpoint.load)
        found = self.newest(folder)
        if found is None:
            self._say(f"WARNING: could not find a complete checkpoint in {folder}")
            self._say("    will not load any checkpoints and will start from random")
            return None
        self._say(f" loading checkpoint from {folder} at iteration {found.iteration}")
        problems = mismatches(found, self._config, self._mesh.dp.size)
        if problems:
            lines = "".join(f"\n  - {problem}" for problem in problems)
            raise ValueError(f"the checkpoint {found.path} does not fit this run:{lines}")
        engine.load(folder, found.path.name)
        self._say(f"  successfully loaded checkpoint from {folder} at iteration {found.iteration}")
        return found.state

    def warn_of_newer(self, state: TrainState) -> None:
        """Tells if SAVE holds a complete checkpoint beyond `state`: a later load would take it."""
        assert self._config.checkpoint.save is not None
        folder = Path(self._config.checkpoint.save)
        complete = (read_run(path) for path in candidates(folder) if problem_with(path) is None)
        found = next(complete, None)
        if found is not None and found.iteration > state.iteration:
            self._say(
                f"WARNING: {folder} holds a checkpoint of iteration {found.iteration}, and this "
                f"run starts from iteration {state.iteration}: a later --load would take the "
                "older run's. Move it away, or choose another --save"
            )

    def newest(self, folder: Path) -> Found | None:
        """The newest complete checkpoint, after telling which newer ones are not complete."""
        if self._mesh.rank == 0:
            _put_back(folder)
        names: list[Any] = [[path.name for path in candidates(folder)]]
        dist.broadcast_object_list(names, src=0)
        for name in names[0]:
            path = folder / name
            problem = self._first_of(problem_with(path))
            if problem is None:
                problem = next(iter(self._share(path, _differences).values()), None)
            if problem is None:
                return read_run(path)
            self._say(f"WARNING: skipping the checkpoint {path}: {problem}")
        return None

    def _first_of(self, problem: str | None) -> str | None:
        """The first rank's problem that has one: one may see what another does not."""
        problems: list[Any] = [None] * self._mesh.world_size
        dist.all_gather_object(problems, problem)
        return next((text for text in problems if text), None)

    def _share(
        self, path: Path, work: Callable[[Path, list[str]], dict[str, Any]]
    ) -> dict[str, Any]:
        """Runs `work` over the files below `path`, each file on one rank; gives all results."""
        listed: list[Any] = [[name for name in files_below(path) if name != MANIFEST]]
        dist.broadcast_object_list(listed, src=0)
        mine = listed[0][self._mesh.rank :: self._mesh.world_size]
        results: list[Any] = [None] * self._mesh.world_size
        dist.all_gather_object(results, work(path, mine))
        return {name: value for part in results for name, value in part.items()}

    def _run_facts(self, engine: Engine, state: TrainState) -> dict[str, Any]:
        specs = ((name, spec_of(value)) for name, value in engine.module.named_parameters())
        return {
            "format_version": FORMAT_VERSION,
            "state": state.to_dict(),
            "config": self._config.to_dict(),
            "layout": layout(self._config, self._mesh.dp.size),
            "order": order(self._config, self._mesh.dp.size),
            "shards": {
                name: {"dim": spec.dim, "sections": list(spec.sections)}
                for name, spec in specs
                if spec is not None
            },
        }


def files_below(path: Path) -> list[str]:
    """Names of all files below a folder, relative to it, sorted."""
    return sorted(str(file.relative_to(path)) for file in path.rglob("*") if file.is_file())


def write_json(path: Path, value: Any) -> None:
    """Writes JSON so that it is whole or not there."""
    write_text(path, json.dumps(value, indent=1) + "\n")


def write_text(path: Path, text: str) -> None:
    """Writes a text file so that it is whole or not there."""
    temporary = path.with_name(f".{path.name}.incomplete")
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    _flush(path.parent)


def _flush_and_describe(path: Path, names: list[str]) -> dict[str, Any]:
    entries = {}
    for name in names:
        _flush(path / name)
        entries[name] = {"bytes": (path / name).stat().st_size, "sha256": _sha256(path / name)}
    return entries


def _differences(path: Path, names: list[str]) -> dict[str, Any]:
    """Files whose content is not what the manifest says: name -> words."""
    try:
        files = read_json(path / MANIFEST)["files"]
        return {
            name: f"{name} is damaged (its SHA-256 differs from the manifest's)"
            for name in names
            if name in files and _sha256(path / name) != files[name]["sha256"]
        }
    except OSError as error:  # the other ranks wait for an answer
        return {str(path): f"it cannot be read ({error})"}


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flush(path: Path) -> None:
    """Waits until a file or a folder's entries are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _put_back(folder: Path) -> None:
    """Gives a checkpoint its name again that made way for one whose save did not get there."""
    for path in folder.glob(".replaced-global_step*"):
        target = folder / path.name.removeprefix(".replaced-")
        if not target.exists() and (path / MANIFEST).is_file():
            # Where the folder cannot be written, the checkpoint stays unseen, as it was.
            with suppress(OSError):
                os.rename(path, target)


def _remove_leftovers(folder: Path) -> None:
    """Removes what interrupted saves left under temporary names."""
    _put_back(folder)
    for pattern in (".incomplete-global_step*", ".replaced-global_step*"):
        for path in folder.glob(pattern):
            shutil.rmtree(path, ignore_errors=True)


def _put_in_place(temporary: Path, target: Path) -> None:
    """Renames; an older checkpoint of the same iteration makes way and is removed afterwards."""
    replaced = target.with_name(f".replaced-{target.name}")
    shutil.rmtree(replaced, ignore_errors=True)
    if target.exists():
        os.rename(target, replaced)
    os.rename(temporary, target)
    _flush(target.parent)
    shutil.rmtree(replaced, ignore_errors=True)
