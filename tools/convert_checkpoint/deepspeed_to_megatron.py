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

from dataclasses import dataclass

from megatron_ds import cli
from megatron_ds.config.fields import option_field
from megatron_ds.config.problems import renaming_fields
from tools.converter import ConversionOptions, FolderOptions, convert_checkpoint


@dataclass(frozen=True)
class Options(FolderOptions):
    """Converts the weights of a checkpoint to a release of Megatron-LM."""

    target_tp: int = option_field(1, "tensor-parallel size of the output", minimum=1)
    target_pp: int = option_field(1, "pipeline stages of the output", minimum=1)
    for_release: bool = option_field(False, "accepted for compatibility; every output is a release")


@renaming_fields(
    load="input_folder",
    save="output_folder",
    target_tensor_parallel_size="target_tp",
    target_pipeline_parallel_size="target_pp",
)
def work(options: Options) -> None:
    convert_checkpoint(
        ConversionOptions(
            load=options.input_folder,
            save=options.output_folder,
            target_format="megatron",
            target_tensor_parallel_size=options.target_tp,
            target_pipeline_parallel_size=options.target_pp,
        )
    )


main = cli.program(Options, work)

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
