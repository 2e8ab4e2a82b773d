"""Convert a Hugging Face model or to one, as Megatron-DeepSpeed's script does."""

if __name__ == "__main__":
    import start_tool

from tools.converter import HfToMegads as Options

main = Options.main

if __name__ == "__main__":
    start_tool.run(main)
