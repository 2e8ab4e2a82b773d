"""The page of notebooks, whose cells run in one process, and what a loaded model computes."""

from __future__ import annotations

import json
import re
import sys
import textwrap
from pathlib import Path

import pytest
import torch

import megatron_ds
from megatron_ds.conversion.registry import open_source
from megatron_ds.inference.load_checkpoint import load_model
from megatron_ds.parallel.mesh import Mesh
from tests.e2e.runs import REPOSITORY, Launcher, losses, records

PAGE = REPOSITORY / "docs" / "use" / "notebook.md"
TOOLS = REPOSITORY / "tools"
TEXTS = ["import os\nimport sys\n", "The return value is a string. " * 30]


def cells() -> list[str]:
    """The cells of the page, with commands as calls."""
    text = PAGE.read_text(encoding="utf-8")
    return [as_python(cell) for cell in re.findall(r"^```python\n(.*?)^```", text, re.S | re.M)]


def as_python(cell: str) -> str:
    """A cell whose lines that begin with `!` are shell commands."""

    def call(match: re.Match[str]) -> str:
        command = match[1].replace("megatron-ds", f"{sys.executable} -m megatron_ds", 1)
        return f"__import__('subprocess').run({command!r}, shell=True, check=True)"

    return re.sub(r"^!((?:.*\\\n)*.*)$", call, cell, flags=re.M)


def run_program(launcher: Launcher, script: Path) -> str:
    """Runs a program as a process without a launcher's variables, in its folder.

    Returns:
        What it writes.
    """
    variables = {"PYTHONPATH": str(REPOSITORY)}  # for the commands that it starts
    run = launcher.start([], script=script, folder=script.parent, per_rank=[variables])
    return run.succeed()


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory, launcher: Launcher) -> Path:
    """The folder in which the cells of the page ran, with their output in `output`."""
    folder = tmp_path_factory.mktemp("notebook")
    script = folder / "notebook.py"
    # The last expression of a cell is shown, as in a notebook.
    show = textwrap.dedent("""
        import ast, json, sys
        for number, cell in enumerate(json.load(open("cells.json"))):
            body = ast.parse(cell).body
            last = body.pop() if isinstance(body[-1], ast.Expr) else None
            exec(compile(ast.Module(body, []), f"cell {number}", "exec"), globals())
            if last is not None:
                value = eval(compile(ast.Expression(last.value), f"cell {number}", "eval"))
                print(f"Out[{number}]: {value!r}")
    """)
    script.write_text(show)
    (folder / "cells.json").write_text(json.dumps(cells()))
    (folder / "output").write_text(run_program(launcher, script))
    return folder


@pytest.fixture(scope="module")
def model(notebook: Path) -> megatron_ds.LanguageModel:
    return megatron_ds.load(str(notebook / "checkpoints"))


def test_the_cells_of_the_page_run(notebook: Path) -> None:
    """Claim (library): the cells of the page on notebooks run in one process"""
    output = (notebook / "output").read_text()
    assert "<run: finished, iterations 1 to 20, loss " in output
    assert re.search(r"training: +100%.*20/20", output)
    kept = losses(notebook / "checkpoints")
    assert len(kept) == 30
    assert re.search(r"Out\[\d+\]: \(21, 30, \d", output)
    figures = [record.get("best_validation_loss") for record in records(notebook / "checkpoints")]
    assert sum(figure is not None for figure in figures) == 5
    assert (notebook / "exported" / "model.safetensors").is_file()


def test_a_loaded_model_generates_what_the_program_does(
    model: megatron_ds.LanguageModel, notebook: Path, launcher: Launcher
) -> None:
    """Claim (library): a loaded model generates the texts of the program with the same seed, also
    piece by piece
    """
    prompts = ["import os\n", "def __init__(self", "The"]
    path = notebook / "texts.jsonl"
    sampling = {"temperature": 0.8, "top_p": 0.9, "seed": 7}
    flags = [
        word
        for name, value in sampling.items()
        for word in (f"--{name.replace('_', '-')}", str(value))
    ]
    words = ["--load", str(notebook / "checkpoints"), "--out-seq-length", "16", *flags]
    launcher.start(
        [*words, "--genfile", str(path), "--prompt", *prompts],
        script=TOOLS / "generate_samples_gpt.py",
    ).succeed()
    theirs = [json.loads(line)["text"] for line in path.read_text().splitlines()]

    assert model.generate(prompts, max_new_tokens=16, **sampling) == theirs
    assert model.generate(prompts[0], max_new_tokens=16, **sampling) == theirs[0]
    pieces = [*model.stream(prompts[0], max_new_tokens=16, **sampling)]
    assert "".join(pieces) == theirs[0]
    assert len(pieces) > 1


