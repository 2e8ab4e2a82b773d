"""Preprocessing by shards writes, byte for byte, the files of one process over the entire input."""

from __future__ import annotations

import dataclasses
import gzip
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from megatron_ds.config.problems import UserError
from megatron_ds.fileio import resumable
from megatron_ds.preprocess import command as preprocess_data
from megatron_ds.preprocess.documents.inputs import InputSpec
from megatron_ds.preprocess.documents.sentence_splitter import choose_splitter
from megatron_ds.preprocess.options import PreprocessOptions
from megatron_ds.preprocess.pipeline import Progress, preprocess
from megatron_ds.preprocess.shard_files import shard_folder
from megatron_ds.preprocess.sharded import ShardedRun, preprocess_shard
from megatron_ds.preprocess.shards import Shard
from tests.faults import is_killed_at
from tests.preprocess_runs import (
    LINES,
    TOKENIZER,
    options,
    output_files,
    remove_output,
    run_uninterrupted,
    write_parquet,
)
from tests.problems import codes, printed_codes, raises_problem
from tests.proofs.cases import with_proofs


@pytest.fixture(autouse=True)
def no_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # no power fails here, and it is slow


def shards_of(count: int) -> list[Shard]:
    return [Shard(index, count) for index in range(count)]


def run_shards(options: PreprocessOptions, order: Sequence[Shard]) -> Progress:
    """The shards one after another. Returns the counts of the last, which merges them."""
    done: Progress | None = None
    for shard in order:
        assert done is None
        done = preprocess_shard(dataclasses.replace(options, shard=shard), TOKENIZER)
    assert done is not None
    return done


def of_paths(folder: Path, *names: str, **values: Any) -> PreprocessOptions:
    inputs = InputSpec(tuple(str(folder / name) for name in names), text_document_unit="paragraph")
    given = {"json_keys": ("a", "b"), "append_eod": True, "workers": 1, **values}
    return PreprocessOptions(inputs, str(folder / "out"), **given)


