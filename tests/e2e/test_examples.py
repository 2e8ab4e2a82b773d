"""The scripts of examples/: their exact commands, and that they train at a tiny size."""

from __future__ import annotations

import json
import math
import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

from megatron_ds.demo import corpus as make_corpus
from megatron_ds.preprocess import command as preprocess_data
from megatron_ds.preprocess import train_tokenizer
from tests.e2e.runs import PROGRAMS, REPOSITORY, Launcher, Run, free_port, losses
from tests.pages.recipes import TINY, recipes
from tests.proofs.cases import with_proofs
from tests.tables import tables

EXAMPLES = REPOSITORY / "examples"

TABLES = tables(__file__)
COMMANDS = {
    name: [command.format(**TABLES["parts"]) for command in commands]
    for name, commands in TABLES["commands"].items()
}
"""The exact commands of the scripts: what users of the other repositories type."""


@pytest.fixture
def listening() -> Iterator[str]:
    """The port of a socket that accepts connections."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield str(server.getsockname()[1])


def test_every_script_has_its_commands_here() -> None:
    assert {path.name for path in EXAMPLES.glob("*.sh")} == set(COMMANDS)


def typed(name: str, folder: Path, variables: dict[str, str]) -> list[str]:
    """The commands of a script that is run with programs that only log how they are called."""
    log = folder / "log"
    for program in ("python", "torchrun", "deepspeed"):
        stub = folder / program
        # serve.sh stops its server when the client exits: the client waits for the server's line.
        wait = f'case "$1" in *_cli.py) until [ -s {log} ]; do sleep 0.01; done;; esac'
        stub.write_text(f'#!/bin/sh\n{wait}\necho {program} "$@" >> {log}\n')
        stub.chmod(0o755)
    environment = {**variables, "PATH": f"{folder}:/usr/bin:/bin"}
    subprocess.run([EXAMPLES / name], cwd=folder, env=environment, check=True, timeout=60)
    return log.read_text().splitlines()


@pytest.mark.parametrize("name", COMMANDS)
def test_commands_of_a_script(name: str, tmp_path: Path, listening: str) -> None:
    """Claim (command-line): the scripts in [examples/](../../examples/README.md) run"""
    # serve.sh starts its client as soon as the port accepts connections.
    lines = typed(name, tmp_path, {"PORT": listening} if name == "serve.sh" else {})
    assert [line.replace(listening, "PORT") for line in lines] == [
        " ".join(command.split()) for command in COMMANDS[name]
    ]


class Text(NamedTuple):
    jsonl: Path
    vocab: Path
    merges: Path
    tokens: Path


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Text:
    """A short text, a tokenizer trained on it, and its token files."""
    folder = tmp_path_factory.mktemp("text")
    found = Text(
        folder / "text.jsonl",
        folder / "tokenizer" / "vocab.json",
        folder / "tokenizer" / "merges.txt",
        folder / "reference_text_document",
    )
    make_corpus.main(["--output", str(found.jsonl), "--megabytes", "0.2"])
    long = "".join(json.loads(line)["text"] for line in found.jsonl.read_text().splitlines())
    # Enough documents for a split of one in a thousand.
    pieces = [long[start : start + 150] for start in range(0, len(long), 150)]
    found.jsonl.write_text("".join(json.dumps({"text": piece}) + "\n" for piece in pieces))
    tokenizer = ["--vocab-size", "400", "--output-dir", str(found.vocab.parent)]
    train_tokenizer.main(["--input", str(found.jsonl), *tokenizer])
    files = ["--vocab-file", str(found.vocab), "--merge-file", str(found.merges)]
    output = ["--output-prefix", str(folder / "reference"), "--append-eod", "--workers", "1"]
    kind = ["--tokenizer-type", "GPT2BPETokenizer"]
    preprocess_data.main(["--input", str(found.jsonl), *output, *kind, *files])
    return found


def tiny(text: Text, folder: Path, **more: object) -> dict[str, str]:
    """Variables with which a script takes seconds on a CPU."""
    variables = {
        "PATH": f"{PROGRAMS}:{os.environ['PATH']}",
        "LAYERS": 2,
        "HIDDEN": 32,
        "HEADS": 4,
        "SEQ": 32,
        "ITERS": 4,
        "EVAL_ITERS": 1,
        "LOG_INTERVAL": 1,
        "PRECISION": "--bf16",
        "VOCAB": text.vocab,
        "MERGES": text.merges,
        "CHECKPOINTS": folder / "saved",
        "PORT": free_port(),
        # torchrun's variable for the flag that the script does not pass.
        "PET_MASTER_PORT": free_port(),
    }
    return {name: str(value) for name, value in {**variables, **more}.items()}


def assert_trained(folder: Path, iterations: int) -> None:
    found = losses(folder / "saved")
    assert len(found) == iterations
    assert all(math.isfinite(loss) for loss in found)
    assert (folder / "saved" / "latest").read_text().strip() == f"global_step{iterations}"


def run(launcher: Launcher, name: str, folder: Path, variables: dict[str, str], ranks: int) -> Run:
    """Runs the commands of a script, with forked ranks in place of its launcher."""
    *before, last = (line.split() for line in typed(name, folder, variables))
    for words in before:
        assert words[1] == "tools/preprocess_data.py"
        assert preprocess_data.main(words[2:]) == 0
    return launcher.start(last[last.index("pretrain_gpt.py") + 1 :], ranks=ranks)


@pytest.fixture(scope="module")
def trained(text: Text, launcher: Launcher, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the single-process example."""
    folder = tmp_path_factory.mktemp("345m")
    variables = tiny(text, folder, DATA=text.tokens)
    output = run(launcher, "pretrain_gpt_345m.sh", folder, variables, 1).succeed()
    assert_trained(folder, 4)
    assert "validation loss at the end of training" in output
    return folder


