"""Files of other programs are recognized by their content, and every entry refuses them by name."""

from __future__ import annotations

import gc
import importlib
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pytest
from pyarrow import parquet

from megatron_ds.config import DataConfig
from megatron_ds.config.problems import Problem
from megatron_ds.data.token_files.file_formats import Holds, recognize
from megatron_ds.data.token_files.indexed_dataset import IndexedDataset
from megatron_ds.data.token_files.missing_pair import CODES
from megatron_ds.data.token_files.probed_files import LocalFiles, ProbedFile
from megatron_ds.data.validation import DataFiles, data_problems
from megatron_ds.fileio.object_store import ObjectStore
from megatron_ds.preprocess.documents.document_readers import DocumentReader
from megatron_ds.preprocess.documents.inputs import InputSpec
from tests.foreign_files import CASES, input_code, is_imported, saved_dataset
from tests.object_server import BUCKET, s3_server
from tests.problems import codes, raises_problem
from tests.proofs.cases import with_proofs
from tests.token_files import write_pair

ONE_OF_EACH = list({case.holds: name for name, case in CASES.items()}.values())
"""A case of each kind of content."""
REST = [name for name in CASES if name not in ONE_OF_EACH]


def problems_of_data(*paths: str) -> list[Problem]:
    return list(data_problems(DataFiles(DataConfig(data_path=paths, split="1")), None, None))


def expected_codes(holds: Holds, case: str) -> list[str]:
    if case.startswith("nanoGPT"):
        return ["data-without-header"]
    return ["data-of-other-trainer" if is_imported(case) else CODES[holds]]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[str]:
    """A folder by URL that can be listed."""
    yield f"memory://{tmp_path.name}/folder"
    fsspec.filesystem("memory").rm(f"/{tmp_path.name}", recursive=True)


@pytest.mark.parametrize("case", CASES)
def test_every_file_is_recognized(case: str, tmp_path: Path) -> None:
    for path in CASES[case].write(tmp_path):
        recognized = recognize(ProbedFile(LocalFiles(), str(path)))
        assert recognized is not None, path
        assert CASES[case].program in recognized.description
        assert recognized.format.holds is CASES[case].holds


@pytest.mark.parametrize("case", CASES)
def test_data_path_names_the_format(case: str, tmp_path: Path) -> None:
    """Claim (data): `--data-path` that names a file or folder of one of 18 formats of other
    programs, with or without suffix, is refused with the format, what reads it and what to do"""
    folder = tmp_path / "foreign"
    paths = CASES[case].write(folder)
    pair = write_pair(tmp_path / "p", [[1]])
    # With an index, the prefix alone is a pair whose .bin or index is wrong.
    is_prefix = [path.suffix and not path.with_suffix(".idx").exists() for path in paths]
    stems = [path.with_suffix("") for path, is_one in zip(paths, is_prefix, strict=True) if is_one]
    for path in (*paths, folder, f"{folder}/", *stems[:1]):
        (problem,) = problems_of_data("0.5", str(path), "0.5", pair)
        assert codes([problem]) == expected_codes(CASES[case].holds, case), path
        assert CASES[case].program in str(problem)
        assert "--data-path" in str(problem)


def check_urls(case: str, folder: str) -> None:
    """Writes the files of a case to a folder by URL, which each entry refuses by their format."""
    for name, content in CASES[case].files.items():
        ObjectStore(folder).write(name, content)
    for url in (*(f"{folder}/{name}" for name in CASES[case].files), folder):
        (problem,) = problems_of_data(url)
        assert codes([problem]) == expected_codes(CASES[case].holds, case), url
        with raises_problem(input_code(case), contains=CASES[case].program):
            list(DocumentReader(InputSpec((url,)), ("text",)))


@pytest.mark.parametrize("case", CASES)
def test_urls_are_refused_as_paths_are(case: str, store: str) -> None:
    """Claim (data): files of other programs by URL are refused by their formats, too"""
    check_urls(case, store)


