"""Files that the trainers' own programs wrote, with the tokens and documents that they hold."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megatron_ds.data.foreign_tokens import import_program
from megatron_ds.data.token_files.indexed_dataset import IndexedDataset
from tests.unit.conftest import Run

TOOL = import_program
FOLDERS = {
    "datatrove_eos": (),
    "datatrove_four_bytes": (),
    "datatrove_merged": (),
    "datatrove_shuffled_no_end": (),
    "dolma": (),
    "hf_jsonl_input_ids": (),
    "hf_parquet_input_ids": (),
    "hf_save_to_disk/sd": (),
    "litdata_int32": (),
    "litdata_int64": (),
    "litdata_u16": (),
    "llmc_gpt2": ("--end-token", "4999"),
    "llmc_llama3": ("--end-token", "4999"),
    "mds_bytes_int64_zstd": (),
    "mds_int32_rows": (),
    "mds_ndarray_uint16_rows": (),
    "mds_uint16_documents": (),
    "nanogpt": ("--end-token", "4999"),
    "olmo_core": (),
}
"""Folders, with what the command needs besides the paths."""


@pytest.mark.parametrize("name", FOLDERS)
def test_files_of_the_trainers_own_programs_give_their_tokens(
    name: str, shared_data: Path, tmp_path: Path, run: Run
) -> None:
    """Claim (data): pairs made of files that 12 other programs wrote have the tokens and the
    document ends that these programs read"""
    folder = shared_data / "peer_tokens" / name
    if not folder.is_dir():
        pytest.skip("the folder of token files of other programs is missing")
    vocabulary = 70_000 if name == "datatrove_four_bytes" else 5000
    flags = ("--vocab-size", vocabulary, *FOLDERS[name])
    run("--input", folder, "--output-prefix", tmp_path / "o", *flags)
    (table,) = [path for path in (folder, folder.parent) if (path / "expected.npz").exists()][:1]
    expected = np.load(table / "expected.npz")
    pair = IndexedDataset(str(tmp_path / "o"))
    np.testing.assert_array_equal(pair.tokens[:], expected["tokens"])
    np.testing.assert_array_equal(np.cumsum(pair.lengths), expected["ends"])
    np.testing.assert_array_equal(pair.document_index, np.arange(len(expected["ends"]) + 1))
