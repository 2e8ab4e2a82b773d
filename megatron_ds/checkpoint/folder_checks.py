"""Claims the folders of a run before it trains: shared by all ranks, and owned by one run.

A check that needs several ranks runs once the process group exists.
"""

from __future__ import annotations

import functools
import hashlib
import secrets
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from megatron_ds.checkpoint import run_lock
from megatron_ds.checkpoint.collective_io import CollectiveIO
from megatron_ds.checkpoint.location import RunFolders
from megatron_ds.checkpoint.metadata import RUN, list_checkpoints
from megatron_ds.checkpoint.run_lock import RunLock
from megatron_ds.config.problems import user_error
from megatron_ds.fileio.visibility import retry

TOKEN = ".shared-"
"""Prefix of the file by which ranks find out whether they share a folder."""
NAMED_RANKS = 8
"""Ranks that a message names."""


@contextmanager
def claimed_folders(
    folders: RunFolders, ranks: CollectiveIO, log: Callable[[str], None]
) -> Iterator[RunLock | None]:
    """Checks --save and --load, unless they are URLs, and owns --save inside. Collective.

    Args:
        folders: The folders.
        ranks: All ranks.
        log: Prints a line on one rank.

    Yields:
        The lock of --save, on the first rank.

    Raises:
        UserError: If ranks do not share a folder, or another run owns --save.
        OSError: If --save cannot be written.
    """
    lock: RunLock | None = None

    def own(save: Path) -> None:
        nonlocal lock
        try:
            save.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise user_error("save-folder-not-created", folder=save, error=error) from None
        lock = run_lock.acquire(save, log)

    try:
        save, load = folders.save, folders.load
        if save is not None and save.url is None:
            ranks.run_on_rank0(functools.partial(own, save.folder))
            require_shared("save", save.folder, ranks)
        if load is not None and load != save and load.url is None:
            require_shared("load", load.folder, ranks)
        yield lock
    finally:
        if lock is not None:
            lock.release()


class _Token(NamedTuple):
    """A file that the first rank sees."""

    name: str
    """Relative to the folder."""
    digest: str


def require_shared(field: str, folder: Path, ranks: CollectiveIO) -> None:
    """Checks that all ranks see what the first one writes to a folder. Collective.

    In a folder that the first rank may not write to, the newest checkpoint's run.json is compared;
    there is nothing to share in one that does not exist.

    Args:
        field: Option field that names the folder.
        folder: The folder.
        ranks: All ranks.

    Raises:
        UserError: If a rank does not see it, even after a wait; names all such ranks.
        OSError: If --save cannot be written.
    """
    token = ranks.run_on_rank0(lambda: _choose_token(folder, is_owned=field == "save"))
    if token is None:
        return

    def look() -> tuple[str, bool]:
        seen = retry(lambda: _digest(folder / token.name), wanted=token.digest)
        return f"{folder.resolve()} on {socket.gethostname()}", seen == token.digest

    views = ranks.run_on_all(look)
    if token.name.startswith(TOKEN):
        ranks.run_on_rank0(lambda: (folder / token.name).unlink(missing_ok=True))
    missing = [f"rank {n} ({place})" for n, (place, is_shared) in enumerate(views) if not is_shared]
    if missing:
        more = f" and {len(missing) - NAMED_RANKS} more" if len(missing) > NAMED_RANKS else ""
        listed = ", ".join(missing[:NAMED_RANKS]) + more
        raise user_error(
            "folder-not-shared", field, folder=folder, first=views[0][0], missing=listed
        )


def _choose_token(folder: Path, *, is_owned: bool) -> _Token | None:
    """The file that all ranks must see; None if there is nothing to see."""
    if not folder.is_dir():
        return None
    content = secrets.token_hex(16).encode()
    name = f"{TOKEN}{content[:8].decode()}"
    try:
        for old in folder.glob(f"{TOKEN}*") if is_owned else ():  # of a run that was killed
            old.unlink(missing_ok=True)
        (folder / name).write_bytes(content)
    except OSError:
        with suppress(OSError):
            (folder / name).unlink(missing_ok=True)
        if is_owned:
            raise
        for path in list_checkpoints(folder):
            if (digest := _digest(path / RUN)) is not None:
                return _Token(f"{path.name}/{RUN}", digest)
        return None
    return _Token(name, hashlib.sha256(content).hexdigest())


def _digest(path: Path) -> str | None:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return None
