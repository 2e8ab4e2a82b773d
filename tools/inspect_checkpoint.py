"""Show what a checkpoint of any format contains, verify it, compare it with another.

The command line of `megatron_ds.conversion.inspect.open`, `verification` and `comparison`.
"""

from __future__ import annotations

if __name__ == "__main__":
    import start_tool

import contextlib
import dataclasses
import itertools
import json
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from megatron_ds import cli
from megatron_ds.cli.inspection import Inspection
from megatron_ds.cli.progress import tensor_progress
from megatron_ds.config.fields import option_field
from megatron_ds.config.options.checkpoint import split_location
from megatron_ds.config.problems import Problem, counted, sized
from megatron_ds.launch.output import columns, print_error

if TYPE_CHECKING:  # torch takes seconds to import
    from megatron_ds.conversion.inspect.compare import Comparison, TensorDifference
    from megatron_ds.conversion.inspect.open import CheckpointSummary
    from megatron_ds.conversion.inspect.verify import Verification
    from megatron_ds.engine.states.state_reader import TensorReader

WIDTH = 100
SHOWN_DIFFERENCES = 40
LAYER = re.compile(r"layers\.(\d+)\.")


@dataclass(frozen=True)
class Options:
    """Shows what a checkpoint contains, verifies it, and compares it with another.

    The format is recognized, or given before the folder, as in hf:FOLDER. Of a --save folder, the
    checkpoint that a run would load is shown. Tensors are read one at a time. The exit status is 1
    if files are damaged or the checkpoints differ.
    """

    FIELD_FLAGS: ClassVar[Mapping[str, str]] = {"load": "PATH"}

    path: str = option_field(
        "", "folder of the checkpoint", metavar="PATH", positional=True, required=True
    )
    other: str | None = option_field(
        None,
        "checkpoint to compare it with tensor by tensor, of any format and layout",
        metavar="OTHER",
        positional=True,
    )
    verify: bool = option_field(
        False,
        "read all files and compare them with their checksums; of a --save folder, those of all "
        "checkpoints, and check the pointers",
    )
    tensors: bool = option_field(False, "list every tensor, and not one row for all layers")
    json: bool = option_field(False, "print one JSON object")

    def problems(self) -> Iterator[Problem]:
        for field, text in (("path", self.path), ("other", self.other)):
            if text and not _location(text)[1].is_dir():
                yield Problem("checkpoint-folder-missing", field, path=_location(text)[1])


class CheckpointInspection(Inspection):
    """The inspection of a checkpoint."""

    def __init__(self, options: Options) -> None:
        super().__init__(as_json=options.json)
        self._options = options

    def run(self) -> int:
        """Inspects, and returns the exit status."""
        # torch takes seconds to import.
        with contextlib.redirect_stdout(sys.stderr):  # DeepSpeed prints a warning
            from megatron_ds.conversion.inspect import compare as comparison
            from megatron_ds.conversion.inspect import open as inspection
            from megatron_ds.conversion.registry import verify

        options = self._options
        name, folder = _location(options.path)
        if options.verify:
            self._verified(verify(folder, name, print_error))
            if not self.good:
                return self.finish()  # a damaged checkpoint cannot be described
        opened = inspection.open_checkpoint(folder, name, print_error)
        if options.other is None:
            self._describe(opened)
            return self.finish()
        other_name, other_folder = _location(options.other)
        other = inspection.open_checkpoint(other_folder, other_name, print_error)
        total = sum(
            tensor.nbytes
            for summary in (opened, other)
            for tensors in summary.tensors.values()
            for tensor in tensors.values()
        )
        with tensor_progress("comparing", total) as tensors:
            result = comparison.compare(opened, other, tensors.add)
        self.found["comparison"] = {
            **dataclasses.asdict(result),
            "paths": [str(opened.path), str(other.path)],
            "is_equal": result.is_equal,
        }
        self.good &= result.is_equal
        self.show(
            f"first:  {opened.path} ({opened.format})", f"second: {other.path} ({other.format})"
        )
        self.show(*_comparison_lines(result))
        return self.finish()

    def _verified(self, results: Sequence[Verification]) -> None:
        self.found["verification"] = [
            {
                "path": str(result.path),
                "files": result.num_files,
                "bytes": result.num_bytes,
                "has_checksums": result.has_checksums,
                "problems": [{"code": p.code, "text": p.render()} for p in result.problems],
            }
            for result in results
        ]
        self.good &= not any(result.problems for result in results)
        for result in results:
            for problem in result.problems:
                print(_printable(f"{result.path}: {problem.render()}"), file=sys.stderr)
            self.show(_verified_line(result))

    def _describe(self, opened: CheckpointSummary) -> None:
        self.found["checkpoint"] = _as_json(opened)
        self.show(*_summary(opened))
        self.show(*_groups(opened))
        self.show(*_tensor_lines(opened, every=self._options.tensors))
        files = opened.files
        self.show("", f"files: {len(files)}, {sized(sum(files.values()))}")
        rows = [("", name, f"{sized(size):>10}") for name, size in files.items()]
        self.show(*columns(rows))

    def show(self, *lines: str) -> None:
        super().show(*map(_printable, lines))


