"""Parsing of the data flags: groups, ranges, argument files, and every problem."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ds.config import DataConfig
from megatron_ds.config.problems import Problem
from megatron_ds.data.blend.blend_spec import (
    ALL_DOCUMENTS,
    BlendSource,
    DatasetGroup,
    FractionRange,
    SplitSelection,
    parse_group,
    read_groups,
)
from megatron_ds.data.validation import DataFiles, data_problems
from tests.problems import codes, fields
from tests.tables import tables

TABLES = tables(__file__, tuple)

FLAG = "--valid-weighted-split-paths"
BOUNDS = st.lists(st.floats(0, 1), min_size=2, max_size=2, unique=True).map(sorted)
STEADY = settings(derandomize=True, deadline=None, database=None, max_examples=40)


def problems(**values: Any) -> list[Problem]:
    """Problems of the flags and of the files that they name."""
    config = DataConfig(**values)
    return [*config.problems(), *read_groups(config)[1]]


def parse(**values: Any) -> list[DatasetGroup]:
    groups, found = read_groups(DataConfig(**values))
    assert not found
    return groups


def test_group_with_weights_and_ranges() -> None:
    group, found = parse_group(" A B : 3 0:0.6 data/a,1 .5:1 b , 0 0:1 c", "valid", FLAG)
    assert not found
    sources = (
        BlendSource("data/a", 0.75, FractionRange("0:0.6", 0.0, 0.6)),
        BlendSource("b", 0.25, FractionRange(".5:1", 0.5, 1.0)),
    )
    assert group == DatasetGroup("valid", "A B", f"{FLAG} A B:", sources, ("c",))


@pytest.mark.parametrize("name", ["X 1", "2 1", "0.5", "1"])
def test_group_name_may_contain_numbers(name: str) -> None:
    group, found = parse_group(f"{name}: 1 0.9:1 a", "valid", FLAG)
    assert not found
    assert (group.name, [source.prefix for source in group.sources]) == (name, ["a"])


@pytest.mark.parametrize(("code", "texts"), TABLES["invalid_groups"])
def test_invalid_group_is_rejected(code: str, texts: list[str]) -> None:
    for text in texts:
        found = parse_group(text, "valid", FLAG, "valid_weighted_split_paths")[1]
        assert codes(found) == [code], text
        assert found[0].fields == ("valid_weighted_split_paths",)
        assert repr(text) in str(found[0])


def test_all_problems_are_reported_at_once() -> None:
    found = problems(
        train_weighted_split_paths=("T: 1 0:1 a", "U: 1 0:1 b"),
        valid_weighted_split_paths=("V: x 0:1 a, 1 0:2 b", "W: 1 0:1 c", "W: 1 0:1 d"),
        test_data_path=("1", "a", "b"),
    )
    group_problems = ["invalid-weight", "invalid-document-range", "duplicate-group-name"]
    assert codes(found) == ["several-train-groups", *group_problems, "blend-syntax"]
    not_quoted = problems(train_weighted_split_paths=("T:", "1", "0:1", "a"))
    assert codes(not_quoted) == ["group-not-quoted"]


@given(
    entries=st.lists(
        st.tuples(st.floats(1e-6, 1e6), BOUNDS, st.text("aZ9é._/-", min_size=1)),
        min_size=1,
        max_size=5,
    ),
    name=st.text("aZ9é, \"'-", min_size=1).filter(str.strip),
)
@STEADY
def test_any_group_is_parsed(entries: list[Any], name: str) -> None:
    texts = [f"{weight!r} {low!r}:{high!r} {prefix}" for weight, (low, high), prefix in entries]
    group, found = parse_group(f"{name}: {', '.join(texts)}", "test", FLAG)
    assert not found
    assert group.name == name.strip()
    total = sum(weight for weight, *_ in entries)
    for source, (weight, (low, high), prefix) in zip(group.sources, entries, strict=True):
        assert (source.prefix, source.weight) == (prefix, pytest.approx(weight / total))
        assert source.documents == FractionRange(f"{low!r}:{high!r}", low, high)


@given(text=st.text(max_size=40) | st.text("V: 01.,ab\n", max_size=30))
@STEADY
def test_any_text_is_a_group_or_a_problem(text: str) -> None:
    group, found = parse_group(text, "test", FLAG)
    assert all(str(line).startswith(FLAG) for line in found)
    if not found:
        assert sum(source.weight or 0 for source in group.sources) == pytest.approx(1)


@given(
    bounds=st.lists(st.floats(0, 1), min_size=1, max_size=5).map(lambda x: sorted({0.0, 1.0, *x})),
    size=st.integers(0, 1 << 40),
)
@STEADY
def test_adjacent_ranges_partition_the_documents(bounds: list[float], size: int) -> None:
    ranges = [FractionRange("", low, high).range_of(size) for low, high in pairwise(bounds)]
    assert (ranges[0][0], ranges[-1][1]) == (0, size)
    assert all(before[1] == after[0] for before, after in pairwise(ranges))


@pytest.mark.parametrize(("text", "size", "bounds"), TABLES["ranges"])
def test_ranges_are_rounded_as_in_bigscience(text: str, size: int, bounds: tuple[int, int]) -> None:
    source = parse_group(f"V: 1 {text} p", "valid", FLAG)[0].sources[0]
    assert source.documents.range_of(size) == bounds


@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_argument_files_equal_flags(tmp_path: Path, mark: str) -> None:
    blend = tmp_path / "blend"
    splits = tmp_path / "splits.json"
    groups = tmp_path / "groups"
    blend.write_text(f"{mark}3 a\n1 b\n")
    by_split = {"train": [3, "a", 1, "b"], "valid": "c d", "test": None}
    splits.write_text(mark + json.dumps(by_split))
    line = '"V1: 1 0:1 a, 1 0:0.5 b" "V2: 1 0:1 c"\n'
    groups.write_text(line)

    def comparable(found: list[DatasetGroup]) -> list[Any]:
        return [(group.split, group.name, group.sources) for group in found]

    by_flag = parse(data_path=("3", "a", "1", "b"), split="1,1")
    assert comparable(parse(data_args_path=str(blend), split="1,1")) == comparable(by_flag)
    by_flag = parse(train_data_path=("3", "a", "1", "b"), valid_data_path=("c", "d"))
    assert comparable(parse(per_split_data_args_path=str(splits))) == comparable(by_flag)
    by_flag = parse(
        train_data_path=("t",), valid_weighted_split_paths=("V1: 1 0:1 a, 1 0:0.5 b", "V2: 1 0:1 c")
    )
    for text in (line, "V1: 1 0:1 a, 1 0:0.5 b\nV2: 1 0:1 c", line.replace('" "', '"\n\n"')):
        groups.write_text(text)
        by_file = parse(train_data_path=("t",), valid_weighted_split_paths_path=str(groups))
        assert comparable(by_file) == comparable(by_flag)


def test_split_of_weight_0_has_no_dataset() -> None:
    groups = parse(data_path=("a", "b"), split="9,0,1")
    assert [group.split for group in groups] == ["train", "test"]
    assert {source.documents for source in groups[1].sources} == {SplitSelection("9,0,1", "test")}
    (group,) = parse(train_data_path=("a",))
    assert {source.documents for source in group.sources} == {ALL_DOCUMENTS}


@pytest.mark.parametrize(
    ("field", "code", "contents"),
    [
        ("data_args_path", "empty-data-args-file", [b""]),
        ("data_args_path", "blend-syntax", [b"1 a b"]),
        ("data_args_path", "data-args-file-unreadable", [b"\xff\xfe"]),
        ("per_split_data_args_path", "per-split-file-not-json", [b"{"]),
        ("per_split_data_args_path", "per-split-file-keys", [b"[]", b'{"training": ["a"]}']),
        (
            "per_split_data_args_path",
            "per-split-file-entry",
            [b'{"train": 3}', b'{"train": [[""]]}'],
        ),
        ("per_split_data_args_path", "per-split-file-without-train", [b'{"valid": ["a"]}']),
        ("train_weighted_split_paths_path", "no-groups-in-file", [b"\n"]),
        ("train_weighted_split_paths_path", "group-entry-syntax", [b'"T: 1 0:1']),
        *(
            (f"{name}_path", "file-not-found", [None])
            for name in ("data_args", "per_split_data_args", "train_weighted_split_paths")
        ),
    ],
)
def test_invalid_argument_file_is_rejected(
    tmp_path: Path, field: str, code: str, contents: list[bytes | None]
) -> None:
    path = tmp_path / "file"
    for content in contents:
        if content is not None:
            path.write_bytes(content)
        found = problems(**{field: str(path)})
        assert (codes(found), fields(found)) == ([code], [(field,)])
        assert str(path) in str(found[0])


@pytest.mark.parametrize(("given_fields", "code", "names"), TABLES["contradicting"])
def test_contradicting_data_flags_are_rejected(given_fields: str, code: str, names: str) -> None:
    values = {
        name: "1" if name == "split" else "x" if name.endswith("args_path") else ("x",)
        for name in given_fields.split()
    }
    found = list(DataConfig(**values).problems())
    assert (codes(found), fields(found)) == ([code], [tuple(names.split())])


@pytest.mark.parametrize(
    "fields",
    [
        "data_path",
        "data_path split",
        "data_args_path split",
        "per_split_data_args_path",
        "train_data_path valid_weighted_split_paths test_weighted_split_paths_path",
    ],
)
def test_flags_that_go_together(fields: str) -> None:
    values = dict.fromkeys(fields.split(), ("x",))
    assert not list(DataConfig(**values).problems())


def test_files_of_an_invalid_group_are_checked() -> None:
    config = DataConfig(train_weighted_split_paths=("T: x 0:2 no/file",))
    found = list(data_problems(DataFiles(config), None, None))
    missing = ["data-file-missing"] * 2
    assert codes(found) == ["invalid-weight", "invalid-document-range", *missing]


def test_long_list_is_shortened_in_messages() -> None:
    (found,) = problems(data_path=(*("1 a " * 2500).split(), "1"))
    assert "1 a 1 a 1 a ... (5001 words)" in str(found)
