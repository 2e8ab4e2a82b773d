"""Saves and restores complete checkpoints."""

from megatron_ds.checkpoint.restoring import Restoring
from megatron_ds.checkpoint.saving import Saving


class CheckpointManager(Saving, Restoring):
    """Saves and restores one run. Methods are collective unless noted otherwise."""
