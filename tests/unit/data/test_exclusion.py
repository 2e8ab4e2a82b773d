"""Runs without the documents of --exclude-documents, from the start or a resume on."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_ds.config import DataConfig
from megatron_ds.data.blend.blend_history import BlendHistory
from megatron_ds.data.build_datasets import Datasets, build_datasets
from megatron_ds.data.exclusion import excluded_sequences
from megatron_ds.data.token_dataset import Piece
from megatron_ds.data.validation import DataFiles
from tests.problems import codes, raises_problem
from tests.token_files import write_pair

SEQ_LENGTH = 7
READ = 30
SAMPLES = 90
LEFT_OUT = {"a": (3, 4, 11, 20), "b": (7,)}
"""Documents of each file: short, long, and neighbours."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two files, in which every token occurs once."""
    folder = tmp_path_factory.mktemp("files")
    draw = np.random.default_rng(0)
    first = 0
    for name, count in (("a", 25), ("b", 30)):
        sizes = draw.integers(1, 12, count)
        sizes[4] = 40
        write_pair(
            folder / name, np.split(np.arange(first, first + sizes.sum()), sizes.cumsum())[:-1]
        )
        first += sizes.sum()
    lines = [f"{name}:{number}" for name, numbers in LEFT_OUT.items() for number in numbers]
    (folder / "out.txt").write_text("# leaked\n" + "\n".join(lines))
    return folder


def tokens_of(folder: Path, documents: dict[str, tuple[int, ...]]) -> set[int]:
    files = DataFiles(DataConfig(data_path=(str(folder / "a"), str(folder / "b"))))
    return {
        int(token)
        for name, numbers in documents.items()
        for number in numbers
        for token in files.open(str(folder / name)).get(number)
    }


def config_of(folder: Path, names: str, *, out: str | None = None, **values: Any) -> DataConfig:
    paths = tuple(word if word[0].isdigit() else str(folder / word) for word in names.split())
    path = None if out is None else str(folder / out)
    return DataConfig(data_path=paths, split="1", exclude_documents=path, **values)


def built(config: DataConfig, record: Any = None, consumed: int = 0, **values: Any) -> Datasets:
    settings = {"seq_length": SEQ_LENGTH, "num_samples": (SAMPLES, 0, 0), **values}
    return build_datasets(
        DataFiles(config),
        seed=3,
        tokenizer_fingerprint="t",
        vocab_size=1000,
        history=None if record is None else BlendHistory.from_dict(json.loads(json.dumps(record))),
        consumed=consumed,
        **settings,
    )


def record_of(data: Datasets, consumed: int) -> Any:
    return data.progress.history_after(consumed).to_dict()


def rows(data: Datasets, first: int, last: int = SAMPLES) -> list[tuple[int, ...]]:
    return [tuple(data.train[position].tolist()) for position in range(first, last)]


@pytest.mark.parametrize("order", ["single", "cyclic"])
@pytest.mark.parametrize("names", ["a", "0.3 a 0.7 b"])
def test_the_other_samples_keep_their_order(folder: Path, names: str, order: str) -> None:
    """Claim (samples): a run that leaves out documents from a step on reads none of their tokens,
    all others as often as before, and samples without them in the same order"""
    with_all = built(config_of(folder, names, dataloader_type=order))
    before = rows(with_all, 0)
    record = record_of(with_all, READ)
    out = built(config_of(folder, names, out="out.txt", dataloader_type=order), record, READ)
    after = rows(out, READ)
    forbidden = tokens_of(folder, LEFT_OUT)
    assert all(forbidden.isdisjoint(row) for row in after)
    of_a = tokens_of(folder, {"a": (*range(25),)})
    for is_a in (True, False):  # each file goes on with the samples that it would have read
        read = [row for row in before[READ:] if (row[0] in of_a) == is_a]
        kept = [row for row in read if forbidden.isdisjoint(row)]
        whole = [row for row in after if row in kept]
        assert whole[: len(kept)] == kept[: len(whole)]
        assert len(whole) > len(kept) // 2 or not kept
    places = [[(row[0] in of_a) for row in run] for run in (before[READ:], after)]
    assert places[0] == places[1]
    counts = {file.prefix[-1]: file.excluded for file in out.usage}
    assert counts == {name: len(LEFT_OUT[name]) for name in "ab" if name in names}
    again = built(
        config_of(folder, names, out="out.txt", dataloader_type=order), record_of(out, 50), 50
    )
    assert rows(again, 50) == after[50 - READ :]
    assert (again.changes, record_of(again, 60)) == ((), record_of(out, 60))


