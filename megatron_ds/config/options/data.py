"""Options of the training data."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from dataclasses import dataclass

from megatron_ds.config.checks import file_problems, folder_problems
from megatron_ds.config.fields import exclusive_problem, no_effect_problem, option_field, when
from megatron_ds.config.problems import Problem, option

SPLIT_DATA_FIELDS = ("data_path", "data_args_path")
"""Fields that name data for all dataset splits, divided by --split."""
PER_SPLIT_DATA_FIELDS = {
    split: (
        f"{split}_data_path",
        f"{split}_weighted_split_paths",
        f"{split}_weighted_split_paths_path",
    )
    for split in ("train", "valid", "test")
}
"""Fields that name the data of one dataset split."""
TRAINING_DATA = frozenset(
    (*SPLIT_DATA_FIELDS, "per_split_data_args_path", *PER_SPLIT_DATA_FIELDS["train"])
)
"""Fields that name training data."""

EPOCHS = "train_data_exact_num_epochs"
OF_FILES = "fim_data", EPOCHS, "exclude_documents"
"""Fields that apply to token files only."""

_paths = functools.partial(option_field, None, nargs="*", metavar="PATH")
_groups = functools.partial(option_field, None, nargs="*", metavar="GROUP")
_file = functools.partial(option_field, None, metavar="FILE")
_fim = functools.partial(option_field, only_with=when(fim_data=True))
_fim_token = functools.partial(_fim, metavar="TOKEN")


@dataclass(frozen=True)
class DataConfig:
    """Training data and how it is read."""

    data_path: tuple[str, ...] | None = _paths()
    split: str | None = option_field(None, metavar="A,B,C")
    split_rounding: str = option_field(
        "megatron-deepspeed", choices=("megatron-deepspeed", "megatron-core")
    )
    blend_order: str = option_field("fair", choices=("fair", "megatron", "megatron-deepspeed"))
    train_data_path: tuple[str, ...] | None = _paths()
    valid_data_path: tuple[str, ...] | None = _paths()
    test_data_path: tuple[str, ...] | None = _paths()
    data_args_path: str | None = _file()
    per_split_data_args_path: str | None = _file()
    train_weighted_split_paths: tuple[str, ...] | None = _groups()
    valid_weighted_split_paths: tuple[str, ...] | None = _groups()
    test_weighted_split_paths: tuple[str, ...] | None = _groups()
    train_weighted_split_paths_path: str | None = _file()
    valid_weighted_split_paths_path: str | None = _file()
    test_weighted_split_paths_path: str | None = _file()
    dataloader_type: str = option_field("single", choices=("single", "cyclic"))
    train_data_exact_num_epochs: int | None = option_field(None, minimum=1)
    fim_data: bool = option_field(False)
    fim_rate: float | None = _fim(None, minimum=0, maximum=1)
    fim_spm_rate: float = option_field(0.5, minimum=0, maximum=1, only_with=when(fim_data=True))
    fim_split_sample: str | None = _fim_token(None)
    fim_fragment_rate: float | None = _fim(None, minimum=0, maximum=1)
    fim_no_prefix: str | None = _fim(None, metavar="TEXT")
    fim_prefix_token: str = _fim_token("<fim_prefix>")
    fim_suffix_token: str = _fim_token("<fim_suffix>")
    fim_middle_token: str = _fim_token("<fim_middle>")
    fim_pad_token: str = _fim_token("<fim_pad>")
    fim_eod_token: str | None = _fim_token(None)
    exclude_documents: str | None = _file()
    mock_data: bool = option_field(False)
    data_cache_path: str | None = option_field(None, metavar="FOLDER")
    object_storage_cache_path: str | None = option_field(None, metavar="FOLDER")
    object_storage_cache_gb: float | None = option_field(None, above=0, metavar="GB")
    num_workers: int = option_field(2, minimum=0)
    mmap_warmup: bool = option_field(False)
    reset_position_ids: bool = option_field(
        False, only_with=when(position_embedding_type=("learned_absolute", "rope", "yarn"))
    )
    reset_attention_mask: bool = option_field(False)
    document_boundaries: str = option_field(
        "eod",
        choices=("eod", "idx"),
        only_with=when(reset_position_ids=True, reset_attention_mask=True, eod_mask_loss=True),
    )
    eod_mask_loss: bool = option_field(False)

    @property
    def marks_ends(self) -> bool:
        """Whether the last token of each document is marked in the samples."""
        masks = self.reset_position_ids or self.reset_attention_mask or self.eod_mask_loss
        return self.document_boundaries == "idx" and masks

    @property
    def is_cyclic(self) -> bool:
        """Whether every epoch has the same samples."""
        return self.dataloader_type == "cyclic"

    def problems(self, *, has_own_data: bool = False, is_read: bool = True) -> Iterator[Problem]:
        """Check that the data of each split is given once.

        Args:
            has_own_data: The program brings the dataset instead.
            is_read: The run needs data.
        """
        shared = [name for name in SPLIT_DATA_FIELDS if getattr(self, name)]
        by_split = {
            split: [name for name in names if getattr(self, name)]
            for split, names in PER_SPLIT_DATA_FIELDS.items()
        }
        separate = [name for names in by_split.values() for name in names]
        listed = [] if self.per_split_data_args_path is None else ["per_split_data_args_path"]
        if shared and (separate or listed):
            yield exclusive_problem(
                *shared,
                *separate,
                *listed,
                reason="give the data of all splits together, or of each split separately",
            )
        elif listed and separate:
            yield exclusive_problem(*listed, *separate)
        for names in (shared, *by_split.values()):
            if len(names) > 1:
                yield exclusive_problem(*names)
        named = [*shared, *listed, *separate]
        if self.marks_ends and (has_own_data or self.mock_data or self.fim_data):
            yield Problem("boundaries-without-files", "document_boundaries")
        if has_own_data:
            others = [name for name in ("mock_data", *OF_FILES) if getattr(self, name)]
            yield from (Problem("data-replaced", name) for name in named + others)
        elif self.mock_data:
            named += [name for name in OF_FILES if getattr(self, name)]
            if named:
                yield exclusive_problem("mock_data", *named)
        elif is_read and not shared and not listed and not by_split["train"]:
            yield Problem("training-data-required")
        if self.fim_rate and not self.fim_data:
            yield Problem("fim-rate-without-data")
        if self.fim_data and self.fim_split_sample and self.fim_fragment_rate is None:
            yield Problem("fim-fragments-without-rate")
        if getattr(self, EPOCHS) and self.blend_order != "fair":
            reason = "only the fair order reads all files to their ends at the same time"
            yield exclusive_problem(EPOCHS, "blend_order", reason=reason)
        if getattr(self, EPOCHS) and self.exclude_documents:
            reason = "the data without some documents has fewer samples"
            yield exclusive_problem(EPOCHS, "exclude_documents", reason=reason)
        if self.exclude_documents is not None:
            yield from file_problems("exclude_documents", self.exclude_documents)
        if self.split is not None and by_split["train"] and not by_split["valid"]:
            yield Problem("split-without-shared-data")
        if self.data_cache_path is not None and not os.path.isdir(self.data_cache_path):
            yield from folder_problems("data_cache_path", self.data_cache_path)

    def warnings(self) -> Iterator[Problem]:
        if self.split is not None and not any(getattr(self, name) for name in SPLIT_DATA_FIELDS):
            yield no_effect_problem("split", reason=f"without {option('data_path')}")
