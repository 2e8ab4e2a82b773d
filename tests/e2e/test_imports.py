"""Programs start in processes of their own: what they import, and from which folders they run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_ds.demo import corpus as make_corpus
from tests.e2e.runs import Launcher
from tests.import_graph import REPOSITORY, module_of, sources
from tests.unit.conversion.hf_models import random_model

IMPORT_ALL = """
import importlib, sys
from unittest.mock import patch
import torch, torch.utils.cpp_extension  # the imports of other packages are not checked

def load(modules):
    with (
        patch("subprocess.Popen.__init__", refuse),
        patch("socket.socket.connect", refuse),
        patch("torch.utils.cpp_extension.load", refuse),
        patch("torch.utils.cpp_extension.load_inline", refuse),
    ):
        for module in modules:
            importlib.import_module(module)

def refuse(self=None, *arguments, **keywords):
    raise SystemExit(f"an import started or fetched something: {arguments}")

sys.modules["deepspeed"] = None  # importing it raises ImportError
load(f"megatron_ds.{name}" for name in (
    "model.gpt", "inference.serving.service", "inference.load_checkpoint",
    "launch.ranks.distributed", "conversion.registry",
))
from megatron_ds.config import Config
from megatron_ds.train_state import TrainState
from megatron_ds.training.loggers import selection
selection.open_loggers(Config(), TrainState(), world_size=1, dp_size=1, save=None, write=print)
assert "tensorboard" not in sys.modules
del sys.modules["deepspeed"]
import deepspeed
load(sys.argv[1:])
print("imported")
"""


def test_importing_builds_and_fetches_nothing_and_generation_needs_no_deepspeed() -> None:
    """And tensorboard is imported only if it is used."""
    command = [sys.executable, "-c", IMPORT_ALL, *map(module_of, sources())]
    result = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert result.stdout.endswith("imported\n"), result.stderr[-2000:]


RUN = """
import os, runpy, sys
try:
    del sys.argv[0]
    sys.path.insert(0, os.path.dirname(os.path.abspath(sys.argv[0])))
    runpy.run_path(f"{sys.argv[0]}.py", run_name="__main__")
except SystemExit as end:
    slow = ("torch", "deepspeed", "transformers", "fastapi")
    print("status", end.code, [name for name in slow if name in sys.modules], file=sys.stderr)
"""


@pytest.mark.parametrize(
    ("command", "status", "shown"),
    [
        ("pretrain_gpt --help-all", 0, "--num-layers"),
        ("pretrain_gpt --version", 0, "deepspeed"),
        ("pretrain_gpt --num-layers two --fp17", 2, ""),
        ("tools/generate_samples_gpt --help", 0, "--temperature"),
        ("tools/generate_samples_gpt --top-k -1", 2, ""),
        ("tools/run_text_generation_server --help", 0, "127.0.0.1"),
        ("tools/report --help", 0, "--peak-tflops"),
        ("tools/watch tests --once", 0, "no step yet"),
        (
            "tools/plan --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 "
            "--vocab-size 256",
            0,
            "layouts that fit",
        ),
        ("tools/slurm submit tests --ranks-per-node 2", 2, ""),
    ],
)
def test_help_and_problems_load_no_torch(command: str, status: int, shown: str) -> None:
    argv = [sys.executable, "-c", RUN, *command.split()]
    done = subprocess.run(argv, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert done.stderr.splitlines()[-1] == f"status {status} []"
    assert shown in done.stdout


def test_preprocessing_imports_what_it_uses() -> None:
    code = """
import sys, megatron_ds.preprocess.pipeline, megatron_ds.tokenizer.gpt2
from megatron_ds.preprocess.documents.sentence_splitter import choose_splitter
choose_splitter("english", False, "rules")("A b. C.")
slow = ("torch", "transformers", "deepspeed", "rich", "nltk")
sys.exit(str([name for name in slow if name in sys.modules] or ""))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True)
    assert done.stderr == b"\n"


def test_a_script_runs_from_any_folder(launcher: Launcher, tmp_path: Path) -> None:
    random_model("llama").save_pretrained(tmp_path / "theirs")
    path = REPOSITORY / "tools" / "zero_to_fp32.py"
    # In a new process, which finds the package; torch is imported already in the other one.
    subprocess.run([sys.executable, path, "--help"], cwd=tmp_path, check=True, capture_output=True)
    launcher.start(["theirs", "new"], script=path, folder=tmp_path).succeed()
    assert list((tmp_path / "new").glob("*.safetensors"))


def test_corpus_is_real_text_and_deterministic(tmp_path: Path) -> None:
    first = tmp_path / "1.jsonl"
    second = tmp_path / "2.jsonl"
    for path in (first, second):
        assert make_corpus.main(["--output", str(path), "--megabytes", "1"]) == 0

    texts = [json.loads(line)["text"] for line in first.read_text().splitlines()]

    assert first.read_bytes() == second.read_bytes()
    assert len(texts) > 20
    assert 0.5e6 < sum(len(text.encode()) for text in texts) <= 1e6
    assert sum("def " in text for text in texts) > len(texts) / 2
