"""A tiny training by pretrain_gpt.py, and texts from its checkpoint."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.e2e.runs import REPOSITORY, Launcher, Settings, to_flags
from tests.token_files import write_pair

TOOL = REPOSITORY / "tools" / "generate_samples_gpt.py"
WITHOUT_DEEPSPEED = """
import os, runpy, sys
sys.modules["deepspeed"] = None
sys.argv = sys.argv[1:]
sys.path.insert(0, os.path.dirname(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")
"""
VOCAB = 30
PERIOD = 7
"""The data count 0 ... 6 repeatedly, which a small model learns in seconds."""


@pytest.fixture(scope="module")
def trained(launcher: Launcher, base: Settings, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The --save folder of a model that counts."""
    folder = tmp_path_factory.mktemp("generate")
    documents = [np.arange(start, start + 65) % PERIOD for start in range(64)]
    settings = {
        **base,
        "data_path": write_pair(folder / "data", documents),
        "split": "1,0,0",
        "vocab_size": VOCAB,
        "num_query_groups": 2,
        "position_embedding_type": "rope",
        "seq_length": 16,
        "micro_batch_size": 8,
        "train_iters": 60,
        "lr_warmup_iters": 5,
        "attention_dropout": 0,
        "hidden_dropout": 0,
        "save": folder / "saved",
        # Generation runs without sequence parallelism, on any number of ranks.
        "tensor_model_parallel_size": 2,
        "sequence_parallel": True,
    }
    launcher.start(settings, ranks=2).succeed()
    return folder / "saved"


def counted(start: int, count: int) -> str:
    return " ".join(str((start + index) % PERIOD) for index in range(count))


PROMPTS = (counted(0, 3), counted(5, 9))
EXPECTED = "".join(
    f"Context: {counted(start, length)}\nGenerated: {counted(start + length, 24)}\n\n"
    for start, length in ((0, 3), (5, 9))
)
"""Exceeds the training's 16 tokens: rotary positions are relative."""


@pytest.mark.proof
def test_two_ranks_of_a_launcher_give_the_same_texts(trained: Path, launcher: Launcher) -> None:
    settings = {"load": trained, "prompt": PROMPTS, "greedy": True, "out_seq_length": 24}
    run, _ = launcher.launch("torchrun", settings, TOOL)
    run.succeed()
    assert run.stdout == EXPECTED


def test_interactive_prompts_are_continued_without_deepspeed(
    trained: Path, launcher: Launcher
) -> None:
    typed = f"{PROMPTS[0]}\\nnot a number\\n{PROMPTS[1]}\\nstop\\n"
    flags = to_flags({"load": trained, "greedy": True, "out_seq_length": 24})
    command = shlex.join([sys.executable, "-c", WITHOUT_DEEPSPEED, str(TOOL), *flags])
    run = launcher.command(["sh", "-c", f"printf '{typed}' | {command}"])
    assert "NullTokenizer" in run.succeed()
    assert run.stdout == EXPECTED


def test_prompts_from_a_file_without_cache(
    trained: Path, launcher: Launcher, tmp_path: Path
) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("".join(f"{prompt}\n" for prompt in PROMPTS), encoding="utf-8")
    checkpoint = trained / "global_step60"
    settings = {
        "load": checkpoint,
        "sample_input_file": prompts,
        "recompute": True,
        "top_k": 1,
        "temperature": 0.5,
        "bf16": True,
        "tokens_to_generate": 24,
        "hidden_size": 32,
        "seq_length": 16,
        "use_rotary_position_embeddings": True,
    }
    output = launcher.start(settings, script=TOOL).succeed()
    assert (tmp_path / "prompts.txt.out").read_text("utf-8") == EXPECTED
    assert "Generated" not in output
    assert f"wrote 2 texts to {prompts}.out" in output
    assert f"loading the checkpoint {checkpoint}" in output


def test_unconditional_samples_depend_on_the_seed(
    trained: Path, launcher: Launcher, tmp_path: Path
) -> None:
    settings = {"load": trained, "num_samples": 5, "temperature": 3, "seed": 3}

    def samples(name: str, **more: object) -> list[dict[str, object]]:
        chosen = {**settings, "genfile": tmp_path / name, **more}
        launcher.start(chosen, script=TOOL).succeed()
        lines = (tmp_path / name).read_text("utf-8").splitlines()
        return [json.loads(line) for line in lines]

    first = samples("a")

    assert len({str(record["text"]) for record in first}) == 5
    assert all(record.keys() == {"text", "length", "finished"} for record in first)
    # Without --out-seq-length a text fills the training's sequence length; one token is the start.
    assert all(record["finished"] or record["length"] == 15 for record in first)
    assert samples("b", micro_batch_size=2) == first
