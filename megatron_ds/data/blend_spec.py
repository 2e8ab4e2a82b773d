"""Parses the data flags: datasets of train, valid and test, with files, weights and documents.

Owns the syntax of the flags and of the files that they name. Opens no token files, and knows no
ranks and no torch.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

from megatron_ds.config import DataConfig, flag_of
from megatron_ds.config.checks import file_problems
from megatron_ds.config.data import PER_SPLIT_DATA_FIELDS
from megatron_ds.config.problems import Problem, UserError, collect, raise_if_any, user_error
from megatron_ds.data.sample_index import parse_split, split_bounds

DEFAULT_SPLIT = "969,30,1"
SPLITS = ("train", "valid", "test")
GROUP_SYNTAX = '"NAME: WEIGHT START:END PREFIX, WEIGHT START:END PREFIX, ..."'
UNNAMED_GROUP = re.compile(r"\s*[\d.eE+-]+\s+[\d.]+:[\d.]+\s+[^\s,]+\s*(,|$)")
"""Matches a group that begins with an entry instead of its name."""
MAX_SHOWN_WORDS = 12
"""Most words of a flag that a message repeats."""


class DocumentSelection(Protocol):
    """Selects the documents of a token file that are read."""

    @property
    def text(self) -> str | None:
        """As given by the user; None for all documents."""

    def range_of(self, size: int) -> tuple[int, int]:
        """First document and end, for a file of `size` documents."""

    def empty_message(self, split: str, size: int) -> str:
        """Why the selection has no tokens, and what to change; completes a sentence."""


@dataclass(frozen=True)
class AllDocuments:
    """All documents."""

    text: str | None = None

    def range_of(self, size: int) -> tuple[int, int]:
        return 0, size

    def empty_message(self, split: str, size: int) -> str:
        return "which has no tokens: "


@dataclass(frozen=True)
class SplitSelection:
    """The documents of a split, by --split."""

    text: str
    split: str

    def range_of(self, size: int) -> tuple[int, int]:
        return split_bounds(parse_split(self.text), size)[SPLITS.index(self.split)]

    def empty_message(self, split: str, size: int) -> str:
        return (
            f"but --split {self.text} gives {split} none of its {size} documents: choose another "
            f"--split (0 for no {split} data), or "
        )


@dataclass(frozen=True)
class FractionRange:
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
    """

    prefix: str
    weight: float | None
    documents: DocumentSelection


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


def read_groups(config: DataConfig) -> tuple[list[DatasetGroup], list[Problem]]:
    """Parses the data flags.

    Contradictions between flags are reported by `DataConfig.problems`.

    Returns:
        The datasets of all splits, and the problems of the flags.
    """
    groups: list[DatasetGroup] = []
    problems: list[Problem] = []
    with collect(problems):
        selections, found = _split_selections(config)
        problems += found
        groups += _split_groups(config, selections)
    for split, fields in PER_SPLIT_DATA_FIELDS.items():
        for field in fields:
            given = getattr(config, field)
            if not given:
                continue
            with collect(problems):
                if field.endswith("_data_path"):
                    groups.append(
                        _prefix_group(split, flag_of(field), given, AllDocuments(), field)
                    )
                else:
                    weighted, found = _weighted_groups(split, field, given)
                    groups += weighted
                    problems += found
    if config.per_split_data_args_path is not None:
        with collect(problems):
            groups += _per_split_groups(config.per_split_data_args_path)
    return groups, problems


def parse_blend(
    paths: Sequence[str], flag: str, field: str = "data_path"
) -> tuple[list[float] | None, list[str]]:
    """Parses `WEIGHT PREFIX WEIGHT PREFIX ...` or `PREFIX PREFIX ...`.

    Args:
        paths: The words.
        flag: Where they come from, for messages.
        field: Option field concerned.

    Returns:
        Weights that sum to 1, or None without weights, and the prefixes. Sources of weight 0 are
        left out.

    Raises:
        UserError: For anything else.
    """
    given = f"{flag} {_shorten(paths)}"
    if not any(_is_number(path) for path in paths):
        return None, list(paths)
    if len(paths) % 2:
        raise user_error("blend-syntax", field, given=given)
    weights = [_parse_weight(text, given, field) for text in paths[::2]]
    kept = [prefix for weight, prefix in zip(weights, paths[1::2], strict=True) if weight]
    return _normalize(weights, given, field), kept


