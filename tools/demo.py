"""The whole path on this machine: text, tokenizer, token files, training, resuming, generating.

Runs the commands that a user would type, shows each of them, and keeps everything in ./demo_run.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from megatron_ds.launch.environment import prepare_environment

HERE = Path(__file__).resolve().parent.parent
OUTPUTS = (
    "corpus.jsonl",
    "vocab.json",
    "merges.txt",
    "text_text_document.bin",
    "text_text_document.idx",
    "index-cache",
    "checkpoints",
    "logs",
    "unigram.json",
    "loss.png",
)
"""All that the demo writes into its folder, and so all that it ever deletes there."""
MARK = ".demo"
"""A file that says that a folder is the demo's."""

VOCAB_SIZE = 4096
ITERATIONS = 600
HALF = ITERATIONS // 2
MODEL = (
    *("--num-layers", "4", "--hidden-size", "192", "--num-attention-heads", "6"),
    *("--seq-length", "256", "--attention-dropout", "0", "--hidden-dropout", "0"),
)
TRAINING = (
    *("--micro-batch-size", "4", "--global-batch-size", "8", "--train-iters", str(ITERATIONS)),
    *("--lr", "1.5e-3", "--min-lr", "1.5e-4", "--lr-decay-style", "cosine"),
    *("--lr-warmup-iters", "60", "--weight-decay", "0.1", "--adam-beta2", "0.95"),
    *("--zero-stage", "1", "--log-interval", "10", "--save-interval", str(HALF)),
    *("--eval-interval", "100", "--eval-iters", "10"),
)
PROMPTS = ("def __init__(self", "import os\n", "The return value is")
PROMPT_WORDS, PROMPT_CHARACTERS = 8, 48
STEPS = 8
TAIL_LINES = 25
LOSSES = ("validation_loss", "test_loss")
PYTHON = os.path.relpath(sys.executable, HERE)


class Failed(Exception):
    """A command of the demo failed; the message says which and where its output is."""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--data", type=Path, help='your text: a jsonl file with the key "text"')
    parser.add_argument("--output", type=Path, default=Path("demo_run"), help="folder for results")
    arguments = parser.parse_args(argv)
    output = from_here(arguments.output)
    data = None if arguments.data is None else from_here(arguments.data)
    os.chdir(HERE)
    try:
        Demo(output).run(data)
    except Failed as error:
        print(f"\n{error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nInterrupted.", file=sys.stderr)
        return 130
    return 0


def from_here(path: Path) -> Path:
    """The same file seen from the repository, where all commands run."""
    return Path(os.path.relpath(path, HERE))


