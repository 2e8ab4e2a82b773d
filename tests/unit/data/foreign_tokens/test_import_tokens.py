"""The command line of tools/import_tokens.py: every format, bad input, restarts.

Claim (data): tools/import_tokens.py makes a pair .bin and .idx of files of nanoGPT, llm.c,
modded-nanogpt, OLMo-core, dolma, datatrove, streaming (MDS), litdata, datasets, and of parquet,
Arrow, NumPy and JSON lines with ids, with their documents
"""

from __future__ import annotations

import functools
import itertools
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pyarrow import parquet

from megatron_ds.data.foreign_tokens import foreign_file, import_program
from megatron_ds.data.token_files.indexed_dataset import IndexedDataset
from megatron_ds.data.token_files.missing_pair import other_format_problems
from tests import foreign_tokens as foreign
from tests.foreign_tokens import DOCUMENTS, END, ENDS, TOKENS
from tests.import_graph import REPOSITORY
from tests.problems import printed_codes
from tests.unit.conftest import Run

TOOL = import_program
BY_TOKEN = ("--end-token", END)
FORMATS: dict[str, tuple[foreign.Write, tuple[Any, ...]]] = {
    "nanogpt": (foreign.nanogpt, BY_TOKEN),
    "olmo": (foreign.olmo, ()),
    "olmo, one byte": (functools.partial(foreign.olmo, dtype="uint16"), ()),
    "dolma": (foreign.dolma, ()),
    "datatrove": (foreign.datatrove, ()),
    "datatrove, four bytes": (functools.partial(foreign.datatrove, dtype="uint32"), ()),
    "mds, type in the index": (foreign.mds, ()),
    "mds, type in the sample": (functools.partial(foreign.mds, encoding="ndarray"), ()),
    "mds, bytes": (functools.partial(foreign.mds, encoding="bytes"), ()),
    "mds, rows": (foreign.mds_rows, ()),
    "litdata int32": (foreign.litdata, ()),
    "litdata uint16": (functools.partial(foreign.litdata, dtype="uint16", code=20), ()),
    "litdata int64": (functools.partial(foreign.litdata, dtype="int64", code=18), ()),
    "litdata, compressed": (functools.partial(foreign.litdata, compression="zstd"), ()),
    "parquet": (foreign.parquet_file, ()),
    "arrow": (foreign.arrow, ()),
    "saved dataset": (foreign.saved, ()),
    "json lines": (foreign.json_lines, ()),
} | {
    f"mds, {codec}": (functools.partial(foreign.mds, compression=codec), ())
    for codec in ("zstd:7", "gz", "bz2", "br", "snappy")
}
ROWS = [TOKENS[at : at + 4] for at in range(0, len(TOKENS), 4)]


def documents(prefix: Path) -> list[list[int]]:
    pair = IndexedDataset(str(prefix))
    starts = np.concatenate([[0], np.cumsum(pair.lengths)])[pair.document_index]
    return [pair.tokens[begin:end].tolist() for begin, end in itertools.pairwise(starts)]