def parse_group(
    text: str, split: str, flag: str, field: str = ""
) -> tuple[DatasetGroup, list[Problem]]:
    """Parses `NAME: WEIGHT START:END PREFIX, ...`.

    Returns:
        The group and its problems. If there are any, only the prefixes of the group are valid.
    """
    given = f"{flag} {text!r}"
    name, _, rest = text.partition(":")
    if ":" not in text or not name.strip() or UNNAMED_GROUP.match(text):
        unnamed = Problem("unnamed-group", field, given=given, group=GROUP_SYNTAX)
        return DatasetGroup(split, "", flag, ()), [unnamed]
    name = name.strip()
    problems: list[Problem] = []
    found: list[tuple[float, DocumentSelection, str]] = []
    for entry in rest.split(","):
        words = entry.split()
        if len(words) != 3:
            problems.append(Problem("group-entry-syntax", field, given=given, entry=entry.strip()))
            continue
        weight, documents = 1.0, cast(DocumentSelection, AllDocuments())
        with collect(problems):
            weight = _parse_weight(words[0], given, field)
        with collect(problems):
            documents = _parse_range(words[1], given, field)
        found.append((weight, documents, words[2]))
    kept = [(documents, prefix) for weight, documents, prefix in found if weight]
    weights = [0.0] * len(kept)
    if not problems:
        with collect(problems):
            weights = _normalize([weight for weight, _, _ in found], given, field)
    sources = tuple(
        BlendSource(prefix, weight, documents)
        for weight, (documents, prefix) in zip(weights, kept, strict=True)
    )
    unread = tuple(prefix for weight, _, prefix in found if not weight)
    return DatasetGroup(split, name, f"{flag} {name}:", sources, unread), problems


def _split_selections(config: DataConfig) -> tuple[dict[str, DocumentSelection], list[Problem]]:
    """The documents of each split by --split.

    An invalid --split counts as all documents for train, so that the files are still checked.
    """
    if not config.data_path and config.data_args_path is None:
        return {}, []
    text = config.split or DEFAULT_SPLIT
    try:
        fractions = parse_split(text)
    except UserError as error:
        return {"train": AllDocuments()}, list(error.problems)
    selections: dict[str, DocumentSelection] = {
        split: SplitSelection(text, split)
        for split, fraction in zip(SPLITS, fractions, strict=True)
        if fraction
    }
    if fractions[0]:
        return selections, []
    return selections, [Problem("split-without-train", text=text)]


def _split_groups(
    config: DataConfig, selections: dict[str, DocumentSelection]
) -> list[DatasetGroup]:
    """Datasets of the flags to which --split applies."""
    paths, flag, field = config.data_path, "--data-path", "data_path"
    if not paths and config.data_args_path is not None:
        field = "data_args_path"
        flag = f"--data-args-path {config.data_args_path}:"
        paths = tuple(_read_text("--data-args-path", config.data_args_path, field).split())
        if not paths:
            raise user_error("empty-data-args-file", field, flag=flag)
    if not paths:
        return []
    return [
        _prefix_group(split, flag, paths, documents, field)
        for split, documents in selections.items()
    ]


def _prefix_group(
    split: str, flag: str, paths: Sequence[str], documents: DocumentSelection, field: str
) -> DatasetGroup:
    """The dataset of a list of prefixes, or of weights and prefixes."""
    if len(paths) == 1:
        return DatasetGroup(split, "", flag, (BlendSource(paths[0], None, documents),))
    weights, prefixes = parse_blend(paths, flag, field)
    unread: tuple[str, ...] = ()
    given: Sequence[float | None] = weights or [None] * len(prefixes)
    if weights is not None:
        entries = zip(paths[::2], paths[1::2], strict=True)
        unread = tuple(path for text, path in entries if not float(text))
    sources = zip(prefixes, given, strict=True)
    blend = tuple(BlendSource(prefix, weight, documents) for prefix, weight in sources)
    return DatasetGroup(split, "", flag, blend, unread)


