"""Every command of README.md, examples/README.md, tutorial.md and the pages of PAGES, in order, in
a fresh clone.

The shell runs each line once. Not those with `...` or for other programs (NOT_RUN), whose flags are
tested by `tests/unit/test_docs.py`. What takes minutes is reduced without changing them: `make`
prints what it would run, scripts get small sizes by their variables, and programs that import torch
are recorded by the environment's `python`, `deepspeed` and `torchrun`, and run in forked processes,
with smaller values of the flags in SMALL, or in the tutorial of those in ITERATIONS, and on fewer
ranks.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from megatron_ds.data.token_files.indexed_dataset import IndexedDataset
from megatron_ds.demo import corpus as make_corpus
from tests.e2e.runs import REPOSITORY, Launcher, Run, free_port, losses
from tests.fork_server import clean_environment


def by_name(*pairs: str) -> dict[str, str]:
    """The values of `name value` or `name=value`."""
    return dict(re.split("[ =]", pair) for pair in pairs)


SMALL = by_name(
    "--num-layers 2",
    "--hidden-size 64",
    "--num-attention-heads 4",
    "--seq-length 128",
    "--micro-batch-size 1",
    "--global-batch-size 2",
    "--train-iters 4",
    "--lr-warmup-iters 1",
    "--save-interval 2",
    "--log-interval 1",
    "--eval-interval 4",
    "--eval-iters 1",
)
VARIABLES = by_name(
    "LAYERS=2",
    "HIDDEN=32",
    "HEADS=4",
    "SEQ=32",
    "ITERS=4",
    "EVAL_ITERS=1",
    "MICRO=1",
    "GLOBAL=4",
    "LOG_INTERVAL=1",
    "PRECISION=--bf16",
    "WORKERS=2",
)
"""Variables that examples/README.md documents."""
BROUGHT = {
    "my-corpus.jsonl": "my.jsonl",
    "gpt2-vocab.json": "tokenizer/vocab.json",
    "gpt2-merges.txt": "tokenizer/merges.txt",
    "wikitext-103/wiki.test.tokens": "docs/start/use.md",
    "lambada_test.jsonl": "held_out.jsonl",
    "openai-community/gpt2": "exported",
    "my-llama": "exported",
}
"""Files that a user brings for the commands that name them, and their source in this test."""
PAGES = ("running/reports", "start/use", "use/serving", "use/evaluation", "start/finetuning")
OTHERS = r"^(pip|vllm|transformers|mlx_lm\.server|llama-server) "
"""Programs of other packages."""
NOT_RUN = re.compile(rf"\.\.\.|{OTHERS}| (--tasks|run --model) |/v1/chat/")
"""Also those that need a network or a chat template: `tests/e2e/test_harness.py` and
`test_server_clients.py` run others."""
ITERATIONS = (
    "--train-iters",
    "--lr-warmup-iters",
    "--exit-interval",
    "--log-interval",
    "--eval-interval",
    "--save-interval",
)
FEWER = 25
"""Divisor of the values of ITERATIONS in the tutorial's commands."""
RANKS = {
    "deepspeed": 2,
    "torchrun --nproc_per_node 4 --nnodes 1": 4,
    "torchrun --nproc_per_node": 2,
    "torchrun --nproc-per-node": 2,
    "torchrun": 1,
    "python": 1,
}
PROGRAMS = ("python", "deepspeed", "torchrun")
RECORDING = """\
#!/bin/sh
case "$*" in
    tools/generate_samples_gpt.py* | tools/run_text_generation_server.py* | tools/evaluate.py* | \\
    tools/convert_checkpoint.py* | examples/use/generate_with_transformers.py* | \\
    tools/preprocess_data.py*my-llama* | tasks/main.py* | --* | pretrain_gpt.py*)
        printf '%s\\n' {program} "$@" end >> {log} ;;
    tools/text_generation_cli.py*)
        exec {python} "$1" 127.0.0.1:{port} ;;
    examples/use/stream.py*)
        exec {python} "$1" 127.0.0.1:{port} "$3" ;;
    *)
        exec {python} "$@" ;;
esac
"""

CURL = """\
#!{python}
import sys, urllib.request
words = sys.argv[1:]
data = words[words.index("-d") + 1].encode() if "-d" in words else None
method = words[words.index("-X") + 1] if "-X" in words else None
url = "http://" + next(word for word in words if word.startswith("127")).replace("5000", "{port}")
with urllib.request.urlopen(urllib.request.Request(url, data, method=method)) as answer:
    print(answer.read().decode())
"""


Smaller = Callable[[str, str], str]


