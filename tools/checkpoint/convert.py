"""Convert a checkpoint between the formats of Hugging Face and Megatron-LM, as its script does."""

if __name__ == "__main__":
    import start_tool

from tools.converter import MegatronConverter as Options

main = Options.main

if __name__ == "__main__":
    start_tool.run(main)
