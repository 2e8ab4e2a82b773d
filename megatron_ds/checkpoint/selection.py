"""Selects the checkpoint that a run resumes from or that a tool loads.

Owns the policy: which folder wins, and what happens if none is there or one is damaged. How deeply
a checkpoint is checked, and on which ranks, is up to the caller. Imports no torch.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megatron_ds.checkpoint.metadata import (
    CheckpointMetadata,
    iteration_of,
    list_checkpoints,
    read_run,
    stale_pointers,
)
from megatron_ds.config import CheckpointConfig
from megatron_ds.config.problems import Problem, UserError, option, user_error

DamageCheck = Callable[[Path], Problem | None]


@dataclass(frozen=True)
class CheckpointListing:
    """The contents of a --load folder."""

    folder: Path
    paths: tuple[Path, ...]
    """Folders of checkpoints, newest first."""
    stale: tuple[str, ...] = ()
    """Pointer files that do not name the newest one, each with its contents."""


@dataclass(frozen=True)
class SelectionPolicy:
    """Requirements on the checkpoint to load."""

    step: int | None = None
    """Iteration to load; None for the newest."""
    fallback: bool = True
    """Load an older checkpoint if the newest one is damaged."""
    required: bool = True
    """A folder without any checkpoint is an error."""
    training: bool = False
    """Messages may advise to start a new run, and name flags of pretrain_gpt.py."""

    @classmethod
    def of(cls, options: CheckpointConfig) -> SelectionPolicy:
        return cls(
            step=options.ckpt_step,
            fallback=options.on_damaged_checkpoint == "fallback",
            required=options.exit_on_missing_checkpoint,
            training=True,
        )


def list_folder(folder: Path) -> CheckpointListing:
    """Lists a --load folder, which need not exist.

    Raises:
        UserError: If this user may not read it.
    """
    if _is_unreadable(folder):
        raise user_error("load-folder-unreadable", folder=folder)
    paths = list_checkpoints(folder)
    stale = stale_pointers(folder, paths[0] if paths else None)
    return CheckpointListing(folder, tuple(paths), tuple(stale))


def select_checkpoint(
    listing: CheckpointListing,
    policy: SelectionPolicy,
    find_damage: DamageCheck,
    warn: Callable[[Problem], None],
) -> CheckpointMetadata | None:
    """Selects the newest undamaged checkpoint, or the one that the policy names.

    Args:
        listing: The --load folder.
        policy: Requirements on the checkpoint.
        find_damage: Checks a checkpoint. If it is collective, so is this function.
        warn: Called for each damaged checkpoint that is skipped and for stale pointers.

    Returns:
        The checkpoint; None if the folder has none and the policy does not require one.

    Raises:
        UserError: If no checkpoint satisfies the policy.
    """
    if policy.step is not None:
        return _select_step(listing, policy.step, find_damage)
    if not listing.paths:
        _raise_if_expected(listing, policy)
        return None
    if listing.stale:
        stale, newest = " and ".join(listing.stale), listing.paths[0]
        selection = (
            option("ckpt_step") if policy.training else f"{option('load')} FOLDER/global_stepN"
        )
        warn(Problem("checkpoint-pointer-ignored", stale=stale, paths=newest, selection=selection))
    damaged = []
    for path in listing.paths:
        damage = find_damage(path)
        if damage is None:
            return read_run(path)
        if not policy.fallback:
            hint = f"; {option('on_damaged_checkpoint')} fallback loads an older one"
            raise UserError(_damaged(path, damage, "on_damaged_checkpoint", hint))
        warn(Problem("checkpoint-skipped", path=path, damage=damage))
        damaged.append(f"\n  - {path}: {damage}")
    raise user_error(
        "all-checkpoints-damaged",
        folder=listing.folder,
        damaged="".join(damaged),
        new_run=", or move them away to start a new run" if policy.training else "",
    )


def latest_before(folders: list[str | None], iteration: int) -> Path | None:
    """The newest checkpoint before `iteration`, in the first folder that has one."""
    for folder in folders:
        for path in list_checkpoints(Path(folder)) if folder is not None else ():
            if iteration_of(path) < iteration:
                return path
    return None


def _select_step(
    listing: CheckpointListing, step: int, find_damage: DamageCheck
) -> CheckpointMetadata:
    path = next((path for path in listing.paths if iteration_of(path) == step), None)
    if path is None:
        names = ", ".join(path.name for path in listing.paths) or "no checkpoint"
        raise user_error("ckpt-step-missing", step=step, folder=listing.folder, names=names)
    damage = find_damage(path)
    if damage is not None:
        raise UserError(_damaged(path, damage, "ckpt_step"))
    return read_run(path)


def _raise_if_expected(listing: CheckpointListing, policy: SelectionPolicy) -> None:
    """A new run where a checkpoint is expected would overwrite what was trained."""
    if listing.stale:
        raise user_error(
            "checkpoint-pointer-dangling",
            folder=listing.folder,
            stale=" and ".join(listing.stale),
            megatron_hint=_megatron_hint(listing.folder),
            new_run=", or remove the pointer to start a new run" if policy.training else "",
        )
    if policy.required:
        hint = f", and {option('exit_on_missing_checkpoint')} is set" if policy.training else ""
        raise user_error("checkpoint-missing", folder=listing.folder, hint=hint)


def _damaged(path: Path, damage: Problem, field: str, hint: str = "") -> Problem:
    return Problem("checkpoint-damaged", "load", field, path=path, damage=damage, hint=hint)


def _is_unreadable(folder: Path) -> bool:
    """Whether a folder exists, or may exist, and its contents are not accessible."""
    try:
        folder.stat()
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return not os.access(folder, os.R_OK | os.X_OK)


def _megatron_hint(folder: Path) -> str:
    others = sorted(path.name for path in folder.glob("iter_*") if path.is_dir())
    if not others:
        return ""
    return f" ({others[-1]} is a Megatron-LM checkpoint, which cannot be loaded yet)"
