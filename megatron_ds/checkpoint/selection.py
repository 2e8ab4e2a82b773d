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
from megatron_ds.config.problems import Problem, UserError, option

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

    @classmethod
    def of(cls, options: CheckpointConfig) -> SelectionPolicy:
        return cls(
            step=options.ckpt_step,
            fallback=options.on_damaged_checkpoint == "fallback",
            required=options.exit_on_missing_checkpoint,
        )


def list_folder(folder: Path) -> CheckpointListing:
    """Lists a --load folder, which need not exist.

    Raises:
        UserError: If this user may not read it.
    """
    if _is_unreadable(folder):
        raise UserError(
            Problem(
                "load-folder-unreadable",
                f"{option('load')} {folder}: cannot be read by this user",
                "load",
            )
        )
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
        warn(
            Problem(
                "checkpoint-pointer-ignored",
                f"{' and '.join(listing.stale)}, but the newest checkpoint is "
                f"{listing.paths[0]}, which is loaded ({option('ckpt_step')} selects another one)",
            )
        )
    damaged = []
    for path in listing.paths:
        damage = find_damage(path)
        if damage is None:
            return read_run(path)
        if not policy.fallback:
            hint = f"; {option('on_damaged_checkpoint')} fallback loads an older one"
            raise UserError(_damaged(path, damage, "on_damaged_checkpoint", hint))
        warn(Problem("checkpoint-skipped", f"skipping the checkpoint {path}: {damage}"))
        damaged.append(f"\n  - {path}: {damage}")
    raise UserError(
        Problem(
            "all-checkpoints-damaged",
            f"{option('load')} {listing.folder}: every checkpoint in it is damaged:"
            f"{''.join(damaged)}\nRepair or restore one, or move them away to start a new run",
            "load",
        )
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
        raise UserError(
            Problem(
                "ckpt-step-missing",
                f"{option('ckpt_step')} {step}: {listing.folder} contains {names}",
                "ckpt_step",
            )
        )
    damage = find_damage(path)
    if damage is not None:
        raise UserError(_damaged(path, damage, "ckpt_step"))
    return read_run(path)


def _raise_if_expected(listing: CheckpointListing, policy: SelectionPolicy) -> None:
    """A new run where a checkpoint is expected would overwrite what was trained."""
    if listing.stale:
        raise UserError(
            Problem(
                "checkpoint-pointer-dangling",
                f"{option('load')} {listing.folder}: {' and '.join(listing.stale)}, but there is "
                f"no global_stepN folder{_megatron_hint(listing.folder)}. Restore it, or remove "
                "the pointer to start a new run",
                "load",
            )
        )
    if policy.required:
        raise UserError(
            Problem(
                "checkpoint-missing",
                f"{option('load')} {listing.folder}: there is no checkpoint (global_stepN folder) "
                "in it",
                "load",
            )
        )


def _damaged(path: Path, damage: Problem, field: str, hint: str = "") -> Problem:
    return Problem(
        "checkpoint-damaged", f"the checkpoint {path} is damaged: {damage}{hint}", "load", field
    )


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
