"""The complete path on this machine: text, tokenizer, token files, training, resuming, generating.

Prints and runs the commands that a user would type; all results go to one folder.
"""

from __future__ import annotations

if __name__ == "__main__":
    import start_tool

import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_ds import cli
from megatron_ds.config.devices import is_host
from megatron_ds.config.fields import option_field
from megatron_ds.config.problems import user_error
from megatron_ds.launch.environment import prepare_environment
from megatron_ds.preprocess.documents.document_readers import DocumentReader
from megatron_ds.preprocess.documents.inputs import InputSpec
from megatron_ds.preprocess.documents.parsing import RejectedDocument, TextFields, texts_of

REPOSITORY = Path(__file__).resolve().parent.parent
OUTPUTS = (
    *("corpus.jsonl", "vocab.json", "merges.txt", "tokenizer.json", "text_text_document.bin"),
    *("text_text_document.idx", "index-cache", "checkpoints", "unigram.json", "loss.png"),
)
"""All results, and so all that the demo ever deletes."""
MARK = ".demo"
"""A file that marks a folder of results."""
VOCAB_SIZE = 4096
ITERATIONS = 300
MODEL = (
    *("--num-layers", "4", "--hidden-size", "192", "--num-attention-heads", "6"),
    *("--seq-length", "256", "--attention-dropout", "0", "--hidden-dropout", "0"),
)
TRAINING = (
    *("--micro-batch-size", "4", "--global-batch-size", "8", "--train-iters", str(ITERATIONS)),
    *("--lr", "1.5e-3", "--min-lr", "1.5e-4", "--lr-decay-style", "cosine"),
    *("--lr-warmup-iters", "30", "--weight-decay", "0.1", "--adam-beta2", "0.95"),
    *("--zero-stage", "1", "--log-interval", "10", "--save-interval", str(ITERATIONS // 2)),
    *("--eval-interval", "100", "--eval-iters", "10"),
)
PROMPTS = ("def __init__(self", "import os\n", "The return value is")
PROMPT_WORDS, PROMPT_CHARACTERS = 8, 48
PYTHON = os.path.relpath(sys.executable, REPOSITORY)

Step = tuple[str, Sequence[object]]
"""Title and command."""


@dataclass(frozen=True)
class Options:
    """Trains a small GPT on this machine: text, tokenizer, token files, training, resuming, loss
    curve, generated text.
    """

    data: str | None = option_field(
        None,
        'text to train on: JSON lines with the key "text" (default: the standard library of '
        "Python)",
        metavar="FILE",
    )
    output: str = option_field("demo_run", "folder for the results", metavar="FOLDER")


def steps(folder: Path, data: Path | None) -> Iterator[Step]:
    """The commands in order. Each is built after the previous one has run."""
    corpus = data or folder / "corpus.jsonl"
    tokens, checkpoints = folder / "text_text_document", folder / "checkpoints"
    unigram = folder / "unigram.json"
    vocabulary = ("--vocab-file", folder / "vocab.json", "--merge-file", folder / "merges.txt")
    if data is None:
        yield tool(
            "A corpus of text that comes with every Python", "make_corpus", "--output", corpus
        )
    split = split_of(corpus)
    yield tool(
        *("A byte-level BPE tokenizer", "train_tokenizer", "--input", corpus),
        *("--vocab-size", VOCAB_SIZE, "--output-dir", folder),
    )
    yield tool(
        *("Token files", "preprocess_data", "--input", corpus, "--output-prefix", folder / "text"),
        *("--tokenizer-type", "GPT2BPETokenizer", *vocabulary, "--append-eod", "--workers", 2),
    )
    size = len(json.loads((folder / "vocab.json").read_text(encoding="utf-8")))
    yield tool(
        *("The loss of a model that knows only token frequencies", "unigram_loss"),
        *("--data-path", tokens, "--split", split, "--vocab-size", size, "--output", unigram),
    )
    half = int(TRAINING[TRAINING.index("--save-interval") + 1])
    training = [
        *(os.path.join(os.path.dirname(PYTHON), "deepspeed"), "--num_gpus", process_count()),
        *("--master_port", free_port(), "pretrain_gpt.py", *MODEL, *TRAINING, *vocabulary),
        *("--data-path", tokens, "--split", split, "--save", checkpoints, "--load", checkpoints),
    ]
    yield f"Pretraining until iteration {half}", [*training, "--exit-interval", half]
    yield "The same command resumes from the checkpoint", training
    yield tool(
        *("The loss curve", "plot_loss", checkpoints, "--output", folder / "loss.png"),
        *("--baseline", f"{read_unigram_loss(unigram):.4f}", "--baseline-name", "unigram model"),
    )
    yield tool(
        *("Text from prompts", "generate_samples_gpt", "--load", checkpoints),
        *("--out-seq-length", 48, "--temperature", 0.7, "--top-p", 0.9, "--prompt"),
        *(PROMPTS if data is None else prompt_prefixes(corpus)),
    )


def tool(title: str, name: str, *arguments: object) -> Step:
    """A step that runs a tool."""
    return title, [PYTHON, f"tools/{name}.py", *arguments]


def run(title: str, command: Sequence[object]) -> None:
    """Print and run a command.

    Raises:
        UserError: If the command fails.
    """
    words = [str(word) for word in command]
    print(f"\n== {title}\n$ {shlex.join(words)}", flush=True)
    code = subprocess.call(words, cwd=REPOSITORY)
    if code:
        script = next(word for word in words if word.endswith(".py"))
        raise user_error("demo-command-failed", script=script, status=code)


def clear(folder: Path, data: Path | None) -> None:
    """Delete the results of an earlier demo, and only those.

    Raises:
        UserError: If that would delete other files.
    """
    if data is not None and not data.is_file():
        raise user_error("demo-data-missing", data=data)
    old = [folder / name for name in OUTPUTS if (folder / name).exists()]
    if data is not None and any(data.resolve().is_relative_to(path.resolve()) for path in old):
        raise user_error("demo-data-among-results", data=data, folder=folder)
    if old and not (folder / MARK).exists():
        raise user_error("demo-folder-not-empty", path=old[0])
    for path in old:
        print(f"Removing {path} of an earlier demo")
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MARK).touch()


def split_of(corpus: Path) -> str:
    """--split: a twentieth of the documents each for validation and test, at least one.

    Raises:
        UserError: If there are fewer than three documents.
    """
    documents = sum(1 for _ in texts_in(corpus))
    if documents < 3:
        raise user_error("demo-corpus-too-small", corpus=corpus, documents=documents)
    held_out = max(1, documents // 20)
    return f"{documents - 2 * held_out},{held_out},{held_out}"


def process_count() -> int:
    """Two; one on a machine with exactly one accelerator device."""
    prepare_environment()
    from deepspeed.accelerator import get_accelerator

    device = get_accelerator()
    return 2 if is_host(device.device_name()) else min(2, device.device_count())


def free_port() -> int:
    """A port for the launcher. Another run on this machine may use DeepSpeed's default port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def prompt_prefixes(corpus: Path) -> list[str]:
    """The first words of the last three documents, which are held out of 40 or more documents."""
    last = deque(texts_in(corpus), maxlen=3)
    return [" ".join(text.split()[:PROMPT_WORDS])[:PROMPT_CHARACTERS] for text in last]


def texts_in(corpus: Path) -> Iterator[str]:
    """The documents that preprocessing takes of a file, which may be compressed."""
    inputs = InputSpec((str(corpus),))
    wanted = TextFields(("text",), inputs.max_document_bytes)
    for item in DocumentReader(inputs, wanted.keys):
        texts = texts_of(item, wanted)
        if not isinstance(texts, RejectedDocument) and texts[0].strip():
            yield texts[0]


def read_unigram_loss(path: Path) -> float:
    return float(json.loads(path.read_text())["loss"])


def summary(folder: Path) -> str:
    """The final losses, compared with the unigram model."""
    losses: dict[str, float] = {}
    for line in (folder / "checkpoints" / "metrics.jsonl").read_text("utf-8").splitlines():
        losses.update(json.loads(line))
    unigram = read_unigram_loss(folder / "unigram.json")
    better = unigram - losses["validation_loss"]
    return (
        f"\n== Done. Everything is in {folder}/\n\n"
        f"  validation loss     {losses['validation_loss']:.4f} nats per token\n"
        f"  test loss           {losses['test_loss']:.4f}\n"
        f"  unigram model       {unigram:.4f}: the GPT is {abs(better):.2f} "
        f"{'better' if better > 0 else 'WORSE'} on the validation data\n\n"
        "  checkpoints/        the trained model, and metrics.jsonl\n"
        "  loss.png            the loss curve"
    )


def work(options: Options) -> None:
    """The commands run in the repository, so all paths are relative to it."""
    folder = Path(os.path.relpath(options.output, REPOSITORY))
    data = None if options.data is None else Path(os.path.relpath(options.data, REPOSITORY))
    os.chdir(REPOSITORY)
    clear(folder, data)
    for title, command in steps(folder, data):
        run(title, command)
    print(summary(folder))


main = cli.program(Options, work)

if __name__ == "__main__":
    start_tool.run(main)
