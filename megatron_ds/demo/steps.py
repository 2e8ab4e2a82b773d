"""The commands of the demo, in their order."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from megatron_ds.demo.results import read_unigram_loss, step_seconds
from megatron_ds.demo.texts import prompt_prefixes, split_of
from megatron_ds.launch.device import visible_devices
from megatron_ds.launch.environment import prepare_environment
from megatron_ds.programs import REPOSITORY, is_installed, start_words

VOCAB_SIZE = 4096
FIRST_ITERATIONS = 50
"""Of the first run, whose steps are timed."""
FEWEST_ITERATIONS = 100
MOST_ITERATIONS = 300
STEP_SECONDS = 90
"""Time of the steps of both runs, as far as the number of iterations has limits."""
MODEL = (
    "--num-layers",
    "4",
    "--hidden-size",
    "192",
    "--num-attention-heads",
    "6",
    "--seq-length",
    "256",
    "--attention-dropout",
    "0",
    "--hidden-dropout",
    "0",
)
TRAINING = (
    "--micro-batch-size",
    "4",
    "--global-batch-size",
    "8",
    "--lr",
    "1.5e-3",
    "--min-lr",
    "1.5e-4",
    "--lr-decay-style",
    "WSD",
    "--lr-wsd-decay-style",
    "linear",
    "--lr-warmup-iters",
    "20",
    "--weight-decay",
    "0.1",
    "--adam-beta2",
    "0.95",
    "--zero-stage",
    "1",
    "--log-interval",
    "10",
    "--eval-interval",
    "100",
    "--eval-iters",
    "10",
)
PROMPTS = ("def __init__(self", "        return self.", '    """Return the ')
PYTHON = sys.executable if is_installed() else os.path.relpath(sys.executable, REPOSITORY)

Step = tuple[str, Sequence[object]]
"""Title and command."""


def steps(folder: Path, data: Path | None) -> Iterator[Step]:
    """The commands in order. Each is built after the previous one has run."""
    corpus = data or folder / "corpus.jsonl"
    tokens = folder / "text_text_document"
    checkpoints = folder / "checkpoints"
    unigram = folder / "unigram.json"
    vocabulary = {"vocab_file": folder / "vocab.json", "merge_file": folder / "merges.txt"}
    if data is None:
        yield tool("A corpus of text that comes with every Python", "make-corpus", output=corpus)
    split = split_of(corpus)
    yield tool(
        "A byte-level BPE tokenizer",
        "train-tokenizer",
        input=corpus,
        vocab_size=VOCAB_SIZE,
        output_dir=folder,
    )
    yield tool(
        "Token files",
        "preprocess",
        input=corpus,
        output_prefix=folder / "text",
        tokenizer_type="GPT2BPETokenizer",
        **vocabulary,
        append_eod=True,
        workers=2,
    )
    size = len(json.loads((folder / "vocab.json").read_text(encoding="utf-8")))
    yield tool(
        "The loss of a model that knows only token frequencies",
        "unigram-loss",
        data_path=tokens,
        split=split,
        vocab_size=size,
        output=unigram,
    )
    yield from trainings(folder, split, vocabulary)
    yield tool(
        "The loss curve",
        "plot-loss",
        checkpoints,
        output=folder / "loss.png",
        baseline=f"{read_unigram_loss(unigram):.4f}",
        baseline_name="unigram model",
    )
    yield tool(
        "Text from prompts",
        "generate",
        load=checkpoints,
        out_seq_length=24,
        temperature=0.5,
        top_p=0.9,
        prompt=PROMPTS if data is None else prompt_prefixes(corpus),
    )


def trainings(folder: Path, split: str, vocabulary: Mapping[str, object]) -> Iterator[Step]:
    """The two runs of the training, the second of which is as long as the first one allows."""
    training = training_flags(folder, split, vocabulary)
    first = [*length_flags(MOST_ITERATIONS), "--exit-interval", FIRST_ITERATIONS]
    title = f"Pretraining until iteration {FIRST_ITERATIONS}, which shows how long a step takes"
    yield title, [*launch_words("deepspeed"), *training, *first]
    seconds = step_seconds(folder / "checkpoints")
    count = iterations_of(seconds)
    title = f"At {seconds:.2f} s per step, training continues from the checkpoint until {count}"
    rest = [*length_flags(count), "--override-opt_param-scheduler"]
    yield title, [*launch_words("torchrun"), *training, *rest]


def iterations_of(seconds: float) -> int:
    """Iterations of both runs, by the time of a step."""
    return max(FEWEST_ITERATIONS, min(MOST_ITERATIONS, int(STEP_SECONDS / seconds)))


def length_flags(iterations: int) -> list[object]:
    """The flags of a run's length: the last quarter lowers the learning rate."""
    return ["--train-iters", iterations, "--lr-wsd-decay-iters", iterations // 4]


def launch_words(launcher: str) -> list[object]:
    """The words that start the processes of a training.

    Args:
        launcher: `deepspeed` or `torchrun`.
    """
    by_deepspeed = launcher == "deepspeed"
    module = "--module" if by_deepspeed else "-m"
    return [
        os.path.join(os.path.dirname(PYTHON), launcher),
        "--num_gpus" if by_deepspeed else "--nproc-per-node",
        process_count(),
        "--master_port" if by_deepspeed else "--master-port",
        free_port(),
        *([module, *start_words("train")[1:]] if is_installed() else program_words("train")),
    ]


def training_flags(folder: Path, split: str, vocabulary: Mapping[str, object]) -> list[object]:
    """The flags that both runs have."""
    checkpoints = folder / "checkpoints"
    return [
        *MODEL,
        *TRAINING,
        *flags_of(**vocabulary, data_path=folder / "text_text_document", split=split),
        *flags_of(save=checkpoints, load=checkpoints),
    ]


def tool(title: str, name: str, *arguments: object, **flags: object) -> Step:
    """A step that runs a tool.

    Args:
        title: What the step does.
        name: Name of the program.
        arguments: Arguments without a flag.
        flags: Values of flags by name, see `flags_of`.
    """
    return title, [PYTHON, *program_words(name), *arguments, *flags_of(**flags)]


def program_words(name: str) -> list[str]:
    """The words after `python` that start a program from the folder where the commands run."""
    words = start_words(name)
    return words if is_installed() else [os.path.relpath(words[0], REPOSITORY)]


def flags_of(**values: object) -> Iterator[object]:
    """The words of flags: True gives a flag without a value, a list gives several values."""
    for name, value in values.items():
        yield f"--{name.replace('_', '-')}"
        if isinstance(value, list | tuple):
            yield from value
        elif value is not True:
            yield value


def process_count() -> int:
    """Two; one on a machine with exactly one accelerator device."""
    prepare_environment()
    count = visible_devices()
    return 2 if count is None else min(2, count)


def free_port() -> int:
    """A port for the launcher. Another run on this machine may use DeepSpeed's default port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
