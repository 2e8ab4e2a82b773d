"""Formats the contents of checkpoints as lines for a terminal."""

from __future__ import annotations

import itertools
import json
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from megatron_ds.config.problems import counted, sized
from megatron_ds.launch.output import columns

if TYPE_CHECKING:  # torch takes seconds to import
    from megatron_ds.conversion.inspect.compare import Comparison, TensorDifference
    from megatron_ds.conversion.inspect.open import CheckpointSummary
    from megatron_ds.conversion.inspect.verify import Verification
    from megatron_ds.engine.states.state_reader import TensorReader

WIDTH = 100
SHOWN_DIFFERENCES = 40
LAYER = re.compile(r"layers\.(\d+)\.")


def verified_line(result: Verification) -> str:
    """The result for a checkpoint, or for the pointers of its folder, without the problems."""
    if result.problems:
        return f"{result.path}: {counted(len(result.problems), 'problem')}"
    if not result.num_files:
        return f"{result.path}: the pointers name a checkpoint of the folder"
    if result.has_checksums:
        how = "have the size and checksum of the manifest"
    else:
        how = "can be read; the format has no checksums of its own"
    return f"{result.path}: {counted(result.num_files, 'file')}, {sized(result.num_bytes)}, {how}"


def summary_lines(opened: CheckpointSummary) -> Iterator[str]:
    """Summarizes the checkpoint in a few lines."""
    iteration = opened.progress.get("iteration")
    at = "weights alone" if iteration is None else f"iteration {iteration:,}"
    yield f"{opened.path}: {opened.format}, {at}"
    yield f"  {opened.num_parameters:,} parameters"
    for key, tensors in opened.tensors.items():
        dtypes = dict.fromkeys(map(dtype_of, tensors.values()))
        size = sum(tensor.nbytes for tensor in tensors.values())
        yield f"  {key}: {counted(len(tensors), 'tensor')}, {', '.join(dtypes)}, {sized(size)}"
    for name, value in opened.scalars.items():
        yield f"  {name.replace('_', ' ')} {value}"


def group_lines(opened: CheckpointSummary) -> Iterator[str]:
    """Progress, position in the data, layout and settings."""
    yield from _paragraph("progress", _values(opened.progress))
    if opened.data:
        yield from ("", "training data:")
        for source in opened.data:
            weight = "left the blend" if source.weight is None else f"weight {source.weight:.4g}"
            yield f"  {source.name}: {counted(source.samples, 'sample', ',')} read, {weight}"
    yield from _paragraph("layout", _values(opened.layout))
    for group, values in opened.settings.items():
        yield from _paragraph(group, _values(values))


def _values(values: Mapping[str, Any]) -> list[str]:
    shown = {name: value for name, value in values.items() if value not in (None, "", [], ())}
    return [f"{name} {json.dumps(value)}" for name, value in shown.items()]


def _paragraph(title: str, parts: Sequence[str]) -> Iterator[str]:
    if parts:
        text = ", ".join(parts)
        yield from ("", f"{title}:")
        yield from textwrap.wrap(text, WIDTH, initial_indent="  ", subsequent_indent="  ")


def tensor_lines(opened: CheckpointSummary, *, every: bool) -> Iterator[str]:
    """A table of the weights; layers with equal shape, type and sharding share a row."""
    rows: dict[tuple[str, ...], list[int]] = {}
    for name, tensor in opened.tensors[next(iter(opened.tensors))].items():
        match = None if every else LAYER.search(name)
        shown = name if match is None else LAYER.sub("layers.*.", name, count=1)
        key = (shown, str(list(tensor.shape)), dtype_of(tensor), opened.shards.get(name, ""))
        rows.setdefault(key, []).extend([] if match is None else [int(match[1])])
    cells = [
        ("", key[0].replace("layers.*.", f"layers.{_ranges(layers)}."), *key[1:])
        for key, layers in rows.items()
    ]
    yield from ("", "weights:", *columns(cells))


def _ranges(numbers: Iterable[int]) -> str:
    """Ascending numbers in short: 0-3,5."""
    # Numbers that follow each other have equal differences from their places in the list.
    groups = itertools.groupby(enumerate(sorted(numbers)), lambda item: item[1] - item[0])
    parts = [[value for _, value in group] for _, group in groups]
    return ",".join(f"{part[0]}-{part[-1]}" if len(part) > 1 else str(part[0]) for part in parts)


def comparison_lines(result: Comparison) -> Iterator[str]:
    """Counts of equal and different tensors, every difference, and the result."""
    for key, equal in result.num_equal.items():
        different = sum(item.kind == key for item in result.differences)
        yield f"{key}: {equal} tensors equal, {different} different"
    for key in result.uncompared:
        yield f"{key}: not compared, one of them has weights alone"
    for name, (first, second) in result.scalars.items():
        yield f"{name.replace('_', ' ')}: {first} in the first, {second} in the second"
    for where, names in (("first", result.only_in_first), ("second", result.only_in_second)):
        yield from (f"only in the {where}: {name}" for name in names[:SHOWN_DIFFERENCES])
        if len(names) > SHOWN_DIFFERENCES:
            yield f"only in the {where}: {len(names) - SHOWN_DIFFERENCES} more"
    yield from map(_difference_line, result.differences[:SHOWN_DIFFERENCES])
    if (left := len(result.differences) - SHOWN_DIFFERENCES) > 0:
        yield f"{counted(left, 'more different tensor')} (all of them with --json)"
    yield "equal" if result.is_equal else "different"


def _difference_line(tensor: TensorDifference) -> str:
    first, second = tensor.shapes
    parts = [] if first == second else [f"{list(first)} in the first, {list(second)} in the second"]
    if tensor.dtypes[0] != tensor.dtypes[1]:
        parts.append(f"{tensor.dtypes[0]} in the first, {tensor.dtypes[1]} in the second")
    if tensor.num_different and tensor.max_abs is not None:
        parts.append(
            f"{tensor.num_different:,} of {tensor.numel:,} values differ, by up to "
            f"{tensor.max_abs:.3g}, relative {tensor.max_rel:.3g}"
        )
    elif first == second:
        parts.append("the same values")
    return f"  {tensor.kind} {tensor.name}: {'; '.join(parts)}"


def dtype_of(tensor: TensorReader) -> str:
    """Type of a tensor without torch's prefix: bfloat16."""
    return str(tensor.dtype).removeprefix("torch.")