class Demo:
    """Runs the steps, one after the other, in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.logs = folder / "logs"
        self.tokens = folder / "text_text_document"
        self.checkpoints = folder / "checkpoints"
        self.step = 0
        self.start = time.monotonic()

    def run(self, data: Path | None) -> None:
        """Raises Failed."""
        self.clear(data)
        corpus = self.corpus(data)
        split = self.split(corpus)
        self.tokenizer(corpus)
        self.preprocess(corpus)
        self.unigram(split)
        self.train(split)
        self.plot()
        self.generate(corpus, own_text=data is not None)
        self.summary()

    def clear(self, data: Path | None) -> None:
        """Removes the results of an earlier demo, and only those. Raises Failed."""
        if data is not None and not data.is_file():
            raise Failed(f"{data}: there is no such file")
        old = [self.folder / name for name in OUTPUTS if (self.folder / name).exists()]
        if data is not None and any(data.resolve().is_relative_to(path.resolve()) for path in old):
            raise Failed(f"{data} would be overwritten by the demo: copy it out of {self.folder}")
        if old and not (self.folder / MARK).exists():
            raise Failed(f"{old[0]} is not of an earlier demo: name another folder with --output")
        if old:
            print(f"Removing the results of an earlier demo from {self.folder}/")
        for path in old:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        self.logs.mkdir(parents=True)
        (self.folder / MARK).touch()

    def corpus(self, data: Path | None) -> Path:
        if data is not None:
            self.title(f"Your text: {data}")
            return data
        self.title("A corpus of the text that every Python brings")
        corpus = self.folder / "corpus.jsonl"
        self.run_tool("make_corpus", "--output", corpus)
        return corpus

    def split(self, corpus: Path) -> str:
        """--split: a twentieth of the documents for validation and for the test, at least one."""
        with corpus.open("rb") as file:
            documents = sum(1 for line in file if line.strip())
        if documents < 3:
            raise Failed(
                f"{corpus} has {documents} documents (lines); training, validation and test need "
                "one each: split the text into more"
            )
        held_out = max(1, documents // 20)
        return f"{documents - 2 * held_out},{held_out},{held_out}"

    def tokenizer(self, corpus: Path) -> None:
        self.title("A byte-level BPE tokenizer for it")
        self.run_tool(
            *("train_tokenizer", "--input", corpus, "--vocab-size", VOCAB_SIZE),
            *("--output-dir", self.folder),
        )

    def preprocess(self, corpus: Path) -> None:
        self.title("Text to token files")
        self.run_tool(
            *("preprocess_data", "--input", corpus),
            *("--output-prefix", self.folder / "text", "--tokenizer-type", "GPT2BPETokenizer"),
            *(*self.vocabulary(), "--append-eod", "--workers", 2),
        )

    def unigram(self, split: str) -> None:
        self.title("What a model would reach that knows token frequencies alone")
        size = len(json.loads((self.folder / "vocab.json").read_text(encoding="utf-8")))
        self.run_tool(
            *("unigram_loss", "--data-path", self.tokens, "--split", split),
            *("--vocab-size", size, "--output", self.folder / "unigram.json"),
        )

    def train(self, split: str) -> None:
        count = processes()
        command: list[object] = [
            *(os.path.join(os.path.dirname(PYTHON), "deepspeed"), "--num_gpus", count),
            *("--master_port", free_port(), "pretrain_gpt.py", *MODEL, *TRAINING),
            *("--data-path", self.tokens, "--split", split, *self.vocabulary()),
            *("--save", self.checkpoints, "--load", self.checkpoints),
        ]
        self.title(f"Pretraining on {count} processes, the first {HALF} of {ITERATIONS} iterations")
        self.run_logged("train-1", *command, "--exit-interval", HALF, until=HALF)
        self.title("The same command again: it resumes from the checkpoint and finishes")
        self.run_logged("train-2", *command)

    def plot(self) -> None:
        self.title("The loss curve")
        self.run_tool(
            *("plot_loss", "--metrics", self.checkpoints / "metrics.jsonl"),
            *("--output", self.folder / "loss.png", "--baseline", f"{self.unigram_loss():.4f}"),
        )

    def generate(self, corpus: Path, *, own_text: bool) -> None:
        self.title("Text from prompts")
        prompts = prompt_prefixes(corpus) if own_text else PROMPTS
        self.run_logged(
            *("generate", PYTHON, "tools/generate_samples_gpt.py", "--load", self.checkpoints),
            *("--prompt", *prompts),
            *("--out-seq-length", 48, "--temperature", 0.7, "--top-p", 0.9),
        )

    def summary(self) -> None:
        seconds = time.monotonic() - self.start
        losses = final_losses(self.checkpoints / "metrics.jsonl")
        unigram = self.unigram_loss()
        better = unigram - losses["validation_loss"]
        print(
            f"\n== Done in {seconds // 60:.0f} min {seconds % 60:.0f} s. Everything is in "
            f"{self.folder}/\n\n"
            f"  validation loss     {losses['validation_loss']:.4f} nats per token\n"
            f"  test loss           {losses['test_loss']:.4f}\n"
            f"  unigram model       {unigram:.4f}: the GPT is {abs(better):.2f} "
            f"{'better' if better > 0 else 'WORSE'} on the validation data\n\n"
            f"  checkpoints/        what was trained, and metrics.jsonl\n"
            f"  loss.png            the curve\n"
            f"  logs/               all that the commands printed"
        )

    def vocabulary(self) -> tuple[object, ...]:
        return (
            *("--vocab-file", self.folder / "vocab.json"),
            *("--merge-file", self.folder / "merges.txt"),
        )

    def unigram_loss(self) -> float:
        return float(json.loads((self.folder / "unigram.json").read_text())["loss"])

    def title(self, text: str) -> None:
        self.step += 1
        print(f"\n== {self.step}/{STEPS} {text}", flush=True)

    def run_tool(self, tool: str, *options: object) -> None:
        """Runs a quick tool on this terminal. Raises Failed."""
        command = [PYTHON, f"tools/{tool}.py", *map(str, options)]
        show(command)
        code = subprocess.call(command)
        if code:
            raise Failed(f"{command[1]} failed (exit code {code})")

    def run_logged(self, name: str, *command: object, until: int = ITERATIONS) -> None:
        """Runs a long command: what matters on the terminal, all of it in a log. Raises Failed.

        until: the iteration at which this command ends.
        """
        words = [str(word) for word in command]
        show(words)
        log = self.logs / f"{name}.log"
        code, tail = stream(words, log, lambda line: filter_line(line, until))
        if code:
            last = "".join(f"  {line}\n" for line in tail)
            raise Failed(
                f"{name} failed (exit code {code}). Its last lines:\n{last}The rest is in {log}"
            )


def stream(
    words: list[str], log: Path, shown: Callable[[str], str | None]
) -> tuple[int, list[str]]:
    """Exit code and last lines of a command whose output goes to a log, and as `shown` to here."""
    tail: collections.deque[str] = collections.deque(maxlen=TAIL_LINES)
    with (
        log.open("w", encoding="utf-8") as file,
        subprocess.Popen(
            words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        ) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            file.write(line)
            file.flush()
            tail.append(line.rstrip())
            text = shown(line.rstrip())
            if text is not None:
                print(text, flush=True)
    return process.returncode, list(tail)


STEP_LINE = re.compile(
    r" iteration +(?P<at>\d+)/ *(?P<of>\d+) \|"
    r".* elapsed time per iteration \(s\): (?P<seconds>\S+) \|"
    r".* learning rate: (?P<lr>\S+) \|.* lm loss: (?P<loss>\S+) \|"
)
EVALUATION_LINE = re.compile(
    r" validation loss at (?P<where>[^|]+) \| lm loss value: (?P<loss>\S+)"
)
NOISE = re.compile(
    "|".join(
        (
            r"\[\d{4}-\d\d-\d\d [\d:,]+\] \[",  # DeepSpeed's log
            r"DeepSpeed \S+ built successfully",
            r".*Warning: |  return ",  # a warning of Python, and the line of code it shows
            r"-+ (end of )?arguments|  \w+ \.\.\.+ ",
            r"\[[^]]+\] datetime: |\[Rank \d+\] |start-up \(s\) ",
            r"(run|layout|model|batch|schedule|in force|kernels|memory) +\S| {9,}\S",  # the banner
            r"-+$|$",
        )
    )
)
"""What only the log needs: notes of the libraries, arguments and banner, rules."""


def filter_line(line: str, until: int) -> str | None:
    """A line of a run's output as the demo shows it; None for a line that only the log needs."""
    if step := STEP_LINE.match(line):
        seconds = float(step["seconds"])
        left = (until - int(step["at"])) * seconds
        return (
            f"  iteration {step['at']:>4}/{step['of']}   loss {float(step['loss']):.3f}   "
            f"learning rate {float(step['lr']):.1e}   {seconds:.2f} s each   {left:4.0f} s to go"
        )
    if evaluation := EVALUATION_LINE.match(line):
        return f"  validation at {evaluation['where']}: loss {float(evaluation['loss']):.3f}"
    return None if NOISE.match(line) else f"  {line}"