@pytest.mark.parametrize("blocks", [foreign_file.BLOCK_BYTES, 16])
@pytest.mark.parametrize("name", FORMATS)
def test_every_format_gives_its_documents(
    name: str, blocks: int, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in blocks of a few tokens, across which documents go on."""
    for module in ("numbers", "mds", "litdata"):
        path = f"megatron_ds.data.foreign_tokens.readers.{module}.BLOCK_BYTES"
        monkeypatch.setattr(path, blocks)
    write, flags = FORMATS[name]
    run("--input", write(tmp_path / "in"), "--output-prefix", tmp_path / "out", *flags)
    assert documents(tmp_path / "out") == (ROWS if "rows" in name else DOCUMENTS)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "in",
        "out.bin",
        "out.idx",
        "out.progress.json",
    ]


@pytest.mark.parametrize("write", [foreign.llm_c, foreign.llm_c_wide])
def test_llm_c_has_the_end_token_in_front_of_documents(
    write: foreign.Write, tmp_path: Path, run: Run
) -> None:
    out = tmp_path / "out"
    path = write(tmp_path / "in")
    run("--input", path, "--output-prefix", out, *BY_TOKEN)
    assert documents(out) == [[END, *document[:-1]] for document in DOCUMENTS]
    after = ("--end-token-position", "after", "--keep-truncated-document")
    run("--input", path, "--output-prefix", out, *BY_TOKEN, *after, "--overwrite")
    assert documents(out)[0] == [END]


def test_documents_of_llm_c_go_on_in_the_next_file(tmp_path: Path, run: Run) -> None:
    ids = foreign.before()
    folder = tmp_path / "in"
    foreign.llm_c(folder, "fineweb_train_000001.bin", ids[:9])
    foreign.llm_c(folder, "fineweb_train_000002.bin", ids[9:])
    out = tmp_path / "out"
    run("--input", folder, "--output-prefix", out, *BY_TOKEN)
    assert documents(out) == [[END, *document[:-1]] for document in DOCUMENTS]
    second = folder / "fineweb_train_000002.bin"
    printed = run("--input", second, "--output-prefix", out, *BY_TOKEN, "--overwrite")
    assert printed_codes(printed.err) == ["foreign-begins-inside"]
    assert documents(out)[0] == ids[9:13]


@pytest.mark.parametrize("name", [name for name in FORMATS if "bytes)" not in name])
def test_data_path_names_the_command_that_imports(name: str, tmp_path: Path, run: Run) -> None:
    """Claim (data): the command that `--data-path` names for files or a folder of another trainer
    imports them, with the id of the end token where their format needs it"""
    write, _ = FORMATS[name]
    path = write(tmp_path / "in")
    files = sorted(one for one in (tmp_path / "in").iterdir())
    for prefix in (tmp_path / "in", path, files[-1]):
        (problem,) = other_format_problems(str(prefix))
        match = re.search(r"python tools/import_tokens.py (.*?)(,|$)", str(problem))
        assert match is not None, problem
        words = [str(END) if word == "ID" else word for word in shlex.split(match[1])]
        run(*words, "--overwrite")
        assert documents(Path(words[3])) == (ROWS if "rows" in name else DOCUMENTS)


def test_rows_are_divided_by_the_end_token_if_it_is_given(tmp_path: Path, run: Run) -> None:
    rows = foreign.mds(tmp_path / "in", "ndarray:int32:4", shards=(ROWS[:2], ROWS[2:3]))
    out = tmp_path / "out"
    printed = run("--input", rows, "--output-prefix", out, *BY_TOKEN)
    assert documents(out) == [*DOCUMENTS[:2], TOKENS[6:12]]
    assert printed_codes(printed.err) == ["foreign-tail-kept"]
    assert "samples of the shards are ignored" in printed.out


def test_each_file_may_be_a_document(tmp_path: Path, run: Run) -> None:
    foreign.write(tmp_path / "a.bin", foreign.numbers(TOKENS[:6]))
    foreign.write(tmp_path / "b.bin", foreign.numbers(TOKENS[6:]))
    run("--input", tmp_path, "--output-prefix", tmp_path / "o", "--document-per-file")
    assert documents(tmp_path / "o") == [TOKENS[:6], TOKENS[6:]]


@pytest.mark.parametrize(
    ("names", "is_mixed"),
    [
        ("a_train.bin b_train.bin", False),
        ("my_test_train.bin", False),
        ("0.bin contest.bin", False),
        ("train.bin val.bin", True),
        ("0.bin validation.bin", True),
    ],
)
def test_files_of_several_splits_are_not_mixed(
    names: str, is_mixed: bool, tmp_path: Path, run: Run
) -> None:
    for name in names.split():
        foreign.write(tmp_path / "in" / name, foreign.numbers(TOKENS))
    flags = ("--input", tmp_path / "in", "--output-prefix", tmp_path / "o", *BY_TOKEN)
    printed = run(*flags, status=int(is_mixed)).err
    assert printed_codes(printed) == ["foreign-splits-mixed"] * is_mixed


@pytest.mark.parametrize(
    ("size", "dtype"), [(None, "uint16"), (65_499, "uint16"), (65_500, "int32"), (301, "uint16")]
)
def test_ids_are_stored_as_preprocessing_does(
    size: int | None, dtype: str, tmp_path: Path, run: Run
) -> None:
    flags = () if size is None else ("--vocab-size", size)
    out = tmp_path / "o"
    run("--input", foreign.olmo(tmp_path / "in"), "--output-prefix", out, *flags)
    assert IndexedDataset(str(out)).dtype == np.dtype(dtype)
    assert documents(out) == DOCUMENTS


def test_documents_without_tokens_are_left_out(tmp_path: Path, run: Run) -> None:
    foreign.datatrove(tmp_path)
    (tmp_path / "00000_unshuffled.ds.index").write_bytes(
        np.array([0, 4, 4, *ENDS[1:]], "<u8").tobytes()
    )
    printed = run("--input", tmp_path, "--output-prefix", tmp_path / "o")
    assert documents(tmp_path / "o") == DOCUMENTS
    assert "left out: 2 documents" in printed.out


def test_numpy_arrays_with_a_header_are_read(tmp_path: Path, run: Run) -> None:
    np.save(tmp_path / "a.npy", np.array(TOKENS, np.int64))
    run("--input", tmp_path / "a.npy", "--output-prefix", tmp_path / "o", *BY_TOKEN)
    assert documents(tmp_path / "o") == DOCUMENTS
    np.save(tmp_path / "b.npy", np.array(ROWS, np.uint16))
    run("--input", tmp_path / "b.npy", "--output-prefix", tmp_path / "p")
    assert documents(tmp_path / "p") == ROWS


def test_olmo_without_document_ends_is_read_by_the_vocabulary(tmp_path: Path, run: Run) -> None:
    path = foreign.write(tmp_path / "a.npy", foreign.numbers(TOKENS, "uint32"))
    flags = ("--input", path, "--output-prefix", tmp_path / "o")
    assert printed_codes(run(*flags, status=1).err) == ["foreign-index-missing"]
    assert printed_codes(run(*flags, *BY_TOKEN, status=1).err) == ["foreign-width-unknown"]
    wrong = run(*flags, *BY_TOKEN, "--vocab-size", 1000, status=1).err
    assert printed_codes(wrong) == ["foreign-ids-look-wide"]
    run(*flags, *BY_TOKEN, "--vocab-size", 100_000)
    assert documents(tmp_path / "o") == DOCUMENTS


def importer(folder: Path, flags: Sequence[object], wait: str = "") -> subprocess.Popen[bytes]:
    """A process that imports, which prints a line after its first commit and then waits.

    Args:
        wait: "commit" to wait so; "" to run to the end.
    """
    code = f"""
import sys, time
sys.path.insert(0, {str(REPOSITORY)!r})
from megatron_ds.data.foreign_tokens import import_program, readers
from megatron_ds.data.foreign_tokens.readers import numbers
from megatron_ds.fileio import resumable
numbers.BLOCK_BYTES = 1 << 12
if {wait!r}:
    resumable.COMMIT_SECONDS = 0
    commit = resumable.ResumableOutput.commit
    def commit_and_wait(self, progress, finished=False):
        commit(self, progress, finished)
        self._wait()
        if progress["place"]["file"] == 1 and progress["place"]["position"] > 3000:
            print("committed", flush=True)
            time.sleep(100)
    resumable.ResumableOutput.commit = commit_and_wait
sys.exit(import_program.main(sys.argv[1:]))
"""
    command = [sys.executable, "-c", code, *map(str, flags)]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE)


def test_a_killed_import_is_continued_and_gives_the_same_bytes(tmp_path: Path, run: Run) -> None:
    """Claim (data): an import that is killed is continued by the same command, and ends with the
    bytes of an uninterrupted one"""
    random = np.random.default_rng(1)
    for name in ("a", "b", "c"):
        ids = random.integers(0, 90, 9000).astype("<u2")
        ids[random.integers(0, 9000, 50)] = END
        ids[-1] = END
        foreign.write(tmp_path / "in" / f"{name}.bin", ids.tobytes())
    flags = ["--input", "in", "--output-prefix", "o", *BY_TOKEN]
    process = importer(tmp_path, flags, "commit")
    assert process.stdout is not None
    assert process.stdout.readline() == b"committed\n"
    process.kill()
    process.wait()
    assert not (tmp_path / "o.bin").exists()
    assert (tmp_path / "o.work" / "record.json").exists()
    process = importer(tmp_path, flags)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    inputs = ("--input", tmp_path / "in", "--output-prefix", tmp_path / "p", *BY_TOKEN)
    run(*inputs)
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"o{suffix}").read_bytes() == (tmp_path / f"p{suffix}").read_bytes()
    assert not (tmp_path / "o.work").exists()
    assert "nothing left to do" in run(*inputs).out
    foreign.write(tmp_path / "in" / "d.bin", foreign.numbers(TOKENS))
    changed = run(*inputs, status=2).err
    assert set(printed_codes(changed)) == {"resumed-run-differs", "output-exists"}


@pytest.mark.proof
@pytest.mark.parametrize("write", ["flat", "mds", "parquet"])
def test_memory_is_flat(write: str, disk_folder: Path) -> None:
    """The highest memory of an import of 200 MB is at most 64 MB above that of 2 MB."""
    peaks = []
    for millions in (1, 100):
        folder = disk_folder / str(millions)
        folder.mkdir()
        documents = [[*range(1, 1000), END]] * 1000
        if write == "flat":
            with (folder / "a.bin").open("wb") as file:
                for _ in range(millions):
                    file.write(np.array(documents, "<u2").tobytes())
        elif write == "mds":
            foreign.mds(folder, shards=[documents * 5] * max(1, millions // 5))
        else:
            table = foreign.table(documents)
            with parquet.ParquetWriter(folder / "a.parquet", table.schema) as writer:
                for _ in range(millions):
                    writer.write_table(table)
        code = (
            f"import sys, resource; sys.path.insert(0, {str(REPOSITORY)!r})\n"
            "from megatron_ds.data.foreign_tokens.import_program import main\n"
            "assert main(sys.argv[1:]) == 0\n"
            "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
        )
        flags = ["--input", str(folder), "--output-prefix", str(folder / "o")]
        flags += ["--end-token", str(END)] if write == "flat" else []
        command = [sys.executable, "-c", code, *flags]
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        peaks.append(int(output.splitlines()[-1]) / 1024)
    assert peaks[1] - peaks[0] < 64, peaks