def test_a_stop_ends_a_text_and_is_not_part_of_it(model: megatron_ds.LanguageModel) -> None:
    whole = model.generate("import os\n", max_new_tokens=16, seed=3)
    stop = whole[5:7]
    expected = whole[: whole.index(stop)]
    assert model.generate("import os\n", max_new_tokens=16, seed=3, stop=stop) == expected
    assert "".join(model.stream("import os\n", max_new_tokens=16, seed=3, stop=stop)) == expected


def test_the_loss_of_a_loaded_model_is_the_one_of_the_evaluation(
    model: megatron_ds.LanguageModel, notebook: Path, launcher: Launcher
) -> None:
    """Claim (library): a loaded model has the loss of the evaluation's program, bit for bit"""
    path = notebook / "held_out.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    output = notebook / "evaluation.json"
    words = ["--load", str(notebook / "checkpoints"), "--valid-data", str(path)]
    launcher.start([*words, "--output", str(output)], script=TOOLS / "evaluate.py").succeed()
    assert model.loss(TEXTS) == json.loads(output.read_text())["loss"]


def test_logits_are_those_of_the_models_forward_pass(model: megatron_ds.LanguageModel) -> None:
    """Claim (library): a loaded model's logits are those of the model"""
    source = open_source(model.path)
    plain = load_model(source, Mesh.single(), torch.device("cpu"))
    source.release()
    ids = model.tokenizer.encode(TEXTS[0])
    with torch.no_grad():
        expected = plain(torch.tensor([ids]))[..., : model.tokenizer.vocab_size]
    logits = model.logits(ids)
    assert logits.shape == (len(ids), model.tokenizer.vocab_size)
    torch.testing.assert_close(logits, expected[0])
    torch.testing.assert_close(model.logits([ids, ids])[1], expected[0])


def test_an_export_has_the_files_of_the_converter(
    model: megatron_ds.LanguageModel, notebook: Path, launcher: Launcher, tmp_path: Path
) -> None:
    """Claim (library): the export of a loaded model has the bytes of the converter's"""
    words = ["--load", str(notebook / "checkpoints"), "--save", str(tmp_path / "theirs")]
    script = TOOLS / "convert_checkpoint.py"
    launcher.start([*words, "--to", "hf"], script=script).succeed()
    model.to_hf(tmp_path / "ours")
    ours, theirs = (
        {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()}
        for name in ("ours", "theirs")
    )
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= ours.keys()
    assert ours == theirs
    exported = megatron_ds.load(str(tmp_path / "ours"))
    assert exported.loss(TEXTS) == pytest.approx(model.loss(TEXTS), rel=1e-6)


OUTCOMES = ("interrupted", "raised", "rejected", "resumed")
"""First words of the lines that GUEST prints."""
GUEST = """
import os, signal, sys
import megatron_ds

class Interrupt(megatron_ds.Callback):
    def after_step(self, state, result):
        if state.iteration == 2:
            os.kill(os.getpid(), signal.SIGINT)

class Fail(megatron_ds.Callback):
    def after_step(self, state, result):
        raise ValueError("of the callback")

settings = dict(
    num_layers=1, hidden_size=32, num_attention_heads=2, seq_length=16, micro_batch_size=2, lr=1e-2,
    global_batch_size=2, train_iters=50, mock_data=True, tokenizer_type="NullTokenizer",
    vocab_size=50, num_workers=0, log_interval=1, eval_iters=0, progress=False,
)
before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM), sys.excepthook
run = megatron_ds.pretrain(save="run", callbacks=[Interrupt()], **settings)
print("interrupted", int(run.status), run.checkpoint == f"run/global_step{run.iterations[-1]}")
assert before == (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM), sys.excepthook)
try:
    megatron_ds.pretrain(save="other", callbacks=[Fail()], **settings)
except ValueError as error:
    print("raised", error)
try:
    megatron_ds.pretrain(**{**settings, "lr": -1, "hidden_sise": 1})
except megatron_ds.SettingsRejected as error:
    print("rejected", "--lr -1" in str(error), "--hidden-sise" in str(error))
assert not {"RANK", "WORLD_SIZE", "MASTER_PORT"} & os.environ.keys()
more = megatron_ds.pretrain(save="run", load="run", **{**settings, "exit_interval": 10})
first, last = more.iterations[0], more.iterations[-1]
print("resumed", first == run.iterations[-1] + 1, last, int(more.status))
megatron_ds.pretrain(save="whole", **{**settings, "exit_interval": 10})
"""


def test_a_run_leaves_the_program_as_it_was(launcher: Launcher, tmp_path: Path) -> None:
    """Claim (library): Ctrl-C ends a run in a program with a checkpoint, an exception of a callback
    is raised, and the program goes on: with its signal handlers, and with further runs
    """
    script = tmp_path / "guest.py"
    script.write_text(GUEST)
    output = run_program(launcher, script)
    lines = [line for line in output.splitlines() if line.split(" ")[0] in OUTCOMES]
    assert lines == [
        "interrupted 130 True",
        "raised of the callback",
        "rejected True True",
        "resumed True 10 0",
    ]
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
