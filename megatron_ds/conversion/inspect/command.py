"""Show what a checkpoint of any format contains, verify it, compare it with another."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from megatron_ds import cli
from megatron_ds.cli.inspection import Inspection
from megatron_ds.cli.progress import tensor_progress
from megatron_ds.config.problems import sized
from megatron_ds.conversion.inspect.lines import (
    comparison_lines,
    dtype_of,
    group_lines,
    summary_lines,
    tensor_lines,
    verified_line,
)
from megatron_ds.conversion.inspect.options import Options, format_and_folder
from megatron_ds.launch.output import columns, print_error

if TYPE_CHECKING:  # torch takes seconds to import
    from megatron_ds.conversion.inspect.open import CheckpointSummary
    from megatron_ds.conversion.inspect.verify import Verification


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
        name, folder = format_and_folder(options.path)
        if options.verify:
            self._verified(verify(folder, name, print_error))
            if not self.good:
                return self.finish()  # a damaged checkpoint cannot be described
        opened = inspection.open_checkpoint(folder, name, print_error)
        if options.other is None:
            self._describe(opened)
            return self.finish()
        other_name, other_folder = format_and_folder(options.other)
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
        self.show(*comparison_lines(result))
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
            self.show(verified_line(result))

    def _describe(self, opened: CheckpointSummary) -> None:
        self.found["checkpoint"] = _as_json(opened)
        self.show(*summary_lines(opened))
        self.show(*group_lines(opened))
        self.show(*tensor_lines(opened, every=self._options.tensors))
        files = opened.files
        self.show("", f"files: {len(files)}, {sized(sum(files.values()))}")
        rows = [("", name, f"{sized(size):>10}") for name, size in files.items()]
        self.show(*columns(rows))

    def show(self, *lines: str) -> None:
        super().show(*map(_printable, lines))


def _printable(text: str) -> str:
    """Text without the control characters that names in a file may have, as for a terminal."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


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
                "dtype": dtype_of(tensor),
                "bytes": tensor.nbytes,
                "shards": opened.shards.get(name),
            }
            for key, tensors in opened.tensors.items()
            for name, tensor in tensors.items()
        ],
    }


main = cli.program(Options, lambda options: CheckpointInspection(options).run())
