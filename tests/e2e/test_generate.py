"""A tiny training by pretrain_gpt.py, and texts from its checkpoint, run as commands."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from megatron_ds.data.indexed_writer import pair_writer
from tests.e2e.runs import clean_environment, free_port

REPOSITORY = Path(__file__).resolve().parents[2]
PROGRAMS = Path(sys.executable).parent
TOOL = "tools/generate_samples_gpt.py"
VOCAB = 30
PERIOD = 7
"""The data count 0 ... 6 repeatedly, which a small model learns in seconds."""
DEADLINE = 300


@dataclass
class CommandResult:
    """Output of a finished command."""

    stdout: str
    stderr: str


def run(*argv: object, code: int = 0, stdin: str = "") -> CommandResult:
    """Runs a command, which must exit with `code`, and ends all its processes."""
    process = subprocess.Popen(
        [str(argument) for argument in argv],
        cwd=REPOSITORY,
        env=clean_environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        stdout, stderr = process.communicate(stdin, timeout=DEADLINE)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert process.returncode == code, stdout + stderr
    return CommandResult(stdout, stderr)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The --save folder of a model that counts."""
    folder = tmp_path_factory.mktemp("generate")
    with pair_writer(str(folder / "data"), np.uint16) as writer:
        for start in range(64):
            writer.add_document((np.arange(start, start + 65) % PERIOD).astype(np.uint16))
    run(
        *(sys.executable, "pretrain_gpt.py", "--tokenizer-type", "NullTokenizer"),
        *("--vocab-size", VOCAB, "--data-path", folder / "data", "--split", "1,0,0"),
        *("--num-layers", 2, "--hidden-size", 32, "--num-attention-heads", 4),
        *("--num-query-groups", 2, "--position-embedding-type", "rope", "--seq-length", 16),
        *("--micro-batch-size", 8, "--lr", 0.01, "--train-iters", 60, "--lr-warmup-iters", 5),
        *("--attention-dropout", 0, "--hidden-dropout", 0, "--eval-iters", 0, "--num-workers", 0),
        *("--save", folder / "saved", "--log-interval", 20),
    )
    return folder / "saved"


def counted(start: int, count: int) -> str:
    return " ".join(str((start + index) % PERIOD) for index in range(count))


EXPECTED = "".join(
    f"Context: {counted(start, length)}\nGenerated: {counted(start + length, 24)}\n\n"
    for start, length in ((0, 3), (5, 9))
)
"""Exceeds the training's 16 tokens: rotary positions are relative."""


@pytest.mark.parametrize(
    "start",
    [
        (sys.executable,),
        (PROGRAMS / "torchrun", "--standalone", "--nproc-per-node=2"),
        (PROGRAMS / "deepspeed", "--num_gpus=2", f"--master_port={free_port()}"),
    ],
    ids=["python", "torchrun", "deepspeed"],
)
def test_every_launcher_gives_the_same_texts(trained: Path, start: tuple[object, ...]) -> None:
    prompts = ("--prompt", counted(0, 3), "--prompt", counted(5, 9))
    done = run(*start, TOOL, "--load", trained, *prompts, "--greedy", "--out-seq-length", 24)
    if "deepspeed" in str(start[0]):
        assert EXPECTED in done.stdout
    else:
        assert done.stdout == EXPECTED


def test_prompts_from_a_file_without_cache(trained: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text(f"{counted(0, 3)}\n{counted(5, 9)}\n", encoding="utf-8")
    checkpoint = trained / "global_step60"
    done = run(
        *(sys.executable, TOOL, "--load", checkpoint, "--sample-input-file", prompts),
        *("--recompute", "--top-k", 1, "--temperature", 0.5, "--bf16", "--tokens-to-generate", 24),
        *("--hidden-size", 32, "--seq-length", 16, "--use-rotary-position-embeddings"),
    )
    assert (tmp_path / "prompts.txt.out").read_text("utf-8") == EXPECTED
    assert done.stdout == ""
    assert f"loading the checkpoint {checkpoint}" in done.stderr


def test_unconditional_samples_depend_on_the_seed(trained: Path, tmp_path: Path) -> None:
    def samples(name: str, *flags: object) -> list[dict[str, object]]:
        command = (sys.executable, TOOL, "--load", trained, "--num-samples", 5)
        run(*command, "--genfile", tmp_path / name, "--temperature", 3, *flags)
        lines = (tmp_path / name).read_text("utf-8").splitlines()
        return [json.loads(line) for line in lines]

    first = samples("a", "--seed", 3)

    assert len({str(record["text"]) for record in first}) == 5
    assert all(record.keys() == {"text", "length", "finished"} for record in first)
    # Without --out-seq-length a text fills the training's sequence length; one token is the start.
    assert all(record["finished"] or record["length"] == 15 for record in first)
    assert samples("b", "--seed", 3, "--micro-batch-size", 2) == first


def test_interactive_prompts_are_continued(trained: Path) -> None:
    done = run(
        *(sys.executable, TOOL, "--load", trained, "--greedy", "--out-seq-length", 24),
        stdin=f"{counted(0, 3)}\nnot a number\n{counted(5, 9)}\nstop\n",
    )
    assert done.stdout == EXPECTED
    assert "NullTokenizer" in done.stderr


def test_unsuitable_checkpoints_and_prompts_are_reported(trained: Path, tmp_path: Path) -> None:
    for folder, prompt, flags, status, code in (
        (trained, "1", ("--hidden-size", 64), 2, "flag-differs-from-checkpoint"),
        (tmp_path, "1", (), 1, "checkpoint-missing"),
        (trained, counted(0, 16), (), 2, "prompt-fills-sequence"),
    ):
        command = (sys.executable, TOOL, "--load", folder, "--prompt", prompt, *flags)
        result = run(*command, code=status)
        assert f"[{code}]" in result.stderr
        assert "Traceback" not in result.stderr
