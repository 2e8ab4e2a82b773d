"""The token files that the data flags name, each opened once.

Knows flags and files; no ranks and no torch.
"""

from __future__ import annotations

from megatron_ds.config import DataConfig
from megatron_ds.data.blend_spec import read_groups
from megatron_ds.data.indexed_dataset import IndexedDataset


class DataFiles:
    """Dataset groups and token files of a run, shared by the checks and the datasets.

    Args:
        config: The data flags.

    Attributes:
        groups: Dataset groups of the flags.
        problems: Problems of the flags and of the files that list groups.
        checked_vocab_size: Vocabulary size against which the token ids of all files were checked.
    """

    def __init__(self, config: DataConfig) -> None:
        self.config = config
        self.groups, self.problems = read_groups(config)
        self.checked_vocab_size: int | None = None
        self._opened: dict[str, IndexedDataset] = {}

    @property
    def prefixes(self) -> list[str]:
        """Prefixes of all token files, without duplicates."""
        sources = (source for group in self.groups for source in group.sources)
        return list(dict.fromkeys(source.prefix for source in sources))

    def open(self, prefix: str) -> IndexedDataset:
        """Opens a token file, or returns it if it is open.

        Raises:
            UserError: If the file is damaged.
        """
        if prefix not in self._opened:
            self._opened[prefix] = IndexedDataset(prefix)
        return self._opened[prefix]
