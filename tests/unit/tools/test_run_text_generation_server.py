"""The command line of the server: what it reads and refuses; without a checkpoint."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from megatron_ds.inference.api_schema import Defaults
from tools import run_text_generation_server as tool

REPOSITORY = Path(__file__).resolve().parents[3]


def parse(*words: object) -> tool.Settings:
    settings, problems = tool.parse([str(word) for word in words])
    assert problems == []
    assert settings is not None
    return settings


def test_defaults_are_loopback_and_megatrons(tmp_path: Path) -> None:
    settings = parse("--load", tmp_path)

    assert (settings.args.host, settings.args.port) == ("127.0.0.1", 5000)
    assert settings.defaults == Defaults(64, 1.0, 0, 0.0)
    assert settings.precision is None


def test_megatrons_command_is_read(tmp_path: Path) -> None:
    line = (
        "--tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 --num-layers 24 "
        "--hidden-size 1024 --num-attention-heads 16 --max-position-embeddings 1024 "
        "--tokenizer-type GPT2BPETokenizer --fp16 --micro-batch-size 1 --seq-length 1024 "
        "--out-seq-length 1024 --temperature 1.0 --vocab-file V --merge-file M --top_p 0.9 "
        "--seed 42 --port 5001"
    )
    settings = parse("--load", tmp_path, *line.split())

    assert settings.defaults == Defaults(1024, 1.0, 0, 0.9)
    assert settings.args.port == 5001
    assert settings.precision == "fp16"
    assert settings.training.of_group("tokenizer")["vocab_file"] == "V"
    assert settings.training.of_group("model")["hidden_size"] == 1024
    assert "--seed" in settings.training.without_effect


def test_all_problems_are_named_at_once() -> None:
    words = (
        "--temperature 0 --top_k 3 --top_p 2 --port 70000 --out-seq-length 0 --micro-batch-size 0 "
        "--tensor-model-parallel-size 2 --bf16 --fp16 --hots x --load /no/such"
    )
    _, problems = tool.parse(words.split())

    starts = [
        "there is no flag --hots; did you mean --host?",
        "--temperature 0.0: must be positive",
        "--top-p 2.0: must lie between",
        "--load /no/such: there is no such folder",
        "--tensor-model-parallel-size 2: all processes share the model, and 1 were started",
        "--fp32, --bf16 and --fp16 exclude each other",
        "--top-k and --top-p exclude each other",
        "--port 70000: must lie between",
        "--out-seq-length 0: must be positive",
        "--micro-batch-size 0: must be positive",
    ]
    assert len(problems) == len(starts), problems
    for problem, start in zip(problems, starts, strict=True):
        assert problem.startswith(start)


def test_what_is_not_installed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool.importlib.util, "find_spec", lambda name: None)
    _, problems = tool.parse(["--load", str(tmp_path)])
    assert problems == ["fastapi and uvicorn not installed: pip install fastapi uvicorn"]


CODE = """
import runpy, sys
try:
    runpy.run_path("tools/run_text_generation_server.py", run_name="__main__")
except SystemExit as end:
    loaded = [name for name in ("torch", "fastapi", "transformers") if name in sys.modules]
    print("status", end.code, loaded, file=sys.stderr)
"""


def test_help_loads_no_torch() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE, "--help"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr.splitlines()[-1] == "status 0 []"
    assert "127.0.0.1" in done.stdout
