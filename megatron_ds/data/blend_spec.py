"""What the data flags ask for: groups of token files with weights, and the part that is read of
each.

Owns the grammar of the flags and of the files that stand for them. Reads those files; opens no
token files, and knows no ranks and no torch.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

from megatron_ds.config import PER_SPLIT_DATA_FIELDS, DataConfig, file_problems, flag_of
from megatron_ds.data.sample_index import parse_split, split_bounds

DEFAULT_SPLIT = "969,30,1"
NAMES = ("train", "valid", "test")
GROUP_SYNTAX = '"NAME: WEIGHT START:END PREFIX, WEIGHT START:END PREFIX, ..."'
NAMELESS = re.compile(r"\s*[\d.eE+-]+\s+[\d.]+:[\d.]+\s+[^\s,]+\s*(,|$)")
"""A group that begins with an entry."""
SHOWN = 12
"""Words of a list that messages repeat; of a longer one the first half."""


class DocumentSelection(Protocol):
    """The documents of a token file that are read."""

    @property
    def text(self) -> str | None:
        """How the user wrote it; None for all documents."""

    def bounds(self, size: int) -> tuple[int, int]:
        """First and one-past-last of a file's `size` documents."""

    def empty_message(self, part: str, size: int) -> str:
        """What to say where these documents hold no token, and what to do about it."""


@dataclass(frozen=True)
class AllDocuments:
    """All documents."""

    text: str | None = None

    def bounds(self, size: int) -> tuple[int, int]:
        return 0, size

    def empty_message(self, part: str, size: int) -> str:
        return "which holds no tokens: "


@dataclass(frozen=True)
class SplitSelection:
    """A part's documents of a file that --split cuts."""

    text: str
    part: str

    def bounds(self, size: int) -> tuple[int, int]:
        return split_bounds(parse_split(self.text), size)[NAMES.index(self.part)]

    def empty_message(self, part: str, size: int) -> str:
        return (
            f"but --split {self.text} leaves {part} none of its {size} documents: choose another "
            f"--split (0 for no {part} part), or "
        )


@dataclass(frozen=True)
class FractionRange:
    """A share of a file's documents, from `start` to `end`, 0 <= start < end <= 1.

    The first and the one-past-last document are start and end times their number, rounded to the
    nearest whole number (a half to the even one), as bigscience's fork does it: neighbouring ranges
    share no document.
    """

    text: str
    start: float
    end: float

    def bounds(self, size: int) -> tuple[int, int]:
        return round(self.start * float(size)), round(self.end * float(size))

    def empty_message(self, part: str, size: int) -> str:
        return f"but {self.text} leaves none of its {size} documents: choose a wider range, or "


@dataclass(frozen=True)
class BlendSource:
    """A token file in a group. weight: normalised; None: each file gives according to its size."""

    prefix: str
    weight: float | None
    cut: DocumentSelection


@dataclass(frozen=True)
class DatasetGroup:
    """Files that are mixed to one data set.

    part: train, valid or test. name: "" unless the user named it. flag: where it comes from, for
    messages. silent: files of weight 0, which are not opened.
    """

    part: str
    name: str
    flag: str
    sources: tuple[BlendSource, ...]
    zero_weight_files: tuple[str, ...] = ()


def read_groups(config: DataConfig) -> tuple[list[DatasetGroup], list[str]]:
    """The groups of all parts, and what is wrong with the flags, a line each.

    What flags say against each other is left to `DataConfig.problems`.
    """
    groups: list[DatasetGroup] = []
    problems: list[str] = []
    try:
        cuts, problems = _split_selections(config)
        groups += _whole_groups(config, cuts)
    except ValueError as error:
        problems.append(str(error))
    for part, fields in PER_SPLIT_DATA_FIELDS.items():
        for field in fields:
            given = getattr(config, field)
            if not given:
                continue
            try:
                if field.endswith("_data_path"):
                    groups.append(_prefix_group(part, flag_of(field), given, AllDocuments()))
                else:
                    found, wrong = _weighted_groups(part, field, given)
                    groups += found
                    problems += wrong
            except ValueError as error:
                problems.append(str(error))
    if config.per_split_data_args_path is not None:
        try:
            groups += _per_split_groups(config.per_split_data_args_path)
        except ValueError as error:
            problems += str(error).split("\n")
    return groups, problems


