"""The program that runs exports in inference engines, with an engine of the test's own."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.engines import run
from tests.engines.computed import HERE, Computed
from tests.engines.models import MODELS

ENGINE = f"""\
import os, sys
from pathlib import Path
sys.path.insert(0, {str(HERE / "runners")!r})
import cases

class Model:
    def __init__(self, path, scratch):
        self.path = Path(path)
        with self.path.with_name("loaded.txt").open("a") as file:
            file.write(self.path.read_text() + " ")
        if self.path.read_text() == "dies":
            os._exit(3)

    def log_probabilities(self, ids):
        if self.path.read_text() == "refused":
            raise ValueError("no such model")
        return [[0.0, -1.0]] * len(ids)

    def continued(self, prompt, new):
        return "text"

cases.run(Model)
"""


def model(name: str, folder: Path) -> Any:
    """An exported model whose file has its name."""
    path = folder / name
    path.write_text(name)
    return SimpleNamespace(
        name=name,
        written=lambda engine: path,
        ids=[0, 1],
        prompt="a",
        log_probabilities=torch.tensor([[0.0, -1.0], [0.0, -1.0]]),
        continuation=("text", 1.0),
        facts=lambda engine: [],
    )


def test_computed_models_are_not_computed_again(tmp_path: Path) -> None:
    """After a crash, and in the next run, which judges what is kept."""
    (tmp_path / "runner.py").write_text(ENGINE)
    models = [model(name, tmp_path) for name in ("first", "dies", "refused", "last")]
    loaded = tmp_path / "loaded.txt"

    def outcomes() -> dict[str, str]:
        computed = Computed("fake", tmp_path / "kept", tmp_path / "runner.py")
        found = run.run_engine("fake", Path(sys.executable), models, tmp_path / "out", computed)
        return {name: record["outcome"] for name, record in found}

    expected = {"first": "equal", "dies": "crashed", "refused": "refused", "last": "equal"}
    assert outcomes() == expected
    assert loaded.read_text().split() == ["first", "dies", "refused", "last"]
    loaded.unlink()
    models[0].log_probabilities = torch.tensor([[-2.0, -1.0], [0.0, -1.0]])
    assert outcomes() == expected | {"first": "differs"}
    assert loaded.read_text().split() == ["dies"]
    loaded.unlink()
    models[3].ids = [1, 1]  # the engine is given something else
    assert outcomes() == expected | {"first": "differs"}
    assert loaded.read_text().split() == ["dies", "last"]


@pytest.mark.parametrize("argv", [["nothing"], ["vllm", "--models", "nothing"]])
def test_unknown_names_are_named(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        run.main(argv)
    assert raised.value.code == 2
    message = capsys.readouterr().err
    assert "nothing" in message
    assert all(name in message for name in (MODELS if "--models" in argv else ("vllm", "mlx")))
