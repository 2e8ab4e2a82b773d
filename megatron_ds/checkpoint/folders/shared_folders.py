"""The question of a roll call whether all hosts see the folders of --save and --load.

Imports no torch.
"""

from __future__ import annotations

import functools
import hashlib
import secrets
import socket
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from megatron_ds.checkpoint.location import RunFolders
from megatron_ds.checkpoint.metadata import RUN, list_checkpoints
from megatron_ds.config.checks import shortened
from megatron_ds.config.problems import Problem
from megatron_ds.fileio.probe_files import write_probe
from megatron_ds.fileio.visibility import retry

TOKEN = ".shared-"
"""Prefix of the file by which hosts find out whether they share a folder."""
NAMED_HOSTS = 8
"""Hosts that a message names."""


class SharedFolders:
    """Asks every host for what the first rank writes to the folders, or finds in them.

    In a folder that the first rank may not write to, the newest checkpoint's run.json is compared.
    A --save that does not exist is created for the question; there is nothing to share in a --load
    that does not. Folders named by URLs are not asked about.

    Args:
        folders: Folders of the run, as this rank knows them.
    """

    def __init__(self, folders: RunFolders) -> None:
        self._folders = {
            field: location.folder
            for field, location in (("save", folders.save), ("load", folders.load))
            if location is not None and location.url is None
        }
        self._created: list[Path] = []

    def ask(self) -> dict[str, tuple[str, str]]:
        """Returns the name of a file in each folder and its digest, by option field."""
        question = {}
        for field, folder in self._folders.items():
            if field == "load" and folder == self._folders.get("save"):
                continue
            with suppress(OSError):  # the run reports it when it claims the folder
                if field == "save":
                    self._create(folder)
                if (token := _choose_token(folder)) is not None:
                    question[field] = token
        return question

    def answer(self, question: Mapping[str, tuple[str, str]]) -> dict[str, tuple[str, bool]]:
        """Returns the folder on this host, and whether it has the file of `question`, by option
        field."""
        views = {}
        for field, (name, digest) in question.items():
            if (folder := self._folders.get(field)) is not None:
                look = functools.partial(_digest, folder / name)
                views[field] = str(folder.resolve()), retry(look, wanted=digest) == digest
        return views

    def find_problems(
        self,
        question: Mapping[str, tuple[str, str]],
        answers: Mapping[str, Mapping[str, tuple[str, bool]]],
    ) -> list[Problem]:
        """Returns the folders that are not shared between hosts, and deletes the probe files."""
        problems = []
        for field, (name, _) in question.items():
            if Path(name).name.startswith(TOKEN):
                with suppress(OSError):
                    (self._folders[field] / name).unlink()
            missing = [
                f"{host} ({view[field][0]})"
                for host, view in answers.items()
                if field in view and not view[field][1]
            ]
            if missing:
                first = f"{self._folders[field].resolve()} on {socket.gethostname()}"
                problems.append(
                    Problem(
                        "folder-not-shared",
                        field,
                        folder=self._folders[field],
                        first=first,
                        missing=shortened(missing, NAMED_HOSTS),
                    )
                )
        for folder in self._created:
            with suppress(OSError):
                folder.rmdir()
        return problems

    def _create(self, folder: Path) -> None:
        absent = [path for path in (folder, *folder.parents) if not path.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        self._created = absent


def _choose_token(folder: Path) -> tuple[str, str] | None:
    """A file that all hosts must see, and its digest; None if there is nothing to see."""
    if not folder.is_dir():
        return None
    content = secrets.token_hex(16).encode()
    name = f"{TOKEN}{content[:8].decode()}"
    try:
        write_probe(folder / name, TOKEN, content)
    except OSError:
        with suppress(OSError):
            (folder / name).unlink(missing_ok=True)
        for path in list_checkpoints(folder):
            if (digest := _digest(path / RUN)) is not None:
                return f"{path.name}/{RUN}", digest
        return None
    return name, hashlib.sha256(content).hexdigest()


def _digest(path: Path) -> str | None:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return None
