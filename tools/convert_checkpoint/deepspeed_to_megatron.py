"""Convert a DeepSpeed checkpoint to one of Megatron-LM.

`tools/convert_checkpoint.py --to megatron` by the name and the flags of the script of the
Megatron-DeepSpeed projects.
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    sys.path.insert(0, os.path.abspath(f"{__file__}/../../.."))
    from megatron_ds.launch import program_start

    program_start.begin()

import importlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_ds import cli
from megatron_ds.config.fields import option_field
from megatron_ds.config.problems import Problem, problems_about


@dataclass(frozen=True)
class Options:
    """Converts the weights of a checkpoint to a release of Megatron-LM."""

    input_folder: str = option_field(
        "", "a --save folder, or the folder of one checkpoint", metavar="FOLDER", required=True
    )
    output_folder: str = option_field(
        "", "new folder for Megatron's --load", metavar="FOLDER", required=True
    )
    target_tp: int = option_field(1, "tensor-parallel size of the output", minimum=1)
    target_pp: int = option_field(1, "pipeline stages of the output", minimum=1)
    for_release: bool = option_field(False, "accepted for compatibility; every output is a release")

    def problems(self) -> Iterator[Problem]:
        if self.input_folder and not Path(self.input_folder).is_dir():
            yield Problem("load-folder-missing", "input_folder", load=self.input_folder)


@problems_about(
    load="input_folder",
    save="output_folder",
    target_tensor_parallel_size="target_tp",
    target_pipeline_parallel_size="target_pp",
)
def work(options: Options) -> None:
    # By its name, for there is a folder of this name, too.
    tool = importlib.import_module("tools.convert_checkpoint")
    tool.work(
        tool.Options(
            load=options.input_folder,
            save=options.output_folder,
            target_format="megatron",
            target_tensor_parallel_size=options.target_tp,
            target_pipeline_parallel_size=options.target_pp,
        )
    )


def main(argv: Sequence[str]) -> int:
    return cli.run(Options, work, argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