def show(command: list[str]) -> None:
    print(f"$ {shlex.join(command)}", flush=True)


def processes() -> int:
    """Two, so that they share the work; one on a machine with exactly one accelerator device."""
    prepare_environment()
    from deepspeed.accelerator import get_accelerator

    device = get_accelerator()
    return 2 if device.device_name() == "cpu" else min(2, device.device_count())


def free_port() -> int:
    """So that another run on this machine, which has DeepSpeed's default port, does not matter."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def prompt_prefixes(corpus: Path) -> list[str]:
    """The first words of the last three documents.

    From 40 documents on they are all held out (`Demo.split`), so no training has seen them; of
    fewer documents the first of the three is trained on.
    """
    with corpus.open(encoding="utf-8") as file:
        last = collections.deque((line for line in file if line.strip()), maxlen=3)
    words = (json.loads(line)["text"].split()[:PROMPT_WORDS] for line in last)
    prompts = [" ".join(first)[:PROMPT_CHARACTERS] for first in words if first]
    return prompts or list(PROMPTS)


def final_losses(metrics: Path) -> dict[str, float]:
    """The last validation_loss and test_loss of a run."""
    losses = {}
    for line in metrics.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        losses.update({key: record[key] for key in LOSSES if key in record})
    return losses


if __name__ == "__main__":
    sys.exit(main())
