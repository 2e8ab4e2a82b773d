"""Write the fp32 weights of a checkpoint, as DeepSpeed's script does."""

if __name__ == "__main__":
    import os
    import sys

    # The script next to a checkpoint starts this file from its folder.
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    import start_tool

from tools.converter import ToFp32 as Options

main = Options.main

if __name__ == "__main__":
    start_tool.run(main)
