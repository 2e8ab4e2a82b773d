"""Convert a DeepSpeed checkpoint to a Hugging Face model.

`tools/convert_checkpoint.py --to hf` by the name and the flags of the script of the
Megatron-DeepSpeed projects.
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    sys.path.insert(0, os.path.abspath(f"{__file__}/../../.."))
    from megatron_ds.launch import program_start

    program_start.begin()

from collections.abc import Iterator
from dataclasses import dataclass

from megatron_ds import cli
from megatron_ds.config.fields import no_effect_problem, option_field
from megatron_ds.config.problems import Problem, renaming_fields
from tools.converter import ConversionOptions, FolderOptions, convert_checkpoint

WITHOUT_EFFECT = {"target_tp": 1, "target_pp": 1, "for_release": False}


@dataclass(frozen=True)
class Options(FolderOptions):
    """Converts a checkpoint of a DeepSpeed training to a Hugging Face model, with its tokenizer."""

    target_tp: int = option_field(1, "no effect: the output has no tensor parallelism", minimum=1)
    target_pp: int = option_field(1, "no effect: the output has no pipeline stages", minimum=1)
    for_release: bool = option_field(False, "no effect: the output has no counters")

    def warnings(self) -> Iterator[Problem]:
        changed = [name for name, value in WITHOUT_EFFECT.items() if getattr(self, name) != value]
        if changed:
            yield no_effect_problem(*changed, reason="on a Hugging Face model")


@renaming_fields(load="input_folder", save="output_folder")
def work(options: Options) -> None:
    convert_checkpoint(
        ConversionOptions(load=options.input_folder, save=options.output_folder, target_format="hf")
    )


main = cli.program(Options, work)

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