IN_TESTS = {"deepseek-16b", "muon-0.6b"}
"""Recipes that train in `make test`; the others do in the proofs."""
NAMES = [path.stem for path in recipes()]


@pytest.mark.parametrize("name", with_proofs(NAMES, {*NAMES} - IN_TESTS))
def test_recipes_train_at_tiny_size(name: str, launcher: Launcher, tmp_path: Path) -> None:
    """Claim (command-line): every recipe of
    [examples/recipes](../../examples/recipes/README.md) trains with its file of tiny sizes"""
    files = (TINY.with_name(f"{name}.yaml"), TINY)
    launcher.start({"config": files, "save": tmp_path / "saved"}).succeed()
    assert_trained(tmp_path, 4)


def test_fp16_trains_or_offers_bf16(text: Text, launcher: Launcher, tmp_path: Path) -> None:
    """DeepSpeed decides by the processor whether its CPU accelerator supports fp16."""
    variables = tiny(text, tmp_path, DATA=text.tokens, PRECISION="--fp16")
    result = run(launcher, "pretrain_gpt_345m.sh", tmp_path, variables, 1).wait()
    if CPU_Accelerator().is_fp16_supported():
        assert not any(result.codes), result.output
        assert_trained(tmp_path, 4)
    else:
        assert any(result.codes)
        assert "--bf16" in result.output
        assert "[fp16-not-supported]" in result.output


@pytest.mark.proof
def test_older_torch_launcher_with_recomputation_replaces_the_backend(
    text: Text, launcher: Launcher, tmp_path: Path
) -> None:
    variables = tiny(text, tmp_path, DATA=text.tokens, PROCESSES=2, MICRO=1, GLOBAL=2)
    # With its launcher, which no other test starts: it passes --local-rank to the script.
    output = launcher.command([EXAMPLES / "pretrain_gpt_launch.sh"], variables).succeed()

    assert_trained(tmp_path, 4)
    assert output.count("--distributed-backend nccl ") == 1


def test_zero_3_with_the_old_file(text: Text, launcher: Launcher, tmp_path: Path) -> None:
    variables = tiny(
        text, tmp_path, DATA=text.tokens, PROCESSES=2, PRECISION="--fp16 --allow-fp16-on-cpu"
    )
    output = run(launcher, "pretrain_gpt_zero3_tp4.sh", tmp_path, variables, 2).succeed()

    assert_trained(tmp_path, 4)
    assert "cpu_offload" in output
    written = json.loads((tmp_path / "saved" / "ds_config.json").read_text())
    assert written["zero_optimization"]["stage"] == 3
    assert written["zero_optimization"]["offload_optimizer"]["device"] == "cpu"


def test_batch_size_rampup_with_all_logging(text: Text, launcher: Launcher, tmp_path: Path) -> None:
    variables = tiny(
        text,
        tmp_path,
        INPUT=text.jsonl,
        DATA=tmp_path / "my",
        WORKERS=1,
        EXIT_INTERVAL=4,
        PRECISION="--fp16 --allow-fp16-on-cpu",
    )
    output = run(launcher, "pretrain_gpt_rampup.sh", tmp_path, variables, 2).succeed()

    assert_trained(tmp_path, 4)
    assert list((tmp_path / "saved" / "tensorboard").glob("events.out.tfevents.*"))
    assert "exiting program at iteration 4" in output


@pytest.mark.parametrize("ranks", with_proofs([1, 2], [2]))
def test_a_server_and_its_client(ranks: int, trained: Path, text: Text, launcher: Launcher) -> None:
    typed = "import os\\n6\\nimport os\\nmany\\nx\\n999\\n"
    launch = {1: "python", 2: "torchrun --nproc_per_node 2"}[ranks]
    variables = tiny(text, trained, LAUNCHER=launch, PROCESSES=ranks)
    command = f"printf '{typed}' | {EXAMPLES / 'serve.sh'}"
    output = launcher.command(["bash", "-c", command], variables).succeed()

    answer = output.partition("Megatron Response:\n")[2]
    assert answer.startswith("import os")
    assert "'many'" in answer
    assert "Error 400: " in answer
    assert "999" in answer
