"""Cleaning by shards writes, byte for byte, the files of one process over the entire input."""

from __future__ import annotations

import dataclasses
import itertools
import random
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from megatron_ds.cleaning.decontamination import TaskOptions
from megatron_ds.cleaning.options import CleaningOptions
from megatron_ds.cleaning.pipeline import clean
from megatron_ds.cleaning.sharded import ShardedCleaning, clean_shard
from megatron_ds.cleaning.stats import Counts
from megatron_ds.preprocess.documents.inputs import InputSpec
from megatron_ds.preprocess.shard_files import shard_folder
from megatron_ds.preprocess.shards import Shard
from tests.cleaning_runs import corpus, everything, files, write
from tests.faults import is_killed_at
from tests.problems import printed_codes, raises_problem
from tests.proofs.cases import with_proofs
from tools.openwebtext import clean as command


def shards_of(count: int) -> list[Shard]:
    return [Shard(index, count) for index in range(count)]


def run_shards(options: CleaningOptions, order: Sequence[Shard]) -> Counts:
    """The shards one after another. Returns the counts of the last, which merges them."""
    done: Counts | None = None
    for shard in order:
        assert done is None
        done = clean_shard(options, shard)
    assert done is not None
    return done


def remove_results(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif not path.name.startswith("in."):
            path.unlink()


@pytest.mark.parametrize("count", with_proofs([2, 5], [2]))
def test_duplicates_across_shards_are_those_of_one_process(tmp_path: Path, count: int) -> None:
    """All files, also the list of dropped documents with their lines and the report.

    Claim (cleaning): cleaning by shards finds the duplicates across all of them and ends with the
    bytes of one process
    """
    corpus(tmp_path)
    counts = clean(everything(tmp_path))
    wanted = files(tmp_path)
    for stage in ("exact", "near"):
        assert counts.stages[stage].dropped.total() > 50
    remove_results(tmp_path)
    order = shards_of(count)
    assert run_shards(everything(tmp_path), [*order[1::2], *order[::2]]) == counts
    assert files(tmp_path) == wanted


TASK = "one two three four five six seven eight nine ten eleven twelve thirteen"


@pytest.mark.parametrize("stages", [("none",), ("fix", "length", "decontaminate", "exact")])
def test_any_stages_have_the_bytes_of_one_process(tmp_path: Path, stages: tuple[str, ...]) -> None:
    """Also fragments of documents, changed texts, and names and lines that are not UTF-8."""
    generator = random.Random(1)
    words = [f"w{number}" for number in range(30)]
    texts = [" ".join(generator.choices(words, k=40)) for _ in range(40)]
    texts += [f"{text}. {TASK}. {other}" for text, other in itertools.pairwise(texts)]
    path = tmp_path / "in.\udcff.jsonl"
    write(path, *({"text": f"{text} caf\u00c3\u00a9", "id": at} for at, text in enumerate(texts)))
    path.write_bytes(path.read_bytes() + b'{"text": "\xff"}\n{\n')
    (tmp_path / "in.tasks.txt").write_text(TASK)
    tasks = TaskOptions(
        eval_task_files=(str(tmp_path / "in.tasks.txt"),),
        contamination_margin_chars=0,
        min_fragment_chars=20,
    )
    given = everything(tmp_path, stages=stages, tasks=tasks)
    given = dataclasses.replace(given, inputs=InputSpec(paths=(str(path),)))
    counts = clean(given)
    wanted = files(tmp_path)
    remove_results(tmp_path)
    assert run_shards(given, shards_of(3)) == counts
    assert files(tmp_path) == wanted
    assert stages == ("none",) or counts.stages["decontaminate"].added > 0


def test_a_process_that_is_killed_anywhere_is_repeated(tmp_path: Path) -> None:
    """In a shard or while merging."""
    corpus(tmp_path)
    given = everything(tmp_path)
    clean(given)
    wanted = files(tmp_path)
    for number in range(1, 100, 2):
        remove_results(tmp_path)
        assert clean_shard(given, Shard(0, 2)) is None
        if not is_killed_at(f"os.replace:{number}", lambda: clean_shard(given, Shard(1, 2))):
            break
        if not (tmp_path / "report.json").exists() or Path(shard_folder(given.output)).exists():
            done = clean_shard(given, Shard(0, 2)) or clean_shard(given, Shard(1, 2))
            assert done is not None
        assert files(tmp_path) == wanted
    assert number > 8


def test_shards_of_other_settings_are_not_merged(tmp_path: Path) -> None:
    corpus(tmp_path)
    given = everything(tmp_path)
    clean_shard(dataclasses.replace(given, min_chars=10), Shard(0, 2))
    assert clean_shard(given, Shard(1, 2)) is None
    with raises_problem("shards-missing"):
        ShardedCleaning(given, 2).complete(lambda missing: None, lambda line: None)
    with raises_problem("resumed-run-differs", "min_chars"):
        clean_shard(given, Shard(0, 2))


def test_the_command_of_a_shard(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Only the last one prints a report, which is that of one process."""
    write(tmp_path / "in.jsonl", *({"text": "x" * n} for n in range(9)))
    words = ["--input", tmp_path / "in.jsonl", "--output", tmp_path / "out.jsonl", "--min-chars", 4]
    words += ["--stages", "length", "exact", "--workers", 1]
    command_line = list(map(str, words))
    for shard in ("1/2", "0/2"):
        assert capsys.readouterr().out == ""
        assert command.main([*command_line, "--shard", shard]) == 0
    assert "kept 5 of 9 documents" in capsys.readouterr().out
    assert command.main([*command_line, "--shard", "2/2"]) == 2
    assert printed_codes(capsys.readouterr().err) == ["shard-invalid"]
