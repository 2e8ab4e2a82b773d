"""Facts about a run that saving and restoring share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from megatron_ds.checkpoint.files.collective_io import CollectiveIO
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


@dataclass(frozen=True)
class RunCheckpoints:
    """The run whose checkpoints are saved and restored, and where they are."""

    config: Config
    mesh: Mesh
    log: Callable[[str], None]
    """Prints a line on one rank."""
    ranks: CollectiveIO
    """All ranks."""
    folders: RunFolders
    """The locations of --save and --load."""
    tokenizer: StoredTokenizer | None = None
    """The run's tokenizer, compared with a checkpoint's. The first rank stores its files."""
    stores: RunStores = field(default_factory=RunStores)
    """The stores that --save and --load name."""
    local: LocalCheckpoints | None = None
    """The checkpoints of --local-checkpoint-dir."""

    def warn(self, problem: Problem) -> None:
        """Logs a warning."""
        self.log(f"WARNING: {problem.render()}")
