"""What the data flags say: groups, ranges, files that stand for flags, and every error in words."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ds.config import DataConfig
from megatron_ds.data.blend_spec import (
    AllDocuments,
    BlendSource,
    DatasetGroup,
    FractionRange,
    SplitSelection,
    parse_group,
    read_groups,
)
from megatron_ds.data.validation import data_problems
from tests.problems import codes, fields

FLAG = "--valid-weighted-split-paths"
STEADY = settings(derandomize=True, deadline=None, database=None, max_examples=40)


def problems(**values: Any) -> list[str]:
    """What is wrong with the flags, of themselves and with what stands in their files."""
    config = DataConfig(**values)
    return [*config.problems(), *read_groups(config)[1]]


def only(**values: Any) -> list[DatasetGroup]:
    groups, wrong = read_groups(DataConfig(**values))
    assert not wrong
    return groups


def test_a_group_has_a_name_and_files_with_weights_and_ranges() -> None:
    group, wrong = parse_group(" A B : 3 0:0.6 data/a,1 .5:1 b , 0 0:1 c", "valid", FLAG)
    assert not wrong
    assert group == DatasetGroup(
        "valid",
        "A B",
        f"{FLAG} A B:",
        (
            BlendSource("data/a", 0.75, FractionRange("0:0.6", 0.0, 0.6)),
            BlendSource("b", 0.25, FractionRange(".5:1", 0.5, 1.0)),
        ),
        ("c",),
    )


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("X 1: 1 0.9:1 a", "X 1"),
        ("2 1:1 0:1 a", "2 1"),
        ("0.5:1 0:1 a", "0.5"),
        ("1: 1 0:1 a", "1"),
    ],
)
def test_a_name_may_have_numbers(text: str, name: str) -> None:
    group, wrong = parse_group(text, "valid", FLAG)
    assert not wrong
    assert group.name == name
    assert [source.prefix for source in group.sources] == ["a"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("1 0:1 a", "a group begins with its name and a colon"),
        ("1 0:.5 a, 1 .5:1 b", "a group begins with its name and a colon"),
        ("1 0.5 a", "a group begins with its name and a colon"),
        (": 1 0:1 a", "a group begins with its name and a colon"),
        ("V:", "'' is not WEIGHT START:END PREFIX"),
        ("V: 1 0:1", "'1 0:1' is not WEIGHT START:END PREFIX"),
        ("V: 1 0:1 a b", "'1 0:1 a b' is not WEIGHT START:END PREFIX"),
        ("V: 1 0:1 a,", "'' is not WEIGHT START:END PREFIX"),
        ("V: x 0:1 a", "the weight 'x' must be a number of at least 0"),
        ("V: -1 0:1 a", "the weight '-1' must be a number of at least 0"),
        ("V: inf 0:1 a", "the weight 'inf' must be a number of at least 0"),
        ("V: 0 0:1 a", "all weights are 0"),
        ("V: 1 0.5 a", "the range '0.5' must be START:END with 0 <= START < END <= 1"),
        ("V: 1 0:50 a", "the range '0:50' must be"),
        ("V: 1 1:0 a", "the range '1:0' must be"),
        ("V: 1 .5:.5 a", "the range '.5:.5' must be"),
        ("V: 1 -0.1:1 a", "the range '-0.1:1' must be"),
        ("V: 1 nan:1 a", "the range 'nan:1' must be"),
        ("V: 1 0:.5:1 a", "the range '0:.5:1' must be"),
    ],
)
def test_a_wrong_group_is_named(text: str, words: str) -> None:
    (found,) = parse_group(text, "valid", FLAG)[1]
    assert found.startswith(f"{FLAG} {text!r}: ")
    assert words in found


def test_all_that_is_wrong_comes_at_once() -> None:
    found = problems(
        train_weighted_split_paths=("T: 1 0:1 a", "U: 1 0:1 b"),
        valid_weighted_split_paths=("V: x 0:1 a, 1 0:2 b", "W: 1 0:1 c", "W: 1 0:1 d"),
        test_data_path=("1", "a", "b"),
    )
    for words in (
        "--train-weighted-split-paths has 2 groups: training has one",
        "the weight 'x'",
        "the range '0:2'",
        "--valid-weighted-split-paths has two groups of the name W",
        "--test-data-path 1 a b: must be prefixes alone",
    ):
        assert sum(words in line for line in found) == 1, (words, found)
    assert len(found) == 5


@given(
    entries=st.lists(
        st.tuples(
            st.floats(1e-6, 1e6),
            st.tuples(st.floats(0, 1), st.floats(0, 1)).filter(lambda pair: pair[0] != pair[1]),
            st.from_regex(r"[\w./-]+", fullmatch=True),
        ),
        min_size=1,
        max_size=5,
    ),
    name=st.from_regex(r"[^\s:](?:[^:]*[^\s:])?", fullmatch=True),
)
@STEADY
def test_what_is_written_is_read(entries: list[Any], name: str) -> None:
    bounds = [tuple(sorted(pair)) for _, pair, _ in entries]
    texts = [
        f"{weight!r} {low!r}:{high!r} {prefix}"
        for (weight, _, prefix), (low, high) in zip(entries, bounds, strict=True)
    ]
    group, wrong = parse_group(f"{name}: {', '.join(texts)}", "test", FLAG)
    assert not wrong
    assert group.name == name.strip()
    assert [source.prefix for source in group.sources] == [prefix for *_, prefix in entries]
    total = sum(weight for weight, *_ in entries)
    for source, (weight, *_), (low, high) in zip(group.sources, entries, bounds, strict=True):
        assert source.weight == pytest.approx(weight / total)
        assert isinstance(source.cut, FractionRange)
        assert (source.cut.start, source.cut.end) == (low, high)


@given(text=st.text(max_size=40) | st.text("V: 01.,ab\n", max_size=30))
@STEADY
def test_any_text_is_a_group_or_an_error_that_names_the_flag(text: str) -> None:
    group, wrong = parse_group(text, "test", FLAG)
    assert all(line.startswith(FLAG) for line in wrong)
    if not wrong:
        assert sum(source.weight or 0 for source in group.sources) == pytest.approx(1)


@given(
    cuts=st.lists(st.floats(0, 1), min_size=1, max_size=5).map(lambda x: sorted({0.0, 1.0, *x})),
    size=st.integers(0, 1 << 40),
)
@STEADY
def test_neighbouring_ranges_share_no_document_and_leave_none_out(
    cuts: list[float], size: int
) -> None:
    bounds = [FractionRange("", low, high).bounds(size) for low, high in pairwise(cuts)]
    assert bounds[0][0] == 0
    assert bounds[-1][1] == size
    assert all(before[1] == after[0] for before, after in pairwise(bounds))


@pytest.mark.parametrize(
    ("text", "size", "bounds"),
    [
        ("0:0.95", 30, (0, 28)),  # 28.5: to the even one, as Python's round
        ("0.95:1", 30, (28, 30)),
        ("0.05:0.25", 10, (0, 2)),  # 0.5 and 2.5
        ("0.35:1", 10, (4, 10)),  # 3.5
        ("0.999:1", 10, (10, 10)),
    ],
)
def test_ranges_are_rounded_as_in_bigscience(text: str, size: int, bounds: tuple[int, int]) -> None:
    source = parse_group(f"V: 1 {text} p", "valid", FLAG)[0].sources[0]
    assert source.cut.bounds(size) == bounds


def test_files_hold_what_their_flags_would(tmp_path: Path) -> None:
    blend, parts, groups = tmp_path / "blend", tmp_path / "parts.json", tmp_path / "groups"
    blend.write_text("3 a\n1 b\n")
    parts.write_text(json.dumps({"train": [3, "a", 1, "b"], "valid": "c d", "test": None}))
    line = '"V1: 1 0:1 a, 1 0:0.5 b" "V2: 1 0:1 c"\n'
    groups.write_text(line)

    def comparable(found: list[DatasetGroup]) -> list[Any]:
        return [(group.part, group.name, group.sources) for group in found]

    assert comparable(only(data_args_path=str(blend), split="1,1")) == comparable(
        only(data_path=("3", "a", "1", "b"), split="1,1")
    )
    assert comparable(only(per_split_data_args_path=str(parts))) == comparable(
        only(train_data_path=("3", "a", "1", "b"), valid_data_path=("c", "d"))
    )
    by_flag = only(
        train_data_path=("t",),
        valid_weighted_split_paths=("V1: 1 0:1 a, 1 0:0.5 b", "V2: 1 0:1 c"),
    )
    for text in (line, "V1: 1 0:1 a, 1 0:0.5 b\nV2: 1 0:1 c", line.replace('" "', '"\n\n"')):
        groups.write_text(text)
        by_file = only(train_data_path=("t",), valid_weighted_split_paths_path=str(groups))
        assert comparable(by_file) == comparable(by_flag)


def test_split_cuts_lists_and_a_part_of_share_0_is_not_there() -> None:
    groups = only(data_path=("a", "b"), split="9,0,1")
    assert [group.part for group in groups] == ["train", "test"]
    assert {source.cut for source in groups[1].sources} == {SplitSelection("9,0,1", "test")}
    assert {source.cut for source in only(train_data_path=("a",))[0].sources} == {AllDocuments()}


@pytest.mark.parametrize(
    ("field", "content", "words"),
    [
        ("data_args_path", "", "the file is empty"),
        ("data_args_path", "1 a b", "must be prefixes alone"),
        ("data_args_path", b"\xff\xfe", "cannot be read"),
        ("data_args_path", None, "file not found"),
        ("per_split_data_args_path", "{", "is not JSON"),
        ("per_split_data_args_path", "[]", "must be a JSON object with the keys"),
        ("per_split_data_args_path", '{"training": ["a"]}', "has the key 'training': there are"),
        ("per_split_data_args_path", '{"train": 3}', "train must be a list of prefixes"),
        ("per_split_data_args_path", '{"train": [["a"]]}', "train must be a list of prefixes"),
        ("per_split_data_args_path", '{"valid": ["a"]}', "names no data for train"),
        ("per_split_data_args_path", None, "file not found"),
        ("train_weighted_split_paths_path", "\n", "holds no groups of the form"),
        ("train_weighted_split_paths_path", '"T: 1 0:1', "is not WEIGHT START:END PREFIX"),
        ("train_weighted_split_paths_path", None, "file not found"),
    ],
)
def test_a_wrong_file_is_named(
    tmp_path: Path, field: str, content: str | bytes | None, words: str
) -> None:
    path = tmp_path / "file"
    if isinstance(content, str):
        path.write_text(content)
    elif content is not None:
        path.write_bytes(content)
    (found,) = problems(**{field: str(path)})
    assert found.startswith(f"--{field.replace('_', '-')} {path}:")
    assert words in found


@pytest.mark.parametrize(
    ("given_fields", "code", "names"),
    [
        (f"{first} {others}", "mutually-exclusive", f"{first} {others}")
        for first, others in [
            ("data_path", "train_data_path"),
            ("data_path", "valid_weighted_split_paths test_data_path"),
            ("data_path", "data_args_path"),
            ("data_args_path", "per_split_data_args_path"),
            ("per_split_data_args_path", "test_data_path"),
            (
                "train_data_path",
                "train_weighted_split_paths train_weighted_split_paths_path",
            ),
        ]
    ]
    + [
        ("valid_data_path", "training-data-required", "data_path"),
        ("train_weighted_split_paths split", "split-without-shared-data", "split"),
    ],
)
def test_contradicting_data_flags_are_rejected(given_fields: str, code: str, names: str) -> None:
    values = {
        name: "1" if name == "split" else "x" if name.endswith("args_path") else ("x",)
        for name in given_fields.split()
    }
    found = list(DataConfig(**values).problems())  # type: ignore[arg-type]
    assert codes(found) == [code]
    assert fields(found) == [tuple(names.split())]


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
    assert not list(DataConfig(**values).problems())  # type: ignore[arg-type]


def test_a_group_without_quotes_is_one_problem() -> None:
    (found,) = problems(train_weighted_split_paths=("T:", "1", "0:1", "a"))
    assert "--train-weighted-split-paths T: 1 0:1 a: each group must stand in quotes" in found


def test_the_files_of_a_wrong_group_are_looked_at() -> None:
    config = DataConfig(train_weighted_split_paths=("T: x 0:2 no/file",))
    found = list(data_problems(config, None, None))
    assert [part in line for part, line in zip(("'x'", "'0:2'"), found, strict=False)] == [True] * 2
    assert "T: no/file: there is no file no/file.bin" in "\n".join(found)


def test_a_long_list_is_not_repeated_whole() -> None:
    (found,) = problems(data_path=(*("1 a " * 2500).split(), "1"))
    assert "1 a 1 a 1 a ... (5001 words): must be prefixes alone" in found