def documented_commands() -> list[str]:
    """The lines of all code blocks, continued lines joined, each line once."""
    pages = ("README.md", "examples/README.md", *(f"docs/{name}.md" for name in PAGES))
    text = "".join((REPOSITORY / page).read_text(encoding="utf-8") for page in pages)
    blocks = re.findall(r"^```\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
    lines = "".join(blocks).replace("\\\n", " ").replace(".venv/bin/python", "python").splitlines()
    return [line for line in dict.fromkeys(lines) if not NOT_RUN.search(line)]


def tutorial() -> list[tuple[str, list[str]]]:
    """The tutorial's code blocks, each with the lines of output that are shown after it."""
    text = (REPOSITORY / "docs" / "start" / "tutorial.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```\n(.*?)^```\n(.*?)(?=^```|\Z)", text, re.DOTALL | re.MULTILINE)
    return [(code, re.findall(r"^    (.*)", shown, re.MULTILINE)) for code, shown in blocks]


def without_numbers(line: str) -> str:
    """A line of output with # for every number, and single spaces."""
    return re.sub(r"[\d.,]*\d", "#", " ".join(line.split()))


def small(before: str, word: str) -> str:
    """The value that README's command gets instead of its own."""
    return SMALL.get(before, word)


def fewer_iterations(before: str, word: str) -> str:
    """The value that the tutorial's commands get instead of their own."""
    return str(max(1, int(word) // FEWER)) if before in ITERATIONS else word


class Clone:
    """A clone with this environment and the files that the documentation lets users bring.

    Args:
        smaller: By the first word of a command (`deepspeed`, `torchrun`, `python`): a function of a
            flag and its value, which returns the value that is used.
    """

    def __init__(self, folder: Path, launcher: Launcher, smaller: Mapping[str, Smaller]) -> None:
        self.folder = folder
        self._launcher = launcher
        self.port = free_port()
        self._smaller = smaller
        subprocess.run(["git", "clone", "-q", REPOSITORY, folder], check=True)
        changed = ["git", "ls-files", "-mo", "--exclude-standard"]  # not committed yet
        for name in subprocess.check_output(changed, cwd=REPOSITORY, text=True).splitlines():
            (folder / name).unlink(missing_ok=True)
            if (REPOSITORY / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(REPOSITORY / name, folder / name)
        programs = folder / ".venv" / "bin"
        programs.mkdir(parents=True)
        self._log = folder / ".venv" / "log"
        for program in PROGRAMS:
            values = {"program": program, "log": self._log, "python": sys.executable}
            (programs / program).write_text(RECORDING.format(port=self.port, **values))
            (programs / program).chmod(0o755)
        (programs / "curl").write_text(CURL.format(port=self.port, python=sys.executable))
        (programs / "curl").chmod(0o755)
        (programs / "activate").touch()
        self._environment = {
            **clean_environment(),
            **VARIABLES,
            "PATH": f"{programs}:/usr/bin:/bin",
            "PYTHONPATH": str(folder),
            "MAKEFLAGS": "n",
        }
        write_text(folder / "my.jsonl", documents=1100)  # for a split of one in a thousand
        write_text(folder / "held_out.jsonl", documents=100)

    def bring(self, name: str) -> None:
        """Puts what BROUGHT names in its place."""
        source = self.folder / BROUGHT[name]
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(source, path) if source.is_dir() else shutil.copy(source, path)

    def remove(self, name: str) -> None:
        path = self.folder / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()

    def run(self, line: str) -> tuple[str, list[Run]]:
        """Runs a line in the shell, then what it recorded; returns its output and these runs."""
        self._log.write_text("")
        done = subprocess.run(
            ["bash", "-c", line],
            cwd=self.folder,
            env=self._environment,
            input="Once upon a time\n5\n",
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
        recorded = re.findall(r"(.*?\n)end\n", self._log.read_text(), flags=re.DOTALL)
        return done.stdout, [self._fork(words.splitlines()) for words in recorded]

    def _fork(self, words: Sequence[str]) -> Run:
        script = next(word for word in words if word.endswith(".py"))
        launch = words[: words.index(script)]
        flags = words[words.index(script) + 1 :]
        if smaller := self._smaller.get(launch[0]):
            flags = [smaller(*pair) for pair in zip(["", *flags], flags)]  # noqa: B905
        if script.endswith("server.py"):
            flags = [*flags, "--port", str(self.port)]
        ranks = next(count for start, count in RANKS.items() if " ".join(launch).startswith(start))
        path = self.folder / script
        return self._launcher.start(flags, ranks=ranks, script=path, folder=self.folder)

    def wait_for_server(self, run: Run) -> None:
        def answers() -> bool:
            with socket.socket() as probe:
                return probe.connect_ex(("127.0.0.1", self.port)) == 0

        run.wait_until(answers)


def write_text(path: Path, documents: int) -> None:
    """Short documents."""
    make_corpus.main(["--output", str(path), "--megabytes", "0.2"])
    long = "".join(json.loads(line)["text"] for line in path.read_text().splitlines())
    pieces = (long[start : start + 150] for start in range(0, 150 * documents, 150))
    path.write_text("".join(json.dumps({"text": piece}) + "\n" for piece in pieces))


@pytest.mark.skipif(not (REPOSITORY / ".git").exists(), reason="no clone without a repository")
def test_documented_commands_run_in_a_fresh_clone(tmp_path: Path, launcher: Launcher) -> None:
    """Claim (command-line): the commands of the README and of [examples/](../../examples/README.md)
    run in order in a fresh clone, training at small sizes"""
    clone = Clone(tmp_path / "clone", launcher, {"deepspeed": small})
    outputs: dict[str, str] = {}
    servers = []
    for line in documented_commands():
        if "run_text_generation_server.py" in line and servers:
            os.kill(servers[-1].pids[0], signal.SIGTERM)
            servers[-1].succeed()
        brought = [name for name in BROUGHT if name in line]
        for name in brought:
            clone.bring(name)
        output, runs = clone.run(line)
        if "run_text_generation_server.py" in line:
            clone.wait_for_server(runs[0])
            servers += runs
        else:
            output += "".join(run.succeed() for run in runs)
        outputs[line] = output
        for name in brought:  # a command does not need what only another one names
            clone.remove(name)
    check_results(clone.folder, outputs)
    assert len(servers) == 1


def check_results(folder: Path, outputs: Mapping[str, str]) -> None:
    """Every command did its work."""

    def output_of(part: str) -> str:
        (found,) = (output for line, output in outputs.items() if part in line)
        return found

    assert "tools/demo.py" in output_of("make demo")
    assert "pytest" in output_of("make test")
    documents = len((folder / "my.jsonl").read_text().splitlines())
    for prefix in ("data/my_text_document", "data/my-gpt2_text_document"):
        assert len(IndexedDataset(folder / prefix)) == documents
    both = [(folder / f"data/{name}_text_document.bin").read_bytes() for name in ("my", "my-gpt2")]
    assert both[0] == both[1]
    assert len(losses(folder / "checkpoints")) == 4
    assert list((folder / "tensorboard").glob("events.out.tfevents.*"))
    greedy = output_of("--greedy").partition("Generated: ")[2].strip()
    answers = [output_of(f"curl 127.0.0.1:5000/{path} -d") for path in ("v1/completions", "api")]
    texts = [json.loads(answers[0])["choices"][0]["text"], json.loads(answers[1])["text"][0]]
    assert len(greedy) > 5
    for text in (*texts, output_of("stream.py"), output_of("generate_with_transformers.py")):
        assert text.rpartition("Once upon a time")[2].strip() == greedy
    assert "Once upon a time" in output_of("100 --temperature 0.8")
    assert all("bits per byte" in text for line, text in outputs.items() if "evaluate.py" in line)
    assert re.search(r"^word perplexity +\d", output_of("WIKITEXT103"), re.MULTILINE)
    assert re.search(r"^accuracy +0\.?\d*$", output_of("LAMBADA"), re.MULTILINE)
    assert len(losses(folder / "finetuned")) == 4
    assert (folder / "my-finetuned" / "model.safetensors").is_file()
    assert "Megatron Response:\nOnce upon a time" in output_of("text_generation_cli.py")
    assert "4 processes" in output_of("pretrain_gpt_distributed.sh")
    distributed = folder / "checkpoints" / "gpt2_345m"
    assert len(losses(distributed)) == 4
    assert list((distributed / "tensorboard").glob("events.out.tfevents.*"))
    assert len(losses(folder / "checkpoints" / "tiny")) == 20
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert re.search(r">--hidden-size</th>(<td[^>]*>\d+</td>){2}</tr>", page)
    assert (folder / "charts" / "loss-tokens.png").stat().st_size > 1000
    assert "ended with status 0" in output_of("watch.py")


@pytest.mark.skipif(not (REPOSITORY / ".git").exists(), reason="no clone without a repository")
def test_the_tutorial_prints_what_it_shows(tmp_path: Path, launcher: Launcher) -> None:
    """Claim (command-line): the commands of the [tutorial](../start/tutorial.md) run in order, and
    print the lines that it shows"""
    clone = Clone(tmp_path / "clone", launcher, dict.fromkeys(PROGRAMS, fewer_iterations))
    shown_lines = 0
    for code, shown in tutorial():
        output, runs = clone.run(code)
        if "run_text_generation_server.py" in code:
            clone.wait_for_server(runs[0])
            with urllib.request.urlopen(f"http://127.0.0.1:{clone.port}/", timeout=120) as answer:
                assert answer.headers["Content-Type"].startswith("text/html")
            question = {"messages": [{"role": "user", "content": "What does len do?"}]}
            url = f"http://127.0.0.1:{clone.port}/v1/chat/completions"
            body = json.dumps({**question, "max_tokens": 2}).encode()
            with urllib.request.urlopen(url, body, timeout=120) as answer:
                assert json.load(answer)["choices"][0]["message"]["role"] == "assistant"
            output += runs[0].output
        else:
            output += "".join(run.succeed() for run in runs)
        printed = "\n".join(map(without_numbers, output.splitlines()))
        for line in shown:
            pattern = ".*".join(map(re.escape, without_numbers(line).split("...")))
            assert re.search(rf"^{pattern}$", printed, re.MULTILINE), f"{line}\n{output}"
        shown_lines += len(shown)
    assert shown_lines > 20
    assert len(losses(clone.folder / "checkpoints")) == 300 // FEWER
    assert len(losses(clone.folder / "chat")) == 300 // FEWER
    assert (clone.folder / "loss.png").stat().st_size > 1000
