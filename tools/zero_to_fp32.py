"""Write the fp32 weights of a checkpoint of any ZeRO stage and parallel layout.

`tools/convert_checkpoint.py --to native --dtype fp32` by the name and the arguments of DeepSpeed's
script.
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    sys.path.insert(0, os.path.abspath(f"{__file__}/../.."))
    from megatron_ds.launch import program_start

    program_start.begin()

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron_ds import cli
from megatron_ds.config.fields import option_field
from megatron_ds.config.problems import Problem, renaming_fields
from tools.converter import ConversionOptions, convert_checkpoint


@dataclass(frozen=True)
class Options:
    """Writes the fp32 weights of a checkpoint as safetensors: a folder of full tensors under their
    canonical names.
    """

    checkpoint_dir: str = option_field(
        "",
        "a --save folder, or the folder of one checkpoint",
        metavar="CHECKPOINT_DIR",
        positional=True,
        required=True,
    )
    output_dir: str = option_field(
        "", "new folder", metavar="OUTPUT_DIR", positional=True, required=True
    )
    tag: str | None = option_field(
        None, "checkpoint of the folder, such as global_step10 (default: the last one)"
    )
    safe_serialization: bool = option_field(False, "always on; accepted for compatibility")

    @property
    def source(self) -> Path:
        """The folder to convert."""
        return Path(self.checkpoint_dir, self.tag or "")

    def problems(self) -> Iterator[Problem]:
        if self.checkpoint_dir and not self.source.is_dir():
            yield Problem("load-folder-missing", "checkpoint_dir", load=self.source)


@renaming_fields(load="checkpoint_dir", save="output_dir")
def work(options: Options) -> None:
    load, save = str(options.source), options.output_dir
    fp32 = ConversionOptions(load=load, save=save, target_format="native", dtype="fp32")
    convert_checkpoint(fp32)


main = cli.program(Options, work)

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
