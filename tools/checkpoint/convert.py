"""Convert a checkpoint between Hugging Face's and Megatron-LM's formats.

`tools/convert_checkpoint.py` by the name and the flags of Megatron-LM's script, formerly util.py.
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    sys.path.insert(0, os.path.realpath(f"{os.path.realpath(__file__)}/../../.."))
    from megatron_ds.launch import program_start

    program_start.begin()

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from megatron_ds import cli
from megatron_ds.config.fields import option_field
from megatron_ds.config.problems import Problem, renaming_fields
from tools.converter import ConversionOptions, convert_checkpoint

SAVERS = {"core": "megatron", "mcore": "megatron", "legacy": "megatron", "llama2_hf": "hf"}


@dataclass(frozen=True)
class Options:
    """Converts the weights of a checkpoint, whose format is detected, to Megatron-LM's or to
    Hugging Face's.
    """

    PROGRAM: ClassVar[str] = "convert.py"
    PEERS: ClassVar[str] = "convert"

    load_dir: str = option_field("", "folder to convert", metavar="FOLDER", required=True)
    save_dir: str = option_field("", "new folder", metavar="FOLDER", required=True)
    model_type: str = option_field("GPT", "kind of model", choices=("GPT",))
    saver: str = option_field(
        "megatron", "format of the output", choices=("megatron", "hf"), synonyms=SAVERS
    )
    target_tensor_parallel_size: int = option_field(1, "tensor-parallel size", minimum=1)
    target_pipeline_parallel_size: int = option_field(1, "pipeline stages", minimum=1)

    def problems(self) -> Iterator[Problem]:
        if self.load_dir and not Path(self.load_dir).is_dir():
            yield Problem("load-folder-missing", "load_dir", load=self.load_dir)


@renaming_fields(load="load_dir", save="save_dir", target_format="saver")
def work(options: Options) -> None:
    convert_checkpoint(
        ConversionOptions(
            load=options.load_dir,
            save=options.save_dir,
            target_format=options.saver,
            target_tensor_parallel_size=options.target_tensor_parallel_size,
            target_pipeline_parallel_size=options.target_pipeline_parallel_size,
        )
    )


main = cli.program(Options, work)

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
