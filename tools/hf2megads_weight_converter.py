"""Convert a Hugging Face model to a folder of weights, or a checkpoint to a Hugging Face model.

`tools/convert_checkpoint.py` by the name and the flags of Megatron-DeepSpeed's script.
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
from typing import ClassVar

from megatron_ds import cli
from megatron_ds.config import Config
from megatron_ds.config.fields import no_effect_problem, option_field, option_group, when
from megatron_ds.config.problems import Problem, renaming_fields
from tools.converter import ConversionOptions, convert_checkpoint

TO_HF = when(to_hf_ckpt=True)


@dataclass(frozen=True)
class ConverterOptions:
    """What is converted."""

    hf_ckpt_dir: str | None = option_field(
        None,
        "folder of the Hugging Face model; with --to-hf-ckpt it is not needed",
        metavar="FOLDER",
    )
    load: str | None = option_field(
        None, "checkpoint to convert to a Hugging Face model", metavar="FOLDER", only_with=TO_HF
    )
    save: str = option_field("", "new folder of the result", metavar="FOLDER", required=True)
    to_hf_ckpt: bool = option_field(False, "convert --load to a Hugging Face model")
    load_mode: str = option_field(
        "auto",
        "ignored; the format of the Hugging Face model is detected automatically",
        choices=("torchbin", "safetensor", "auto"),
    )
    hf_ckpt_num_shards: int | None = option_field(
        None, "ignored; the files are counted automatically", minimum=1
    )


@dataclass(frozen=True)
class Options:
    """Converts a Hugging Face model to a folder of weights that --load of a training and of the
    server accepts on every layout, or, with --to-hf-ckpt, a checkpoint to a Hugging Face model.

    Flags of pretrain_gpt.py are accepted and have no effect: both formats describe the model.
    """

    PEERS: ClassVar[str] = "pretrain_gpt"

    training: Config = option_group(Config(), hidden=True)
    given: frozenset[str] = frozenset()
    converter: ConverterOptions = option_group(ConverterOptions())

    @property
    def source(self) -> str | None:
        """The folder that is converted."""
        return self.converter.load if self.converter.to_hf_ckpt else self.converter.hf_ckpt_dir

    def problems(self) -> Iterator[Problem]:
        name = "load" if self.converter.to_hf_ckpt else "hf_ckpt_dir"
        if self.source is None:
            yield Problem("required", name)
        elif not Path(self.source).is_dir():
            yield Problem("load-folder-missing", name, load=self.source)

    def warnings(self) -> Iterator[Problem]:
        own = vars(self.converter).keys()
        if others := sorted(self.given - own):
            yield no_effect_problem(*others, reason="on a conversion")


def work(options: Options) -> None:
    target = "hf" if options.converter.to_hf_ckpt else "native"
    load, save = str(options.source), options.converter.save
    with renaming_fields(load="load" if options.converter.to_hf_ckpt else "hf_ckpt_dir"):
        convert_checkpoint(ConversionOptions(load=load, save=save, target_format=target))


main = cli.program(Options, work)

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
