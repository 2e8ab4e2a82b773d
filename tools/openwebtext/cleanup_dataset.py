"""Fix Unicode, keep English, drop short documents: cleanup_dataset.py INPUT OUTPUT, as in Megatron.

The stages fix, language and length of clean.py, whose other flags may follow.
"""

from __future__ import annotations

if __name__ == "__main__":
    import start_tool

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from megatron_ds import cli
from megatron_ds.cleaning.command import CleaningCommand, work
from megatron_ds.cleaning.options import CleaningOptions
from megatron_ds.config.fields import option_field, option_group


@dataclass(frozen=True)
class Options(CleaningCommand):
    """Fixes Unicode, keeps English, drops short documents: the stages fix, language and length of
    clean.py.
    """

    FIELD_FLAGS: ClassVar[Mapping[str, str]] = {
        **CleaningCommand.FIELD_FLAGS,
        "paths": "INPUT",
        "output": "OUTPUT",
    }

    input_file: str = option_field("", metavar="INPUT", positional=True, required=True)
    """JSON lines, or another input format of clean.py."""
    output_file: str = option_field("", metavar="OUTPUT", positional=True, required=True)
    """Output file (JSON lines)."""
    cleaning: CleaningOptions = option_group(
        dataclasses.replace(CleaningCommand.cleaning, stages=("fix", "language", "length")),
        flags=dict.fromkeys(("paths", "output", "hf_dataset", "hf_config", "hf_split")),
    )

    @property
    def options(self) -> CleaningOptions:
        options = super().options
        inputs = dataclasses.replace(options.inputs, paths=(self.input_file,))
        return dataclasses.replace(options, inputs=inputs, output=self.output_file)


main = cli.program(Options, work)

if __name__ == "__main__":
    start_tool.run(main)
