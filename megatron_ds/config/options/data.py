"""Options of the training data."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator

from megatron_ds.config.checks import file_problems, folder_problems
from megatron_ds.config.fields import (
    Decides,
    InPhase,
    exclusive_problem,
    no_effect_problem,
    option_field,
    when,
)
from megatron_ds.config.problems import Problem, option
from megatron_ds.dataclass import dataclass

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

    DECIDES = Decides.SAMPLES

    data_path: tuple[str, ...] | None = _paths(common=True, in_phase=InPhase.REPLACED)
    """Prefix of a .bin/.idx pair, several prefixes (weighted by their size), or WEIGHT PREFIX
    WEIGHT PREFIX ...; a prefix may be a URL such as s3://BUCKET/PREFIX."""
    split: str | None = option_field(None, metavar="A,B,C", common=True)
    """Proportions of --data-path used for training, validation and test (default: 969,30,1)."""
    split_rounding: str = option_field(
        "megatron-deepspeed", choices=("megatron-deepspeed", "megatron-core")
    )
    """Rule that rounds --split to documents: that of the Megatron-DeepSpeed forks and older
    Megatron-LM, or that of Megatron Core."""
    blend_order: str = option_field("fair", choices=("fair", "megatron", "megatron-deepspeed"))
    """Order of the samples of a blend: fair keeps every file within one sample of its weight;
    megatron is Megatron Core's order, and megatron-deepspeed that of the Megatron-DeepSpeed forks
    and older Megatron-LM."""
    train_data_path: tuple[str, ...] | None = _paths(in_phase=InPhase.REPLACED)
    """Training data, as --data-path."""
    valid_data_path: tuple[str, ...] | None = _paths()
    """Validation data, as --data-path."""
    test_data_path: tuple[str, ...] | None = _paths()
    """Test data, as --data-path."""
    data_args_path: str | None = _file(in_phase=InPhase.REPLACED)
    """File with the values of --data-path, separated by whitespace."""
    per_split_data_args_path: str | None = _file(in_phase=InPhase.REPLACED)
    """JSON file with the keys train, valid and test: the values of --train-, --valid- and
    --test-data-path."""
    train_weighted_split_paths: tuple[str, ...] | None = _groups(in_phase=InPhase.REPLACED)
    """Training data as one group "NAME: WEIGHT START:END PREFIX, ..."; START:END is a range of
    documents as fractions of the file, such as 0:0.95."""
    valid_weighted_split_paths: tuple[str, ...] | None = _groups()
    """Validation data as groups of the same form; each group is evaluated and logged under its
    name."""
    test_weighted_split_paths: tuple[str, ...] | None = _groups()
    """Test data as groups of the same form."""
    train_weighted_split_paths_path: str | None = _file(in_phase=InPhase.REPLACED)
    """File with the values of --train-weighted-split-paths, each group in quotes."""
    valid_weighted_split_paths_path: str | None = _file()
    """File with the values of --valid-weighted-split-paths, each group in quotes."""
    test_weighted_split_paths_path: str | None = _file()
    """File with the values of --test-weighted-split-paths, each group in quotes."""
    dataloader_type: str = option_field("single", choices=("single", "cyclic"))
    """Order of the samples: single shuffles the documents of all epochs and the samples; cyclic
    repeats the samples of the first epoch, shuffled in each epoch."""
    train_data_exact_num_epochs: int | None = option_field(None, minimum=1)
    """Train on so many epochs of the data, from which the length of the run follows."""
    fim_data: bool = option_field(False, decides=Decides.CONTENT)
    """Fill in the middle: move the middle of documents behind their prefix and suffix."""
    fim_rate: float | None = _fim(None, minimum=0, maximum=1, decides=Decides.CONTENT)
    """Probability that a document is transformed (default: 0.5)."""
    fim_spm_rate: float = option_field(
        0.5, minimum=0, maximum=1, only_with=when(fim_data=True), decides=Decides.CONTENT
    )
    """Probability that a transformed document begins with its suffix."""
    fim_split_sample: str | None = _fim_token(None, decides=Decides.CONTENT)
    """Token between the fragments of a document, such as the files of a repository, which are
    transformed separately."""
    fim_fragment_rate: float | None = _fim(None, minimum=0, maximum=1, decides=Decides.CONTENT)
    """Probability that a fragment of a document is transformed."""
    fim_no_prefix: str | None = _fim(None, metavar="TEXT", decides=Decides.CONTENT)
    """Documents and fragments that begin with this text are not transformed."""
    fim_prefix_token: str = _fim_token("<fim_prefix>", decides=Decides.CONTENT)
    """Token before the prefix."""
    fim_suffix_token: str = _fim_token("<fim_suffix>", decides=Decides.CONTENT)
    """Token before the suffix."""
    fim_middle_token: str = _fim_token("<fim_middle>", decides=Decides.CONTENT)
    """Token before the middle."""
    fim_pad_token: str = _fim_token("<fim_pad>", decides=Decides.CONTENT)
    """Token after a sample that has become shorter."""
    fim_eod_token: str | None = _fim_token(None, decides=Decides.CONTENT)
    """Token that ends documents (default: that of the tokenizer)."""
    exclude_documents: str | None = _file()
    """File with documents that are left out of the training data from the start or the resume on:
    FILE:NUMBER or FILE:FIRST-LAST on each line, as tools/data_usage.py names them."""
    mock_data: bool = option_field(False)
    """Train on random tokens instead of token files; the tokenizer gives their range."""
    data_cache_path: str | None = option_field(None, metavar="FOLDER", decides=Decides.LAYOUT)
    """Folder of the index cache (default: index-cache next to the data, or in --save if the data's
    folder is read-only)."""
    object_storage_cache_path: str | None = option_field(
        None, metavar="FOLDER", decides=Decides.LAYOUT
    )
    """Folder of each node for the parts that were read of token files whose prefix is a URL;
    environment variables in it are expanded (default: below the folder for temporary files)."""
    object_storage_cache_gb: float | None = option_field(
        None, above=0, metavar="GB", decides=Decides.LAYOUT
    )
    """Size that this folder may have, in 10^9 bytes (default: 50, or half of the disk's free space
    if that is less)."""
    num_workers: int = option_field(2, minimum=0, decides=Decides.LAYOUT)
    """Number of data loader processes; 0 loads in the training process."""
    mmap_warmup: bool = option_field(False, decides=Decides.LAYOUT)
    """Read the token files at startup to warm up the page cache."""
    reset_position_ids: bool = option_field(
        False,
        only_with=when(position_embedding_type=("learned_absolute", "rope", "yarn")),
        decides=Decides.CONTENT,
    )
    """Reset position ids after each end-of-document token."""
    reset_attention_mask: bool = option_field(False, decides=Decides.CONTENT)
    """Restrict attention to tokens of the same document."""
    document_boundaries: str = option_field(
        "eod",
        choices=("eod", "idx"),
        only_with=when(reset_position_ids=True, reset_attention_mask=True, eod_mask_loss=True),
        decides=Decides.CONTENT,
    )
    """What ends a document for these flags: an end-of-document token, or the .idx file."""
    eod_mask_loss: bool = option_field(False, decides=Decides.CONTENT)
    """Mask the loss at end-of-document tokens of the input."""

    @property
    def boundary_fields(self) -> tuple[str, ...]:
        """The options in effect for which the ends of documents matter."""
        names = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")
        return tuple(name for name in names if getattr(self, name))

    @property
    def needs_eod(self) -> bool:
        """Whether end-of-document tokens are looked for."""
        return bool(self.boundary_fields) and self.document_boundaries == "eod"

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
        is_transformed = has_own_data or self.mock_data or self.fim_data
        if self.boundary_fields and not self.needs_eod and is_transformed:
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