def _location(text: str) -> tuple[str, Path]:
    """Format and folder of an argument."""
    name, folder = split_location(text)
    return name, Path(folder)


def _printable(text: str) -> str:
    """Text without the control characters that names in a file may have, as for a terminal."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def _verified_line(result: Verification) -> str:
    if result.problems:
        return f"{result.path}: {counted(len(result.problems), 'problem')}"
    if not result.num_files:
        return f"{result.path}: the pointers name a checkpoint of the folder"
    if result.has_checksums:
        how = "have the size and checksum of the manifest"
    else:
        how = "can be read; the format has no checksums of its own"
    return f"{result.path}: {counted(result.num_files, 'file')}, {sized(result.num_bytes)}, {how}"


def _as_json(opened: CheckpointSummary) -> dict[str, Any]:
    return {
        "path": str(opened.path),
        "format": opened.format,
        "parameters": opened.num_parameters,
        "files": opened.files,
        "progress": opened.progress,
        "optimizer": opened.scalars,
        "layout": opened.layout,
        "data": [dataclasses.asdict(source) for source in opened.data],
        "settings": opened.settings,
        "tensors": [
            {
                "kind": key,
                "name": name,
                "shape": tensor.shape,
                "dtype": _dtype(tensor),
                "bytes": tensor.nbytes,
                "shards": opened.shards.get(name),
            }
            for key, tensors in opened.tensors.items()
            for name, tensor in tensors.items()
        ],
    }


def _summary(opened: CheckpointSummary) -> Iterator[str]:
    """Summarizes the checkpoint in a few lines."""
    iteration = opened.progress.get("iteration")
    at = "weights alone" if iteration is None else f"iteration {iteration:,}"
    yield f"{opened.path}: {opened.format}, {at}"
    yield f"  {opened.num_parameters:,} parameters"
    for key, tensors in opened.tensors.items():
        dtypes = dict.fromkeys(map(_dtype, tensors.values()))
        size = sum(tensor.nbytes for tensor in tensors.values())
        yield f"  {key}: {counted(len(tensors), 'tensor')}, {', '.join(dtypes)}, {sized(size)}"
    for name, value in opened.scalars.items():
        yield f"  {name.replace('_', ' ')} {value}"


def _groups(opened: CheckpointSummary) -> Iterator[str]:
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


def _tensor_lines(opened: CheckpointSummary, *, every: bool) -> Iterator[str]:
    """A table of the weights; layers with equal shape, type and sharding share a row."""
    rows: dict[tuple[str, ...], list[int]] = {}
    for name, tensor in opened.tensors[next(iter(opened.tensors))].items():
        match = None if every else LAYER.search(name)
        shown = name if match is None else LAYER.sub("layers.*.", name, count=1)
        key = (shown, str(list(tensor.shape)), _dtype(tensor), opened.shards.get(name, ""))
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


def _comparison_lines(result: Comparison) -> Iterator[str]:
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


def _dtype(tensor: TensorReader) -> str:
    return str(tensor.dtype).removeprefix("torch.")


main = cli.program(Options, lambda options: CheckpointInspection(options).run())

if __name__ == "__main__":
    start_tool.run(main)