@pytest.mark.parametrize("cases", with_proofs([(ONE_OF_EACH,), (REST,)], [(REST,)]))
def test_urls_of_a_server_are_refused_as_paths_are(
    cases: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """By the client of S3, with no line about files next to them that do not exist."""
    with s3_server(tmp_path / "log") as variables:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        for number, case in enumerate(cases):
            check_urls(case, f"s3://{BUCKET}/{number}")
        url = f"s3://{BUCKET}/text/a.jsonl"
        ObjectStore(f"s3://{BUCKET}/text").write("a.jsonl", b'{"text": "x"}')
        known = importlib.import_module("fsspec.registry")._registry
        monkeypatch.delitem(known, "s3")  # as where no store was opened before
        assert len(list(DocumentReader(InputSpec((url,)), ("text",)))) == 1
    gc.collect()
    assert "Exception ignored" not in capfd.readouterr().err


@pytest.mark.parametrize("case", CASES)
def test_inspecting_names_the_format(case: str, tmp_path: Path) -> None:
    path, *_ = CASES[case].write(tmp_path)
    (code,) = expected_codes(CASES[case].holds, case)
    with raises_problem(code, contains=CASES[case].program):
        IndexedDataset(str(path))


@pytest.mark.parametrize("case", CASES)
def test_data_instead_of_a_list_of_prefixes_is_refused(case: str, tmp_path: Path) -> None:
    for path in CASES[case].write(tmp_path):
        if not path.stat().st_size:
            continue
        for field in ("data_args_path", "train_weighted_split_paths_path"):
            problems = DataFiles(DataConfig(**{field: str(path)})).problems
            assert codes(problems) == ["data-args-file-of-other-format"], path


def test_files_of_peers_are_recognized(shared_data: Path) -> None:
    folder = shared_data / "peer_tokens"
    if not folder.is_dir():
        pytest.skip("the folder of token files of other programs is missing")
    for path in folder.glob("*/**/*"):
        if path.is_file() and path.name != "expected.npz":
            recognized = recognize(ProbedFile(LocalFiles(), str(path)))
            assert recognized is not None, path
    for path in (path for path in folder.iterdir() if path.is_dir()):
        (problem,) = problems_of_data(str(path))
        is_pair = path.name.startswith("megatron_core")
        assert (problem.code == "data-prefix-differs") is is_pair, path


def test_a_file_of_a_pair_gives_its_prefix(tmp_path: Path) -> None:
    prefix = write_pair(tmp_path / "corpus_text_document", [[1]])
    for path in (f"{prefix}.bin", f"{prefix}.idx", str(tmp_path), str(tmp_path / "corpus")):
        (problem,) = problems_of_data(path)
        assert codes([problem]) == ["data-prefix-differs"]
        assert str(problem).endswith(f"give the prefix {prefix}")


def test_hints_never_name_what_cannot_help(tmp_path: Path) -> None:
    """The half of a pair, records next to it, and nothing at all give no other format."""
    prefix = write_pair(tmp_path / "p", [[1]])
    for suffix in (".tokenizer.json", ".progress.json"):
        (tmp_path / f"p{suffix}").write_text('{"a": "b"}')
    (tmp_path / "p.bin").rename(tmp_path / "moved.bin")
    assert codes(problems_of_data(prefix)) == ["data-file-missing"]
    assert codes(problems_of_data(str(tmp_path / "none"))) == ["data-file-missing"] * 2
    (tmp_path / "p.idx").unlink()
    assert codes(problems_of_data(prefix)) == ["data-file-missing"] * 2
    (problem,) = problems_of_data(str(tmp_path / "moved"))
    assert codes([problem]) == ["data-without-header"]
    assert str(tmp_path / "moved.idx") in str(problem)


def test_a_readme_does_not_hide_the_data_below_it(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("# Data\n")
    assert codes(problems_of_data(str(tmp_path))) == ["data-is-text"]
    CASES["MDS"].write(tmp_path / "train")
    assert codes(problems_of_data(str(tmp_path))) == ["data-of-other-trainer"]
    assert codes(problems_of_data("")) == ["data-file-missing"] * 2


def test_text_by_url_is_not_opened_to_recognize_it(
    tmp_path: Path, store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Arrow files ask once for the state of their folder, which does not exist."""
    system = fsspec.filesystem("memory")
    opened = list[str]()
    asked = list[str]()
    names = ("a.jsonl", "b.jsonl", "c.jsonl.gz", "d.parquet", "e.arrow", "f.arrow")
    for name in names:
        system.pipe(f"/{tmp_path.name}/folder/{name}", b'{"text": "x"}')
    real = type(system)._open
    exists = type(system).exists

    def ask_and_count(self: Any, path: str, **keywords: Any) -> bool:
        asked.append(path.rpartition("/")[2])
        return bool(exists(self, path, **keywords))

    def open_and_count(self: Any, path: str, *arguments: Any, **keywords: Any) -> Any:
        opened.append(path.rpartition("/")[2])
        return real(self, path, *arguments, **keywords)

    monkeypatch.setattr(type(system), "_open", open_and_count)
    monkeypatch.setattr(type(system), "exists", ask_and_count)
    assert len(list(InputSpec((store,)).files())) == len(names)
    assert (asked, opened) == (["state.json"], [])


def table(column: str, values: list[object]) -> pa.Table:
    return pa.table({column: pa.array(values), "n": pa.array([1, 2])})


def written(kind: str, column: str, values: list[object], folder: Path) -> Path:
    """A table of two rows as JSON lines, Arrow or parquet."""
    path = folder / f"a.{kind}"
    if kind == "jsonl":
        lines = (json.dumps({column: value, "n": 1}) for value in values)
        path.write_text("\n".join(lines))
    elif kind == "parquet":
        parquet.write_table(table(column, values), path)
    else:
        sink = io.BytesIO()
        with pa.ipc.new_stream(sink, table(column, values).schema) as writer:
            writer.write_table(table(column, values))
        path.write_bytes(sink.getvalue())
    return path


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "arrow"])
def test_text_is_sent_to_preprocessing(kind: str, tmp_path: Path) -> None:
    path = written(kind, "body", ["once", "upon"], tmp_path)
    for given in (path, tmp_path / "a"):
        (problem,) = problems_of_data(str(given))
        assert codes([problem]) == ["data-is-text"]
        assert f"--input {path} --json-keys body" in str(problem)


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "arrow"])
def test_a_table_of_ids_is_not_sent_to_preprocessing(kind: str, tmp_path: Path) -> None:
    path = written(kind, "input_ids", [list(range(9000)), [3]], tmp_path)
    (problem,) = problems_of_data(str(path))
    assert codes([problem]) == ["data-is-table-of-ids"]
    assert "'input_ids'" in str(problem)


def test_a_saved_dataset_of_ids_is_not_sent_to_preprocessing(tmp_path: Path) -> None:
    for name, content in saved_dataset("int64").items():
        (tmp_path / name).write_bytes(content)
    assert "--hf-dataset" not in str(problems_of_data(str(tmp_path)))
