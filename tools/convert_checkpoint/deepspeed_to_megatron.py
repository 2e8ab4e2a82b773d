"""Convert a DeepSpeed checkpoint to one of Megatron-LM, as the script of this name elsewhere."""

if __name__ == "__main__":
    import start_tool

from tools.converter import ToMegatron as Options

main = Options.main

if __name__ == "__main__":
    start_tool.run(main)