def _weighted_groups(
    split: str, field: str, given: str | tuple[str, ...]
) -> tuple[list[DatasetGroup], list[Problem]]:
    flag = flag_of(field)
    if isinstance(given, str):
        texts = _parse_group_file(_read_text(flag, given, field))
        flag = f"{flag} {given}:"
        if not texts:
            raise user_error("no-groups-in-file", field, flag=flag, group=GROUP_SYNTAX)
    else:
        texts = list(given)
        if len(texts) > 1 and not any(len(text.split()) > 1 for text in texts):
            raise user_error(
                "group-not-quoted", field, flag=flag, shorten=_shorten(texts), group=GROUP_SYNTAX
            )
    parsed = [parse_group(text, split, flag, field) for text in texts]
    groups = [group for group, _ in parsed]
    problems = [problem for _, found in parsed for problem in found]
    names = [group.name for group in groups if group.name]
    problems += [
        Problem("duplicate-group-name", field, flag=flag, name=name)
        for name in dict.fromkeys(names)
        if names.count(name) > 1
    ]
    if split == "train" and len(texts) > 1:
        problems.append(Problem("several-train-groups", field, flag=flag, num_texts=len(texts)))
    return groups, problems


def _per_split_groups(path: str) -> list[DatasetGroup]:
    """Datasets of a JSON object with the keys train, valid and test."""
    field = "per_split_data_args_path"
    flag = f"--per-split-data-args-path {path}:"
    try:
        found = json.loads(_read_text("--per-split-data-args-path", path, field))
    except (json.JSONDecodeError, RecursionError) as error:
        raise user_error("per-split-file-not-json", field, flag=flag, error=error) from error
    if not isinstance(found, dict) or any(key not in SPLITS for key in found):
        raise user_error("per-split-file-keys", field, flag=flag, splits=", ".join(SPLITS))
    groups: list[DatasetGroup] = []
    problems: list[Problem] = []
    for split in SPLITS:
        with collect(problems):
            words = _as_words(found.get(split), f"{flag} {split}", field)
            if words:
                groups.append(_prefix_group(split, f"{flag} {split}", words, AllDocuments(), field))
    if not found.get("train"):
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


def _read_text(flag: str, path: str, field: str) -> str:
    raise_if_any(file_problems(field, path))
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise user_error(
            "data-args-file-unreadable", field, flag=flag, path=path, error=error
        ) from error


def _parse_group_file(text: str) -> list[str]:
    """The groups of a file: quoted strings or, without quotes, lines."""
    quoted = re.findall(r'"([^"]*)"', text)
    rest = re.sub(r'"[^"]*"', "", text)
    return [group for group in (*quoted, *rest.splitlines()) if group.strip()]


def _parse_range(text: str, given: str, field: str) -> FractionRange:
    try:
        start, end = (float(bound) for bound in text.split(":"))
    except ValueError:
        start, end = math.nan, math.nan
    if not 0 <= start < end <= 1:
        raise user_error("invalid-document-range", field, given=given, text=text)
    return FractionRange(text, start, end)


def _normalize(weights: Sequence[float], given: str, field: str) -> list[float]:
    """The non-zero weights, scaled to sum to 1."""
    kept = [weight for weight in weights if weight]
    try:
        total = math.fsum(kept)
    except OverflowError:
        total = math.inf
    if not 0 < total < math.inf:
        raise user_error("invalid-weight-sum", field, given=given, total=total)
    return [weight / total for weight in kept]


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _parse_weight(text: str, given: str, field: str) -> float:
    try:
        weight = float(text)
    except ValueError:
        weight = math.nan
    if not (math.isfinite(weight) and weight >= 0):
        raise user_error("invalid-weight", field, given=given, text=text)
    return weight


def _shorten(words: Sequence[str]) -> str:
    if len(words) <= MAX_SHOWN_WORDS:
        return " ".join(words)
    return f"{' '.join(words[: MAX_SHOWN_WORDS // 2])} ... ({len(words)} words)"
