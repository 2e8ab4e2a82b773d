"""Convert the weights of a checkpoint to another format.

The command line of `tools/converter.py`.
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    sys.path.insert(0, os.path.abspath(f"{__file__}/../.."))
    from megatron_ds.launch import program_start

    program_start.begin()


from megatron_ds import cli
from tools.converter import ConversionOptions as Options
from tools.converter import convert_checkpoint

main = cli.program(Options, convert_checkpoint)

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
