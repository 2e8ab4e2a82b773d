"""Selects the checkpoint that a run resumes from or that a tool loads.

Owns the policy: which folder wins, and what happens if a checkpoint is missing or damaged. How
deeply a checkpoint is checked, and on which ranks, is up to the caller. Imports no torch.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from megatron_ds.checkpoint.lineage import Lineage
from megatron_ds.checkpoint.metadata import (
    POINTER_PENDING,
    RUN,
    Checkpoint,
    DamageCheck,
    iteration_of,
    list_checkpoints,
    lock_for_reading,
    read_pointers,
    read_run,
    run_folder,
)
from megatron_ds.checkpoint.universal.folders import list_universal, universal_iteration
from megatron_ds.config import CheckpointConfig
from megatron_ds.config.problems import Problem, UserError, option, user_error
from megatron_ds.fileio.file_lock import SharedLock


@dataclass(frozen=True)
class CheckpointListing:
    """The contents of a --load folder."""

    folder: Path
    paths: tuple[Path, ...]
    """Folders of checkpoints, newest first."""
    preferred: tuple[Path, ...] = ()
    """The one that the pointers name, after any that were completed since then."""
    stale: tuple[str, ...] = ()
    """Pointer files that do not name the first choice, each with its contents."""
    universal: tuple[Path, ...] = ()
    """Universal checkpoints of this program's runs, the one that the pointer names first."""

    def chosen_universal(self, options: CheckpointConfig) -> Path | None:
        """The universal checkpoint that is loaded instead of others; None if one of them is.

        A run that continues from one saves others, which its next start selects.
        """
        universal = self.universal
        others = (*self.preferred, *self.paths)
        if (step := options.step) is not None:
            universal = tuple(path for path in universal if universal_iteration(path) == step)
            others = tuple(path for path in others if iteration_of(path) == step)
        if not universal or not others:
            return universal[0] if universal else None
        is_older = universal_iteration(universal[0]) < iteration_of(others[0])
        return universal[0] if options.universal_checkpoint and not is_older else None

    def fallbacks(self) -> list[Path]:
        """The other checkpoints: first the branch that the pointer is on, then all others."""
        others = [path for path in self.paths if path not in self.preferred]
        if not self.preferred:
            return others
        pointed = self.preferred[-1]
        with suppress(UserError, OSError):
            branch = read_run(pointed).run.branch
            return sorted(others, key=lambda path: not _continues(pointed, branch, path))
        return sorted(others, key=lambda path: iteration_of(path) > iteration_of(pointed))


def list_folder(folder: Path) -> CheckpointListing:
    """Lists a --load folder, which need not exist.

    Raises:
        UserError: If this user may not read it.
    """
    try:
        with suppress(FileNotFoundError):
            # Path.is_dir() is False for a path below a file, and in Python 3.14 for one without
            # permission: a new run would start.
            os.listdir(f"{folder}/.")
        paths = list_checkpoints(folder)
        pointers = read_pointers(folder)
        pending = [path for path in paths if (path / POINTER_PENDING).is_file()]
        universal = [path for path in list_universal(folder) if (run_folder(path) / RUN).is_file()]
    except OSError as error:
        raise user_error("load-folder-unreadable", folder=folder) from error
    named = [path for text in pointers.values() for path in paths if _names(text, path)][:1]
    preferred = [*pending, *(path for path in named if path not in pending)]
    stale = [
        f"{pointer} names {text[:80]!r}"
        for pointer, text in pointers.items()
        if not any(_names(text, path) for path in named or paths[:1])
    ]
    # After a crash between a checkpoint's completion and its pointers, these lag behind.
    shown = () if pending else tuple(stale)
    return CheckpointListing(folder, tuple(paths), tuple(preferred), shown, tuple(universal))


def _names(text: str, path: Path) -> bool:
    """Whether the text of a pointer means a checkpoint."""
    return text in (path.name, str(iteration_of(path)))


def _continues(path: Path, branch: Lineage, earlier: Path) -> bool:
    """Whether a checkpoint of this branch has come from an earlier one."""
    iteration = iteration_of(earlier)
    if iteration > iteration_of(path):
        return False
    try:
        return read_run(earlier).run.branch == branch.up_to(iteration)
    except (UserError, OSError):
        return False