def test_nothing_else_is_lost_or_repeated(folder: Path) -> None:
    all_data = built(config_of(folder, "a"))
    unread = rows(all_data, READ, len(all_data.train))
    record = record_of(all_data, READ)
    out = config_of(folder, "a", out="out.txt")
    data = built(out, record, READ).train._datasets[0]
    rest, *_ = getattr(data, "_datasets", [data])  # without the epochs after them
    read = [tuple(rest[position].tolist()) for position in range(len(rest))]
    counts = [Counter(token for row in part for token in row[:-1]) for part in (unread, read)]
    for token in tokens_of(folder, LEFT_OUT):
        del counts[0][token]
    missing = counts[0] - counts[1]
    assert not counts[1] - counts[0]
    assert 0 < sum(missing.values()) <= SEQ_LENGTH  # less than a sample at the end


def test_documents_and_the_length_change_together(folder: Path) -> None:
    """Documents that are left out later, at another length, and come back."""
    first = built(config_of(folder, "0.3 a 0.7 b"))
    (folder / "few.txt").write_text("a:11")
    (folder / "none.txt").write_text("")
    record = record_of(first, READ)
    consumed = READ
    length = SEQ_LENGTH
    for out, more in (("few.txt", 20), ("out.txt", 15), ("none.txt", 40)):
        length += 2
        data = built(
            config_of(folder, "0.3 a 0.7 b", out=out),
            record,
            consumed,
            seq_length=length,
            num_samples=(consumed + more, 0, 0),
        )
        numbers = {"few.txt": {"a": (11,)}, "out.txt": LEFT_OUT, "none.txt": {}}[out]
        after = rows(data, consumed, consumed + more)
        assert all(tokens_of(folder, numbers).isdisjoint(row) for row in after)
        for position in range(consumed, consumed + more):
            pieces = [data_tokens(folder, piece) for piece in data.train.pieces(position)]
            assert [token for piece in pieces for token in piece] == data.train[position].tolist()
        for prefix, number in ((str(folder / "a"), 5), (str(folder / "b"), 9)):
            ids = tokens_of(folder, {prefix[-1]: (number,)})
            found = data.train.positions_of(prefix, np.array([number]))
            run = range(consumed, consumed + more)
            expected = [at for at in run if not ids.isdisjoint(data.train[at].tolist())]
            assert [at for at in found.tolist() if at in run] == expected
        record = record_of(data, consumed + more)
        consumed += more
    assert [source["excluded"] for source in record["sources"]] == [(), ()]
    restarted = built(config_of(folder, "b", out="out.txt"))
    assert all(tokens_of(folder, LEFT_OUT).isdisjoint(row) for row in rows(restarted, 0))


def data_tokens(folder: Path, piece: Piece) -> list[int]:
    sequence = DataFiles(DataConfig()).open(piece.prefix).get(piece.sequence)
    return sequence[piece.first : piece.first + piece.size].tolist()


def test_wrong_lines_are_named_together(folder: Path) -> None:
    lines = "a:24\na:25\nc:1\n\nb:3-2\nb:3-5\nb\n"
    (folder / "wrong.txt").write_text(lines)
    files = DataFiles(config_of(folder, "a b", out="wrong.txt"))
    ranges, problems = excluded_sequences([files])
    assert ranges == {str(folder / "a"): ((24, 25),), str(folder / "b"): ((3, 6),)}
    assert codes(problems) == ["exclusion-invalid"] * 4
    blanks = " " * 100_000
    digits = "9" * 5_000
    odd = (
        f"\ufeffa:24\n{blanks}\n{blanks}b:3-5{blanks}\nb:{digits}\nb:1{blanks}1\na:\n:3\n".encode()
    )
    (folder / "odd.txt").write_bytes(odd + b"\xff:3\n")
    ranges, problems = excluded_sequences([DataFiles(config_of(folder, "a b", out="odd.txt"))])
    assert ranges == {str(folder / "a"): ((24, 25),), str(folder / "b"): ((3, 6),)}
    assert codes(problems) == ["exclusion-invalid"] * 5
    assert all(len(str(problem)) < 1_000 for problem in problems)
    (folder / "all.txt").write_text("a:0-24")
    with raises_problem("exclusion-leaves-nothing"):
        built(config_of(folder, "a", out="all.txt"))
