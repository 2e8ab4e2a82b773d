"""Shared base of saving and restoring the checkpoints of one run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from megatron_ds.checkpoint.files.collective_io import CollectiveIO
from megatron_ds.checkpoint.folders.run_lock import RunLock
from megatron_ds.checkpoint.local.checkpoints import LocalCheckpoints
from megatron_ds.checkpoint.location import RunFolders
from megatron_ds.checkpoint.store.claim import RunStores
from megatron_ds.config import Config
from megatron_ds.config.problems import Problem
from megatron_ds.parallel.mesh import Mesh
from megatron_ds.tokenizer import TokenizerFingerprint


@dataclass(frozen=True)
class StoredTokenizer:
    """The part of its run's tokenizer that a checkpoint keeps."""

    fingerprint: TokenizerFingerprint
    files: Mapping[str, bytes]
    """Contents by path in the copy."""


@dataclass(eq=False)
class RunCheckpoints:
    """The checkpoints of one run."""

    config: Config
    mesh: Mesh
    log: Callable[[str], None]
    """Prints a line on one rank."""
    ranks: CollectiveIO
    """All ranks."""
    lock: RunLock | None = None
    """The lock of --save, on the first rank; None if no other run can use the folder."""
    folders: RunFolders | None = None
    """The locations of --save and --load; None: local folders."""
    tokenizer: StoredTokenizer | None = None
    """The run's tokenizer, compared with a checkpoint's. The first rank stores its files."""
    stores: RunStores = field(default_factory=RunStores)
    """The stores that --save and --load name."""
    local: LocalCheckpoints | None = None
    """The checkpoints of --local-checkpoint-dir."""
    on_saved: Callable[..., object] = lambda iteration, **seconds: None
    """Called for each complete checkpoint with its iteration, the `seconds` that its save took, and
    the seconds that training `waited` for it."""
    newest: Path | None = field(default=None, init=False)
    """The checkpoint that this run has saved or else loaded last."""

    @property
    def _folders(self) -> RunFolders:
        return self.folders or RunFolders.local(self.config.checkpoint)

    def _warn(self, problem: Problem) -> None:
        self.log(f"WARNING: {problem.render()}")
