"""Parses the data flags: datasets of train, valid and test, with files, weights and documents.

Owns the syntax of the flags and of the files that they name. Reads no tokens, and knows no ranks
and no torch.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from megatron_ds.config import DataConfig, flag_of
from megatron_ds.config.checks import file_problems
from megatron_ds.config.options.data import PER_SPLIT_DATA_FIELDS
from megatron_ds.config.problems import Problem, collect, raise_if_any, user_error
from megatron_ds.data.sample_index import parse_split, split_bounds
from megatron_ds.data.token_files.file_formats import TEXT_FILE, recognize
from megatron_ds.data.token_files.probed_files import LocalFiles, ProbedFile

DEFAULT_SPLIT = "969,30,1"
SPLITS = ("train", "valid", "test")
GROUP_SYNTAX = '"NAME: WEIGHT START:END PREFIX, WEIGHT START:END PREFIX, ..."'
UNNAMED_GROUP = re.compile(r"\s*[\d.eE+-]+\s+[\d.]+:[\d.]+\s+[^\s,]+\s*(,|$)")
"""Matches a group that begins with an entry instead of its name."""
MAX_SHOWN_WORDS = 12
"""Most words of a flag that a message repeats."""


@dataclass(frozen=True)
class DocumentSelection:
    """Documents of a token file that are read: all of them, unless a subclass selects some.

    Attributes:
        text: Selection as given by the user; None for all documents.
    """

    text: str | None
    may_be_empty: ClassVar[bool] = False
    """Whether validation and test do without documents instead."""

    def range_of(self, size: int) -> tuple[int, int]:
        """First document and end, for a file of `size` documents."""
        return 0, size

    def empty_message(self, split: str, size: int) -> str:
        """Reason that the selection has no tokens, and what to change; completes a sentence."""
        return "which has no tokens: "


ALL_DOCUMENTS = DocumentSelection(None)


@dataclass(frozen=True)
class SplitSelection(DocumentSelection):
    """The documents of a split, by --split."""

    text: str
    split: str
    rounding: str = "megatron-deepspeed"
    may_be_empty = True

    def range_of(self, size: int) -> tuple[int, int]:
        bounds = split_bounds(parse_split(self.text), size, self.rounding)
        return bounds[SPLITS.index(self.split)]

    def empty_message(self, split: str, size: int) -> str:
        return (
            f"but --split {self.text} gives {split} none of its {size} documents: choose another "
            "--split, or "
        )


@dataclass(frozen=True)
class FractionRange(DocumentSelection):
    """The fraction of a file's documents from `start` to `end`, 0 <= start < end <= 1.

    Bounds are rounded to the nearest document (halves to even), as in bigscience's fork, so that
    adjacent ranges are disjoint.
    """

    text: str
    start: float
    end: float

    def range_of(self, size: int) -> tuple[int, int]:
        return round(self.start * float(size)), round(self.end * float(size))

    def empty_message(self, split: str, size: int) -> str:
        return f"but {self.text} selects none of its {size} documents: choose a wider range, or "


@dataclass(frozen=True)
class BlendSource:
    """A token file of a blend.

    Attributes:
        prefix: Path of the pair of token files.
        weight: The weights of a blend sum to 1; None to weight files by size.
        documents: The documents to read.
        given_weight: The weight as it was given; None for a source without a weight.
    """

    prefix: str
    weight: float | None
    documents: DocumentSelection
    given_weight: float | None = dataclasses.field(default=None, compare=False)


@dataclass(frozen=True)
class DatasetGroup:
    """Token files that form one dataset.

    Attributes:
        split: train, valid or test.
        name: Name given by the user, or "".
        flag: Where it comes from, for messages.
        sources: The files of the blend.
        zero_weight_files: Files of weight 0, which are not opened.
    """

    split: str
    name: str
    flag: str
    sources: tuple[BlendSource, ...]
    zero_weight_files: tuple[str, ...] = ()

    def without(self, sources: Sequence[BlendSource]) -> DatasetGroup:
        """The group without some of its files; the other weights keep their ratios."""
        rest = [source for source in self.sources if source not in sources]
        total = math.fsum(source.weight or 0 for source in rest) or 1
        renormalized = (replace(one, weight=one.weight and one.weight / total) for one in rest)
        return replace(self, sources=tuple(renormalized))


def read_groups(config: DataConfig) -> tuple[list[DatasetGroup], list[Problem]]:
    """Parses the data flags.

    Contradictions between flags are reported by `DataConfig.problems`.

    Returns:
        The datasets of all splits, and the problems of the flags.
    """
    groups: list[DatasetGroup] = []
    problems: list[Problem] = []
    with collect(problems):
        groups += _split_groups(config, problems)
    for split, fields in PER_SPLIT_DATA_FIELDS.items():
        for field in fields:
            value = getattr(config, field)
            with collect(problems):
                if value and field.endswith("_data_path"):
                    groups.append(parse_blend(value, split, flag_of(field), field))
                elif value:
                    groups += _weighted_groups(split, field, value, problems)
    if config.per_split_data_args_path is not None:
        with collect(problems):
            groups += _per_split_groups(config.per_split_data_args_path)
    return groups, problems


def parse_blend(
    paths: Sequence[str],
    split: str,
    flag: str,
    field: str = "data_path",
    documents: DocumentSelection = ALL_DOCUMENTS,
) -> DatasetGroup:
    """Parses `WEIGHT PREFIX WEIGHT PREFIX ...` or `PREFIX PREFIX ...`.

    Args:
        paths: The words.
        split: train, valid or test.
        flag: Where they come from, for messages.
        field: Option field concerned.
        documents: The documents to read of each file.

    Raises:
        UserError: For anything else.
    """
    if len(paths) == 1 or all(_parse_number(path) is None for path in paths):
        sources = tuple(BlendSource(path, None, documents) for path in paths)
        return DatasetGroup(split, "", flag, sources)
    origin = f"{flag} {_shorten(paths)}"
    if len(paths) % 2:
        raise user_error("blend-syntax", field, given=origin)
    sources = tuple(
        BlendSource(prefix, _parse_weight(weight, origin, field), documents)
        for weight, prefix in zip(paths[::2], paths[1::2], strict=True)
    )
    return DatasetGroup(split, "", flag, _normalize(sources, origin, field), _unread(sources))


def parse_group(
    text: str, split: str, flag: str, field: str = ""
) -> tuple[DatasetGroup, list[Problem]]:
    """Parses `NAME: WEIGHT START:END PREFIX, ...`.

    Returns:
        The group and its problems. If there are any, only the prefixes of the group are valid.
    """
    origin = f"{flag} {text!r}"
    name, _, rest = text.partition(":")
    if ":" not in text or not name.strip() or UNNAMED_GROUP.match(text):
        unnamed = Problem("unnamed-group", field, given=origin, group=GROUP_SYNTAX)
        return DatasetGroup(split, "", flag, ()), [unnamed]
    name = name.strip()
    problems: list[Problem] = []
    entries: list[BlendSource] = []
    for entry in rest.split(","):
        words = entry.split()
        if len(words) != 3:
            problems.append(Problem("group-entry-syntax", field, given=origin, entry=entry.strip()))
            continue
        weight = 1.0
        documents = ALL_DOCUMENTS
        with collect(problems):
            weight = _parse_weight(words[0], origin, field)
        with collect(problems):
            documents = _parse_range(words[1], origin, field)
        entries.append(BlendSource(words[2], weight, documents))
    sources = tuple(source for source in entries if source.weight)
    if not problems:
        with collect(problems):
            sources = _normalize(entries, origin, field)
    return DatasetGroup(split, name, f"{flag} {name}:", sources, _unread(entries)), problems


def _split_groups(config: DataConfig, problems: list[Problem]) -> list[DatasetGroup]:
    """Datasets of the flags to which --split applies.

    An invalid --split counts as all documents for train, so that the files are still checked.
    """
    if not config.data_path and config.data_args_path is None:
        return []
    text = config.split or DEFAULT_SPLIT
    selections = {"train": ALL_DOCUMENTS}
    with collect(problems):
        shares = zip(SPLITS, parse_split(text), strict=True)
        selections = {
            split: SplitSelection(text, split, config.split_rounding)
            for split, share in shares
            if share
        }
        if "train" not in selections:
            problems.append(Problem("split-without-train", text=text))
    paths = config.data_path or ()
    flag = "--data-path"
    field = "data_path"
    if not paths and config.data_args_path is not None:
        field = "data_args_path"
        flag = f"--data-args-path {config.data_args_path}:"
        paths = tuple(_read_text(config.data_args_path, field).split())
        if not paths:
            raise user_error("empty-data-args-file", field, flag=flag)
    return [
        parse_blend(paths, split, flag, field, documents) for split, documents in selections.items()
    ]


def _weighted_groups(
    split: str, field: str, value: str | tuple[str, ...], problems: list[Problem]
) -> list[DatasetGroup]:
    flag = flag_of(field)
    if isinstance(value, str):
        texts = _parse_group_file(_read_text(value, field))
        flag = f"{flag} {value}:"
        if not texts:
            raise user_error("no-groups-in-file", field, flag=flag, group=GROUP_SYNTAX)
    else:
        texts = list(value)
        if len(texts) > 1 and not any(len(text.split()) > 1 for text in texts):
            raise user_error(
                "group-not-quoted", field, flag=flag, shorten=_shorten(texts), group=GROUP_SYNTAX
            )
    groups = []
    for text in texts:
        group, group_problems = parse_group(text, split, flag, field)
        groups.append(group)
        problems += group_problems
    problems += [
        Problem("duplicate-group-name", field, flag=flag, name=name)
        for name, count in Counter(group.name for group in groups if group.name).items()
        if count > 1
    ]
    if split == "train" and len(texts) > 1:
        problems.append(Problem("several-train-groups", field, flag=flag, num_texts=len(texts)))
    return groups


def _per_split_groups(path: str) -> list[DatasetGroup]:
    """Datasets of a JSON object with the keys train, valid and test."""
    field = "per_split_data_args_path"
    flag = f"--per-split-data-args-path {path}:"
    try:
        values = json.loads(_read_text(path, field, is_json=True))
    except (json.JSONDecodeError, RecursionError) as error:
        raise user_error("per-split-file-not-json", field, flag=flag, error=error) from error
    if not isinstance(values, dict) or any(key not in SPLITS for key in values):
        raise user_error("per-split-file-keys", field, flag=flag, splits=", ".join(SPLITS))
    groups: list[DatasetGroup] = []
    problems: list[Problem] = []
    for split in SPLITS:
        with collect(problems):
            words = _as_words(values.get(split), f"{flag} {split}", field)
            if words:
                groups.append(parse_blend(words, split, f"{flag} {split}", field))
    if not values.get("train"):
        problems.append(Problem("per-split-file-without-train", field, flag=flag))
    raise_if_any(problems)
    return groups


def _as_words(value: Any, flag: str, field: str) -> list[str]:
    """A list of prefixes and weights, or a string of them."""
    if value is None:
        return []
    if isinstance(value, str):
        return value.split()
    is_plain = isinstance(value, list) and all(
        isinstance(word, str | int | float) and not isinstance(word, bool) for word in value
    )
    if not is_plain:
        raise user_error("per-split-file-entry", field, flag=flag)
    return [str(word) for word in value]


def _read_text(path: str, field: str, *, is_json: bool = False) -> str:
    """The content of a file that lists prefixes.

    Args:
        path: The file.
        field: Option field concerned.
        is_json: Whether it is a JSON object.

    Raises:
        UserError: If it cannot be read, or holds data instead.
    """
    raise_if_any(file_problems(field, path))
    recognized = recognize(ProbedFile(LocalFiles(), path))
    description = "" if recognized is None else recognized.description
    try:
        if recognized is None or recognized.format is TEXT_FILE:
            text = Path(path).read_text(encoding="utf-8-sig")
            if is_json or not text.lstrip().startswith(("{", "[")):
                return text
            description = "a JSON file"
    except (OSError, UnicodeDecodeError) as error:
        raise user_error(
            "data-args-file-unreadable", field, flag=flag_of(field), path=path, error=error
        ) from error
    raise user_error("data-args-file-of-other-format", field, path=path, description=description)


def _parse_group_file(text: str) -> list[str]:
    """The groups of a file: quoted strings or, without quotes, lines."""
    quoted = re.findall(r'"([^"]*)"', text)
    rest = re.sub(r'"[^"]*"', "", text)
    return [group for group in (*quoted, *rest.splitlines()) if group.strip()]


def _parse_range(text: str, origin: str, field: str) -> FractionRange:
    try:
        start, end = (float(bound) for bound in text.split(":"))
    except ValueError:
        start = math.nan
        end = math.nan
    if not 0 <= start < end <= 1:
        raise user_error("invalid-document-range", field, given=origin, text=text)
    return FractionRange(text, start, end)


def _normalize(sources: Sequence[BlendSource], origin: str, field: str) -> tuple[BlendSource, ...]:
    """The sources of non-zero weight, with weights scaled to sum to 1."""
    try:
        total = math.fsum(source.weight or 0 for source in sources)
    except OverflowError:
        total = math.inf
    if not 0 < total < math.inf:
        raise user_error("invalid-weight-sum", field, given=origin, total=total)
    return tuple(
        replace(one, weight=one.weight / total, given_weight=one.weight)
        for one in sources
        if one.weight
    )


def _unread(sources: Sequence[BlendSource]) -> tuple[str, ...]:
    return tuple(source.prefix for source in sources if not source.weight)


def _parse_number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _parse_weight(text: str, origin: str, field: str) -> float:
    weight = _parse_number(text)
    if weight is None or not 0 <= weight < math.inf:
        raise user_error("invalid-weight", field, given=origin, text=text)
    return weight


def _shorten(words: Sequence[str]) -> str:
    if len(words) <= MAX_SHOWN_WORDS:
        return " ".join(words)
    return f"{' '.join(words[: MAX_SHOWN_WORDS // 2])} ... ({len(words)} words)"
