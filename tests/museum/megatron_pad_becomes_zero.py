"""A token of the text that is also the tokenizer's padding token, as samples have it."""

import tempfile
from pathlib import Path

from frame import verdict
from helpers import megatron

PAD = 7
TEXT = [1, PAD, 3, PAD, 5]

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        samples = megatron.samples(Path(folder), [TEXT], length=4, pad=PAD)
        inputs, labels = (samples[0][name].tolist() for name in ("tokens", "labels"))
    figures = f"inputs {inputs} and labels {labels} of the text {TEXT}"
    verdict(inputs != TEXT[:-1] or labels != TEXT[1:], figures)
