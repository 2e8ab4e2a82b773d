"""Convert a checkpoint to DeepSpeed's universal format.

By the name and the flags of the script of DeepSpeed and of the Megatron-DeepSpeed projects.
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    sys.path.insert(0, os.path.abspath(f"{__file__}/../../.."))
    from megatron_ds.launch import program_start

    program_start.begin()

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron_ds import cli
from megatron_ds.cli.progress import tensor_progress
from megatron_ds.config.fields import option_field
from megatron_ds.config.problems import Problem, renaming_fields
from tools.converter import FolderOptions

IGNORED = {
    "num_extract_workers": "one process reads each file once",
    "num_merge_workers": "one process reads each file once",
    "keep_temp_folder": "there are no intermediate files",
    "no_strict": "a checkpoint that does not match its checksums is never converted",
    "inject_missing_state": "the checkpoint has what the conversion needs",
    "target_tp": "the output belongs to no layout",
    "target_pp": "the output belongs to no layout",
}
"""Flags of other scripts, and why they are not needed."""


@dataclass(frozen=True)
class Options(FolderOptions):
    """Converts a checkpoint to full tensors of all weights and optimizer states.

    The output can be loaded on every layout, by this program and by DeepSpeed. It appears complete
    or not at all; then the file latest_universal in the same folder names it.
    """

    input_folder: str = option_field(
        "", "a checkpoint: a folder global_stepN", metavar="FOLDER", required=True
    )
    num_extract_workers: int = option_field(4, "accepted without effect", minimum=1)
    num_merge_workers: int = option_field(2, "accepted without effect", minimum=1)
    keep_temp_folder: bool = option_field(False, "accepted without effect")
    no_strict: bool = option_field(False, "accepted without effect")
    inject_missing_state: bool = option_field(False, "accepted without effect")
    target_tp: int = option_field(1, "accepted without effect", minimum=1)
    target_pp: int = option_field(1, "accepted without effect", minimum=1)

    def warnings(self) -> Iterator[Problem]:
        """Flags without an effect that were given."""
        for name, reason in IGNORED.items():
            if getattr(self, name) != getattr(type(self), name):
                yield Problem("universal-option-ignored", flag=f"--{name}", reason=reason)


@renaming_fields(load="input_folder", save="output_folder")
def work(options: Options) -> None:
    # torch takes seconds to import.
    with contextlib.redirect_stdout(sys.stderr):  # DeepSpeed prints a warning
        from megatron_ds.checkpoint.native_reader import SavedStates
        from megatron_ds.checkpoint.universal import writer as universal_export

    start = time.perf_counter()
    source = universal_export.open_verified(Path(options.input_folder))
    folder = Path(options.output_folder)
    total = universal_export.total_bytes(SavedStates(source))
    with tensor_progress("converting", total) as tensors:
        universal_export.convert_checkpoint(source, folder, lambda name, size: tensors.add(size))
    seconds, size = max(time.perf_counter() - start, 1e-9), tensors.num_bytes / 1e6
    print(f"{tensors.count} tensors, {size:.1f} MB in {seconds:.1f} s ({size / seconds:.1f} MB/s)")
    print(f"wrote {folder}")


main = cli.program(Options, work)

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
