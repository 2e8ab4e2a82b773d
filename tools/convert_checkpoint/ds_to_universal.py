"""Convert a checkpoint to DeepSpeed's universal format, as DeepSpeed's script does."""

if __name__ == "__main__":
    import start_tool

from tools.converter import ToUniversal as Options

main = Options.main

if __name__ == "__main__":
    start_tool.run(main)