def mixed_inputs(folder: Path) -> list[str]:
    """Files that are divided and files that are not, with rejected documents in all."""
    text = "\n".join(LINES)
    (folder / "1.jsonl").write_text(text)
    (folder / "2.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    (folder / "3.jsonl").write_text("")
    write_parquet(folder / "4.parquet")
    rows = [{"a": "1 2", "b": value} for value in ("3", "x", "", "4 5")]
    parquet.write_table(pa.Table.from_pylist(rows), folder / "5.parquet", row_group_size=1)
    (folder / "6.csv").write_text("a,b\n1,2\nx,3\n4,5\nbroken\n")
    (folder / "7.jsonl").write_text("\n\n" + text + "\n\n")
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("count", with_proofs([2, 9], [2]))
def test_shards_of_all_formats_have_the_bytes_of_one_process(tmp_path: Path, count: int) -> None:
    """In any order of completion.

    Claim (data): preprocessing by shards ends with the bytes of one process, for any number of
    shards and any kill
    """
    given = of_paths(tmp_path, *mixed_inputs(tmp_path))
    done, wanted = run_uninterrupted(given)
    assert wanted["out.quarantine"].count(b"\n") == sum(done.dropped.values()) > 10
    order = shards_of(count)
    merged = run_shards(given, [*order[1::2], *order[::2]])
    assert dataclasses.replace(merged, before=None) == done
    assert output_files(tmp_path) == wanted


def test_sentences_are_those_of_one_process(tmp_path: Path) -> None:
    text = "".join(json.dumps({"text": "1 2\n\n3 4\n\n" * (at % 4)}) + "\n" for at in range(40))
    (tmp_path / "in.jsonl").write_text(text)
    splitter = choose_splitter("english", False, "rules")
    given = of_paths(tmp_path, "in.jsonl", json_keys=("text",), splitter=splitter)
    _, wanted = run_uninterrupted(given)
    run_shards(given, shards_of(3))
    assert output_files(tmp_path) == wanted


LINE = st.sampled_from(
    [b'{"a": "1 2", "b": "3"}', b'{"a": "", "b": "4"}', b"{", b"", b" ", b"\xff", b"[" + b"1," * 40]
)


@given(
    files=st.lists(
        st.tuples(st.lists(LINE, max_size=8), st.sampled_from([b"\n", b"\r\n"]), st.booleans()),
        min_size=1,
        max_size=3,
    ),
    count=st.integers(1, 9),
    limit=st.sampled_from([20, 60, 1 << 20]),
)
@settings(
    max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_any_lines_have_the_bytes_of_one_process(
    tmp_path: Path, files: list[tuple[list[bytes], bytes, bool]], count: int, limit: int
) -> None:
    """Lines that are too long, broken or longer than a shard, and more shards than documents.

    Claim (data): preprocessing by shards ends with the bytes of one process, for any number of
    shards and any kill
    """
    remove_output(tmp_path)
    for old in tmp_path.glob("*.jsonl"):
        old.unlink()
    lines = [b'{"a": "5", "b": "5"}']
    (tmp_path / "0.jsonl").write_bytes(b"\n".join(lines))  # no document at all is an error
    for number, (lines, end, is_open) in enumerate(files, 1):
        content = end.join(lines) + (b"" if is_open else end)
        (tmp_path / f"{number}.jsonl").write_bytes(content)
    given = of_paths(tmp_path, *sorted(path.name for path in tmp_path.glob("*.jsonl")))
    given = dataclasses.replace(
        given, inputs=dataclasses.replace(given.inputs, max_document_bytes=limit)
    )
    _, wanted = run_uninterrupted(given)
    run_shards(given, shards_of(count))
    assert output_files(tmp_path) == wanted


@pytest.mark.parametrize("stride", with_proofs([7, 1], [1]))
def test_a_process_that_is_killed_anywhere_is_repeated(
    stride: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a shard or while merging; complete shards are not read again.

    Claim (data): preprocessing by shards ends with the bytes of one process, for any number of
    shards and any kill
    """
    given = options(tmp_path, overwrite=False)
    _, wanted = run_uninterrupted(given)
    monkeypatch.setattr(resumable, "COMMIT_SECONDS", 0.0)
    first, last = (dataclasses.replace(given, shard=shard) for shard in shards_of(2))
    for number in range(1, 100, stride):
        remove_output(tmp_path)
        assert preprocess_shard(first, TOKENIZER) is None
        record = Path(shard_folder(given.output_prefix), "0-of-2.progress.json")
        kept = record.stat().st_mtime_ns
        if not is_killed_at(f"os.replace:{number}", lambda: preprocess_shard(last, TOKENIZER)):
            break
        if record.exists():
            assert record.stat().st_mtime_ns == kept
        # Either shard continues; the last one is needed only if it was killed before its end.
        done = preprocess_shard(first, TOKENIZER) or preprocess_shard(last, TOKENIZER)
        assert done is not None
        assert output_files(tmp_path) == wanted
    else:
        pytest.fail("the run renamed more files than it was tried")
    assert number > 15


def test_complete_output_is_left_alone(tmp_path: Path) -> None:
    given = options(tmp_path, overwrite=False)
    _, wanted = run_uninterrupted(given)
    run_shards(given, shards_of(3))
    logged: list[str] = []
    again = dataclasses.replace(given, shard=Shard(1, 3))
    assert preprocess_shard(again, TOKENIZER, log=logged.append) is not None
    assert "nothing left to do" in logged[0]
    assert preprocess(given, TOKENIZER, log=logged.append).documents > 0
    assert output_files(tmp_path) == wanted
    with raises_problem("output-exists"):
        preprocess_shard(dataclasses.replace(again, append_eod=False), TOKENIZER)
    run_shards(dataclasses.replace(given, append_eod=False, overwrite=True), shards_of(2))
    assert output_files(tmp_path) != wanted


def test_shards_of_other_settings_are_not_merged(tmp_path: Path) -> None:
    given = options(tmp_path, overwrite=False)
    _, wanted = run_uninterrupted(given)
    preprocess_shard(dataclasses.replace(given, shard=Shard(0, 2), append_eod=False), TOKENIZER)
    assert preprocess_shard(dataclasses.replace(given, shard=Shard(1, 2)), TOKENIZER) is None
    with raises_problem("shards-missing"):
        ShardedRun(given, TOKENIZER, 2).complete(lambda missing: None, lambda line: None)
    with pytest.raises(UserError) as raised:
        preprocess_shard(dataclasses.replace(given, shard=Shard(0, 2)), TOKENIZER)
    assert codes(raised.value.problems) == ["resumed-run-differs", "output-exists"]
    over = dataclasses.replace(given, overwrite=True)
    ran: list[Shard] = []

    def run(missing: Sequence[Shard]) -> None:
        ran.extend(missing)
        for shard in missing:
            preprocess_shard(dataclasses.replace(over, shard=shard), TOKENIZER, merges=False)

    ShardedRun(over, TOKENIZER, 2).complete(run, lambda line: None, restart=True)
    assert ran == shards_of(2)
    assert output_files(tmp_path) == wanted


def test_errors_of_a_shard_name_the_line_of_the_file(tmp_path: Path) -> None:
    lines = [*['{"a": "1", "b": "2"}'] * 30, "broken", *['{"a": "1", "b": "2"}'] * 5]
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    given = of_paths(tmp_path, "in.jsonl", shard=Shard(2, 3), fail_on_bad_document=True)
    line = lines.index("broken") + 1
    with raises_problem("rejected-document", contains=f"in.jsonl:{line}:"):
        preprocess_shard(given, TOKENIZER)


def test_input_without_documents_is_an_error_of_the_merge(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text("{\n" * 9)
    given = of_paths(tmp_path, "in.jsonl")
    with raises_problem("no-documents", contains="9 broken JSON, first"):
        run_shards(given, shards_of(2))


def flags(folder: Path, *more: str) -> list[str]:
    files = ["--input", str(folder / "in.jsonl"), "--output-prefix", str(folder / "out")]
    return [*files, "--tokenizer-type", "NullTokenizer", "--vocab-size", "100", *more]


def test_tasks_of_a_slurm_array_are_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The array numbers its tasks from 3 in steps of 2."""
    (tmp_path / "in.jsonl").write_text('{"text": "1 2"}\n' * 20)
    command = flags(tmp_path, "--workers", "1")
    assert preprocess_data.main(command) == 0
    wanted = output_files(tmp_path)
    remove_output(tmp_path)
    array = {"COUNT": 3, "MIN": 3, "MAX": 7, "STEP": 2}
    for name, value in array.items():
        monkeypatch.setenv(f"SLURM_ARRAY_TASK_{name}", str(value))
    for number in (7, 3, 5):
        monkeypatch.setenv("SLURM_ARRAY_TASK_ID", str(number))
        assert preprocess_data.main([*command, "--shard", "auto"]) == 0
    assert output_files(tmp_path) == wanted
    assert "20 documents" in capsys.readouterr().out
    monkeypatch.setenv("SLURM_ARRAY_TASK_MAX", "9")  # its tasks are not consecutive
    assert preprocess_data.main([*command, "--shard", "auto"]) == 2
    assert printed_codes(capsys.readouterr().err) == ["no-slurm-array"]


@pytest.mark.parametrize(
    ("given", "code"),
    [
        (["--shard", "3/3"], "shard-invalid"),
        (["--shard", "x"], "shard-invalid"),
        (["--shard", "auto"], "no-slurm-array"),
        (["--shard", "0/2", "--input", "-"], "input-not-divisible"),
        (["--shard", "0/2", "--ray", "auto", "--input", "-"], "input-not-divisible"),
    ],
)
def test_wrong_shards_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], given: list[str], code: str
) -> None:
    (tmp_path / "in.jsonl").write_text('{"text": "1 2"}\n')
    assert preprocess_data.main(flags(tmp_path, *given)) == 2
    assert printed_codes(capsys.readouterr().err)[-1:] == [code]
    assert not Path(shard_folder(str(tmp_path / "out"))).exists()
