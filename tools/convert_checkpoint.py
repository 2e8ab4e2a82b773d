"""Convert the weights of a checkpoint to another format.

The command line of `tools/converter.py`.
"""

if __name__ == "__main__":
    import start_tool

from megatron_ds import cli
from tools.converter import ConversionOptions as Options
from tools.converter import convert_checkpoint

main = cli.program(Options, convert_checkpoint)

if __name__ == "__main__":
    start_tool.run(main)