def parse_blend(paths: Sequence[str], flag: str) -> tuple[list[float] | None, list[str]]:
    """Normalised weights and prefixes of `WEIGHT PREFIX WEIGHT PREFIX ...`; weight 0 drops out.

    `PREFIX PREFIX ...`, where no prefix is a number, has no weights: each file gives according to
    its size. Raises ValueError for anything else.
    """
    given = f"{flag} {_shown(paths)}"
    if not any(_is_number(path) for path in paths):
        return None, list(paths)
    if len(paths) % 2:
        raise ValueError(f"{given}: must be prefixes alone, or WEIGHT PREFIX WEIGHT PREFIX ...")
    weights = [_weight(text, given) for text in paths[::2]]
    kept = [prefix for weight, prefix in zip(weights, paths[1::2], strict=True) if weight]
    return _normalised(weights, given), kept


def parse_group(text: str, part: str, flag: str) -> tuple[DatasetGroup, list[str]]:
    """A group of `NAME: WEIGHT START:END PREFIX, ...`, and what is wrong with it, a line each.

    Where something is, the group holds what could be read, of which only the prefixes count.
    """
    given = f"{flag} {text!r}"
    name, _, rest = text.partition(":")
    if ":" not in text or not name.strip() or NAMELESS.match(text):
        nameless = f"{given}: a group begins with its name and a colon: {GROUP_SYNTAX}, in quotes"
        return DatasetGroup(part, "", flag, ()), [nameless]
    name = name.strip()
    problems: list[str] = []
    found: list[tuple[float, DocumentSelection, str]] = []
    for entry in rest.split(","):
        words = entry.split()
        if len(words) != 3:
            problems.append(f"{given}: {entry.strip()!r} is not WEIGHT START:END PREFIX")
            continue
        weight, cut = 1.0, cast(DocumentSelection, AllDocuments())
        try:
            weight = _weight(words[0], given)
        except ValueError as error:
            problems.append(str(error))
        try:
            cut = _range(words[1], given)
        except ValueError as error:
            problems.append(str(error))
        found.append((weight, cut, words[2]))
    kept = [(cut, prefix) for weight, cut, prefix in found if weight]
    weights = [0.0] * len(kept)
    if not problems:
        try:
            weights = _normalised([weight for weight, _, _ in found], given)
        except ValueError as error:
            problems.append(str(error))
    sources = tuple(
        BlendSource(prefix, weight, cut)
        for weight, (cut, prefix) in zip(weights, kept, strict=True)
    )
    silent = tuple(prefix for weight, _, prefix in found if not weight)
    return DatasetGroup(part, name, f"{flag} {name}:", sources, silent), problems


def _split_selections(config: DataConfig) -> tuple[dict[str, DocumentSelection], list[str]]:
    """The parts that --split gives documents to. A split that is none counts as one of training,
    so that the files are looked at all the same."""
    if not config.data_path and config.data_args_path is None:
        return {}, []
    text = config.split or DEFAULT_SPLIT
    try:
        shares = parse_split(text)
    except ValueError as error:
        return {"train": AllDocuments()}, [str(error)]
    cuts: dict[str, DocumentSelection] = {
        part: SplitSelection(text, part) for part, share in zip(NAMES, shares, strict=True) if share
    }
    problems = [] if shares[0] else [f"--split {text}: leaves no documents for training"]
    return cuts, problems


def _whole_groups(config: DataConfig, cuts: dict[str, DocumentSelection]) -> list[DatasetGroup]:
    """Of the flags whose data --split cuts."""
    paths, flag = config.data_path, "--data-path"
    if not paths and config.data_args_path is not None:
        flag = f"--data-args-path {config.data_args_path}:"
        paths = tuple(_text_of("--data-args-path", config.data_args_path).split())
        if not paths:
            raise ValueError(f"{flag} the file is empty")
    return [_prefix_group(part, flag, paths, cut) for part, cut in cuts.items()] if paths else []


def _prefix_group(
    part: str, flag: str, paths: Sequence[str], cut: DocumentSelection
) -> DatasetGroup:
    """Of a list of prefixes, or of weights and prefixes."""
    if len(paths) == 1:
        return DatasetGroup(part, "", flag, (BlendSource(paths[0], None, cut),))
    weights, prefixes = parse_blend(paths, flag)
    if weights is None:
        return DatasetGroup(
            part, "", flag, tuple(BlendSource(prefix, None, cut) for prefix in prefixes)
        )
    silent = (path for text, path in zip(paths[::2], paths[1::2], strict=True) if not float(text))
    sources = zip(prefixes, weights, strict=True)
    return DatasetGroup(
        part,
        "",
        flag,
        tuple(BlendSource(prefix, weight, cut) for prefix, weight in sources),
        tuple(silent),
    )


