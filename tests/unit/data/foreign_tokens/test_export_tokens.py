"""The command line of tools/export_tokens.py."""

from __future__ import annotations

import gzip
import os
from pathlib import Path

import numpy as np
import pytest

from megatron_ds.data.foreign_tokens import export_program, exporting, import_program
from tests import foreign_tokens as foreign
from tests.foreign_tokens import DOCUMENTS, END, TOKENS
from tests.problems import printed_codes
from tests.token_files import write_pair
from tests.unit.conftest import Run

TOOL = export_program
FORMATS = {
    "nanogpt": ("a.bin", ("--end-token", END)),
    "llm.c": ("a.bin", ("--end-token", END)),
    "olmo": ("a.npy", ()),
    "numpy": ("a.npy", ("--end-token", END)),
    "parquet": ("a.parquet", ()),
}
"""File, and what importing it needs."""
PEERS = {
    "nanogpt": ("nanogpt", "nanogpt_train.bin", ("--end-token", "4999"), ()),
    "llmc_gpt2": ("llm.c", "llmc_gpt2.bin", ("--end-token", "4999"), ()),
    "llmc_llama3": ("llm.c", "llmc_llama3.bin", ("--end-token", "4999"), ()),
    "olmo_core": ("olmo", "a.npy", (), ()),
}


@pytest.mark.parametrize("dtype", ["uint16", "int32"])
@pytest.mark.parametrize("blocks", [1 << 22, 4])
@pytest.mark.parametrize("format", FORMATS)
def test_an_export_is_imported_to_the_same_pair(
    format: str,
    blocks: int,
    dtype: str,
    tmp_path: Path,
    run: Run,
    run_tool: Run,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Claim (data): a pair that tools/export_tokens.py writes as files of nanoGPT, llm.c, OLMo,
    NumPy or parquet is imported again to the same bytes"""
    for name in ("BLOCK_BYTES", "BLOCK_DOCUMENTS", "ROW_GROUP_TOKENS"):
        monkeypatch.setattr(exporting, name, blocks)
    is_before = format == "llm.c"
    documents = [[END, *one[:-1]] if is_before else one for one in DOCUMENTS]
    pair = write_pair(tmp_path / "pair", documents, dtype)
    file, flags = FORMATS[format]
    run("--input", pair, "--output", tmp_path / file, "--format", format)
    size = ("--vocab-size", 70_000 if dtype == "int32" else 400)
    arguments = ("--input", tmp_path / file, "--output-prefix", tmp_path / "back", *flags, *size)
    run_tool(import_program, *arguments)
    for suffix in (".bin", ".idx"):
        assert Path(f"{tmp_path / 'back'}{suffix}").read_bytes() == Path(pair + suffix).read_bytes()


@pytest.mark.parametrize("name", PEERS)
def test_exports_are_the_files_of_the_trainers_own_programs(
    name: str, shared_data: Path, tmp_path: Path, run: Run, run_tool: Run
) -> None:
    """Claim (data): exports of the pairs made of the files of nanoGPT, llm.c and OLMo-core are
    these files, byte by byte"""
    format, file, flags, more = PEERS[name]
    path = shared_data / "peer_tokens" / name / file
    if not path.is_file():
        pytest.skip("the folder of token files of other programs is missing")
    run_tool(import_program, "--input", path, "--output-prefix", tmp_path / "p", *flags)
    run("--input", tmp_path / "p", "--output", tmp_path / file, "--format", format, *more)
    assert (tmp_path / file).read_bytes() == path.read_bytes()
    if format == "olmo":
        ends = path.with_name("a.csv.gz").read_bytes()
        assert gzip.decompress((tmp_path / "a.csv.gz").read_bytes()) == gzip.decompress(ends)


def test_formats_are_those_of_their_programs(tmp_path: Path, run: Run) -> None:
    pair = write_pair(tmp_path / "pair", DOCUMENTS)
    run("--input", pair, "--output", tmp_path / "a.bin")
    assert (tmp_path / "a.bin").read_bytes() == foreign.numbers(TOKENS)
    run("--input", pair, "--output", tmp_path / "n.npy", "--format", "numpy")
    assert np.load(tmp_path / "n.npy").tolist() == TOKENS
    flags = ("--input", pair, "--output", tmp_path / "o.npy", "--format", "olmo")
    run(*flags, "--token-type", "uint32")
    assert (tmp_path / "o.npy").read_bytes() == foreign.numbers(TOKENS, "uint32")
    assert gzip.decompress((tmp_path / "o.csv.gz").read_bytes()) == b"0,4\n4,6\n6,13\n13,16\n"


def test_lost_boundaries_are_a_warning(tmp_path: Path, run: Run) -> None:
    pair = write_pair(tmp_path / "pair", [[1, 2, 3], [4, 5]])
    printed = run("--input", pair, "--output", tmp_path / "a.bin")
    assert printed_codes(printed.err) == ["export-loses-documents"]
    printed = run("--input", pair, "--output", tmp_path / "a.parquet")
    assert printed_codes(printed.err) == []


def test_what_cannot_be_written_leaves_nothing(tmp_path: Path, run: Run) -> None:
    pair = write_pair(tmp_path / "pair", [[1, 70_000, 3]], "int32")
    before = sorted(os.listdir(tmp_path))
    for format in ("nanogpt", "olmo"):
        more = ("--token-type", "uint16") if format == "olmo" else ()
        flags = ("--input", pair, "--output", tmp_path / "a.npy", "--format", format, *more)
        error = run(*flags, status=1).err
        assert "export-id-too-high" in printed_codes(error)
        assert "token 1 is 70000" in error
        assert sorted(os.listdir(tmp_path)) == before
    (tmp_path / "a.parquet").write_text("mine")
    flags = ("--input", pair, "--output", tmp_path / "a.parquet")
    assert printed_codes(run(*flags, status=1).err) == ["export-exists"]
    assert (tmp_path / "a.parquet").read_text() == "mine"
    run(*flags, "--overwrite")
    unknown = ("--input", pair, "--output", tmp_path / "a.npy")
    assert printed_codes(run(*unknown, status=2).err) == ["export-format-unknown"]
    typed = (*flags, "--token-type", "uint16")
    assert printed_codes(run(*typed, status=2).err) == ["export-type-unknown"]