def select_checkpoint(
    listing: CheckpointListing,
    options: CheckpointConfig | None,
    find_damage: DamageCheck,
    warn: Callable[[Problem], None],
    fallbacks: Callable[[CheckpointListing], list[Path]] = CheckpointListing.fallbacks,
    lock: Callable[[Path], SharedLock | None] = lock_for_reading,
    read: Callable[[Path], Checkpoint] = read_run,
) -> Checkpoint | None:
    """Selects the checkpoint of --ckpt-step, or the one that the pointer names.

    Without a pointer it selects the newest one, and instead of a damaged checkpoint the one before
    it.

    Args:
        listing: The --load folder.
        options: Options of a run. None for a tool, which needs an undamaged checkpoint, and
            whose messages neither advise to start a new run nor name its flags.
        find_damage: Checks a checkpoint. If it is collective, so is this function.
        warn: Called for each damaged checkpoint that is skipped and for stale pointers.
        fallbacks: Gives the order of the other checkpoints. Called if the first choice is damaged.
        lock: Keeps a checkpoint from being removed, from before it is checked.
        read: Reads the record of the selected one.

    Returns:
        The checkpoint, which is not removed until its `read_lock` is released or unused; None if
        the folder has none and does not have to.

    Raises:
        UserError: If there is no such checkpoint.
    """
    is_training = options is not None
    path, field = _named(listing, options)
    options = options or CheckpointConfig(exit_on_missing_checkpoint=True)
    if path is None and not listing.paths:
        if listing.stale or options.exit_on_missing_checkpoint:
            raise _missing(listing, is_training)
        return None
    if path is None and listing.stale:
        stale = " and ".join(listing.stale)
        first = (*listing.preferred, *listing.paths)[0]
        other = option("ckpt_step") if is_training else f"{option('load')} FOLDER/global_stepN"
        warn(Problem("checkpoint-pointer-ignored", stale=stale, first=first, other=other))
    damaged = []
    for candidate in _candidates(listing, fallbacks) if path is None else [path]:
        read_lock = lock(candidate)
        damage = find_damage(candidate)
        if damage is None:
            return dataclasses.replace(read(candidate), read_lock=read_lock)
        if path is not None or options.on_damaged_checkpoint == "error":
            hint = f"; {option(field)} fallback loads an older one" if path is None else ""
            values = {"path": candidate, "damage": damage, "hint": hint}
            raise user_error("checkpoint-damaged", "load", field, **values)
        warn(Problem("checkpoint-skipped", path=candidate, damage=damage))
        damaged.append(f"\n  - {candidate}: {damage}")
    new_run = ", or move them away to start a new run" if is_training else ""
    folder = listing.folder
    listed = "".join(damaged)
    raise user_error("all-checkpoints-damaged", folder=folder, damaged=listed, new_run=new_run)


def _named(listing: CheckpointListing, options: CheckpointConfig | None) -> tuple[Path | None, str]:
    """The checkpoint that the options name, if they do, and the option that decides on damage."""
    if options is not None and (path := listing.chosen_universal(options)) is not None:
        return path, "universal_checkpoint"
    if options is None or options.step is None:
        return None, "on_damaged_checkpoint"
    field = "ckpt_step" if options.load_tag is None else "load_tag"
    path = next((path for path in listing.paths if iteration_of(path) == options.step), None)
    if path is None:
        names = ", ".join(path.name for path in listing.paths) or "no checkpoint"
        values = {"flag": option(field), "step": options.step, "folder": listing.folder}
        raise user_error("ckpt-step-missing", field, **values, names=names)
    return path, field


def _missing(listing: CheckpointListing, is_training: bool) -> UserError:
    """The error of an empty folder: a new run would overwrite what was trained there."""
    if not listing.stale:
        hint = f", and {option('exit_on_missing_checkpoint')} is set" if is_training else ""
        return user_error("checkpoint-missing", folder=listing.folder, hint=hint)
    return user_error(
        "checkpoint-pointer-dangling",
        folder=listing.folder,
        stale=" and ".join(listing.stale),
        megatron_hint=_megatron_hint(listing.folder),
        new_run=", or remove the pointer to start a new run" if is_training else "",
    )


def _candidates(
    listing: CheckpointListing, fallbacks: Callable[[CheckpointListing], list[Path]]
) -> Iterator[Path]:
    yield from listing.preferred
    yield from fallbacks(listing)


def _megatron_hint(folder: Path) -> str:
    others = sorted(path.name for path in folder.glob("iter_*") if path.is_dir())
    if not others:
        return ""
    return f" ({others[-1]} is the folder of a Megatron checkpoint, but has none of its files)"