def _weighted_groups(
    part: str, field: str, given: str | tuple[str, ...]
) -> tuple[list[DatasetGroup], list[str]]:
    flag = flag_of(field)
    if isinstance(given, str):
        texts = _groups_in(_text_of(flag, given))
        flag = f"{flag} {given}:"
        if not texts:
            raise ValueError(f"{flag} holds no groups of the form {GROUP_SYNTAX}")
    else:
        texts = list(given)
        if len(texts) > 1 and not any(len(text.split()) > 1 for text in texts):
            raise ValueError(
                f"{flag} {_shown(texts)}: each group must stand in quotes: {GROUP_SYNTAX}"
            )
    parsed = [parse_group(text, part, flag) for text in texts]
    groups = [group for group, _ in parsed]
    problems = [problem for _, wrong in parsed for problem in wrong]
    names = [group.name for group in groups if group.name]
    problems += [
        f"{flag} has two groups of the name {name}: give each its own"
        for name in dict.fromkeys(names)
        if names.count(name) > 1
    ]
    if part == "train" and len(texts) > 1:
        problems.append(f"{flag} has {len(texts)} groups: training has one (put its data into it)")
    return groups, problems


def _per_split_groups(path: str) -> list[DatasetGroup]:
    flag = f"--per-split-data-args-path {path}:"
    try:
        found = json.loads(_text_of("--per-split-data-args-path", path))
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{flag} is not JSON ({error})") from error
    if not isinstance(found, dict):
        raise ValueError(f"{flag} must be a JSON object with the keys {', '.join(NAMES)}")
    if unknown := [key for key in found if key not in NAMES]:
        raise ValueError(f"{flag} has the key {unknown[0]!r}: there are {', '.join(NAMES)}")
    groups, problems = [], []
    for part in NAMES:
        try:
            words = _words(found.get(part), f"{flag} {part}")
            if words:
                groups.append(_prefix_group(part, f"{flag} {part}", words, AllDocuments()))
        except ValueError as error:
            problems.append(str(error))
    if not found.get("train"):
        problems.append(f"{flag} names no data for train")
    if problems:
        raise ValueError("\n".join(problems))
    return groups


def _words(value: Any, flag: str) -> list[str]:
    """A list of prefixes and weights, or a text of them."""
    if value is None:
        return []
    if isinstance(value, str):
        return value.split()
    plain = isinstance(value, list) and all(
        isinstance(word, str | int | float) and not isinstance(word, bool) for word in value
    )
    if not plain:
        raise ValueError(f"{flag} must be a list of prefixes, or of weights and prefixes")
    return [str(word) for word in value]


def _text_of(flag: str, path: str) -> str:
    for problem in file_problems(flag.removeprefix("--").replace("-", "_"), path):
        raise ValueError(problem)
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{flag} {path}: cannot be read ({error})") from error


def _groups_in(text: str) -> list[str]:
    """The groups of a file: what stands in quotes or, without any quotes, its lines."""
    quoted = re.findall(r'"([^"]*)"', text)
    rest = re.sub(r'"[^"]*"', "", text)
    return [group for group in (*quoted, *rest.splitlines()) if group.strip()]


def _range(text: str, given: str) -> FractionRange:
    try:
        start, end = (float(bound) for bound in text.split(":"))
    except ValueError:
        start, end = math.nan, math.nan
    if not 0 <= start < end <= 1:
        raise ValueError(
            f"{given}: the range {text!r} must be START:END with 0 <= START < END <= 1, such as "
            "0:0.95"
        )
    return FractionRange(text, start, end)


def _normalised(weights: Sequence[float], given: str) -> list[float]:
    """The weights that are not 0, made to sum to 1."""
    kept = [weight for weight in weights if weight]
    try:
        total = math.fsum(kept)
    except OverflowError:
        raise ValueError(f"{given}: the weights' sum is no number") from None
    if total <= 0:
        raise ValueError(f"{given}: all weights are 0")
    return [weight / total for weight in kept]


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _weight(text: str, given: str) -> float:
    try:
        weight = float(text)
    except ValueError:
        weight = math.nan
    if not (math.isfinite(weight) and weight >= 0):
        raise ValueError(f"{given}: the weight {text!r} must be a number of at least 0")
    return weight


def _shown(words: Sequence[str]) -> str:
    if len(words) <= SHOWN:
        return " ".join(words)
    return f"{' '.join(words[: SHOWN // 2])} ... ({len(words)} words)"
