"""The package as a wheel, in an environment of its own outside of the repository.

The environment sees the packages that the tests have, but neither the repository nor the copy of
this package that is installed there.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import venv
import zipfile
from collections.abc import Callable
from email.parser import Parser
from pathlib import Path

import numpy as np
import pytest

from megatron_ds.launch.exit_codes import ExitCode
from megatron_ds.programs import PROGRAMS
from megatron_ds.version import VERSION
from tests.e2e.runs import SCHEDULE, Settings, losses, to_flags
from tests.fork_server import DEADLINE, REPOSITORY, clean_environment
from tests.proofs.cases import with_proofs
from tests.token_files import write_pair

BUILT_FROM = ("megatron_ds", "setup.py", "pyproject.toml", "README.md", "LICENSE")
MODEL: Settings = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "seq_length": 32,
    "micro_batch_size": 2,
    "lr": 1e-2,
    "mock_data": True,
    "tokenizer_type": "NullTokenizer",
    "vocab_size": 120,
    "log_interval": 1,
    "num_workers": 0,
}

USE = """
import megatron_ds
from megatron_ds.__main__ import main
assert "site-packages" in megatron_ds.__file__
print(megatron_ds.load('{save}').generate("1 2 3", max_new_tokens=4, greedy=True))
for words in {commands}:
    assert not main(words), words
"""
"""Uses a run, with one import of torch for all programs."""

Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy of the sources: a build leaves files in the folder where it runs."""
    folder = tmp_path_factory.mktemp("wheel")
    sources = folder / "sources"
    for name in BUILT_FROM:
        path = REPOSITORY / name
        if path.is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(path, sources / name, ignore=ignored)
        else:
            shutil.copy2(path, sources / name)
    pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip, "-w", folder, sources], check=True, capture_output=True, timeout=DEADLINE)
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def run(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Command:
    """Runs a program of the installed wheel, in a folder outside of the repository."""
    folder = tmp_path_factory.mktemp("installed")
    environment = folder / "environment"
    venv.create(environment, symlinks=True)
    python = environment / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index"]
    # Compiling all modules would take longer than the programs that run.
    command = [*pip, "--no-compile", wheel]
    subprocess.run(command, check=True, capture_output=True, timeout=DEADLINE)
    (packages,) = environment.glob("lib/python*/site-packages")
    # Links: a .pth file with their folder would also run what is in it, such as editable installs.
    tested = {Path(path) for path in sys.path if path.endswith("site-packages")}
    for path in (item for folder in sorted(tested) for item in folder.iterdir()):
        is_other = not path.name.startswith("megatron_ds") and path.suffix != ".pth"
        if is_other and not (packages / path.name).exists():
            (packages / path.name).symlink_to(path)

    def start(
        *words: object, check: bool = True, program: str = "megatron-ds"
    ) -> subprocess.CompletedProcess[str]:
        variables = {**clean_environment(), "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
        variables.pop("PYTHONPATH", None)
        done = subprocess.run(
            [environment / "bin" / program, *map(str, words)],
            cwd=folder,
            env=variables,
            capture_output=True,
            text=True,
            timeout=DEADLINE,
        )
        assert done.returncode == 0 or not check, done.stdout + done.stderr
        return done

    return start


def test_the_wheel_has_every_file_and_says_what_it_is(wheel: Path) -> None:
    """Claim (command-line): a wheel has presets, tables and pages of HTML besides the modules, and
    its version, description and classifiers
    """
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (metadata,) = (name for name in names if name.endswith("/METADATA"))
        facts = Parser().parsestr(archive.read(metadata).decode())
    listed = ["git", "ls-files", "megatron_ds"]
    tracked = subprocess.run(listed, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert set(tracked.stdout.split()) <= names
    assert facts["Version"] == VERSION
    assert {f"Programming Language :: Python :: 3.{minor}" for minor in (11, 12, 13)} <= {
        *facts.get_all("Classifier", [])
    }
    assert facts["Description-Content-Type"] == "text/markdown"
    description = str(facts.get_payload())
    assert description.startswith("# megatron_ds\n")
    assert "](docs/" not in description


def test_an_installed_package_lists_its_programs_and_shows_their_help(run: Command) -> None:
    """Claim (command-line): an installed wheel has every program, from any folder, without the
    repository
    """
    rows = run().stdout.splitlines()[3:]
    assert [row.split()[0] for row in rows] == [*PROGRAMS]
    assert run("--version").stdout == f"megatron-ds {VERSION}\n"
    assert "--save" in run("train", "--help-all").stdout
    shown = run("train", "--help").stdout
    assert "  megatron-ds train --num-layers 4" in shown
    assert "add --num-gpus N" in shown
    assert "pretrain_gpt.py" not in shown.partition("For example")[2]


def test_an_installed_package_plans_trains_on_two_ranks_generates_and_exports(
    run: Command, tmp_path: Path
) -> None:
    """Claim (command-line): an installed wheel plans, trains on several ranks by --num-gpus,
    generates, evaluates, exports and verifies
    """
    save = tmp_path / "run"
    training = {**MODEL, **SCHEDULE, "save": save, "record_every": 2}
    log = run("train", "--num-gpus", 2, *to_flags(training)).stdout
    assert "data parallel 2" in log
    assert len(losses(save)) == SCHEDULE["train_iters"]

    tokens = write_pair(tmp_path / "tokens", [np.arange(100)] * 4)
    commands: dict[str, list[object]] = {
        "plan": ["--preset", "gpt2-124m", "--world-size", 8, "--hardware", "h100"],
        "generate": ["--load", save, "--prompt", "1 2 3", "--out-seq-length", 4, "--greedy"],
        "evaluate": ["--load", save, "--valid-data", tokens, "--output", tmp_path / "loss.json"],
        "convert": ["--load", save, "--save", tmp_path / "exported", "--to", "hf"],
        "verify-run": [save, "--steps", "2-2"],
    }
    words = [[name, *map(str, options)] for name, options in commands.items()]
    output = run("-c", USE.format(save=save, commands=words), program="python").stdout
    loaded, _, programs = output.partition("\n")
    assert "layouts that fit" in programs
    assert f"Generated: {loaded}\n" in programs
    assert json.loads((tmp_path / "loss.json").read_text())["loss"] > 0
    assert (tmp_path / "exported" / "model.safetensors").is_file()
    assert "step 2 is equal" in programs


@pytest.mark.parametrize("tries", with_proofs([False, True], [True]))
def test_an_installed_package_reads_a_script_and_tries_it(
    run: Command, tmp_path: Path, tries: bool
) -> None:
    """Claim (command-line): an installed wheel shows how a script starts, and in the proofs trains
    it for two steps
    """
    flags = to_flags({**MODEL, "train_iters": 10, "global_batch_size": 4})
    script = tmp_path / "train.sh"
    script.write_text(f"torchrun --nproc_per_node 2 pretrain_gpt.py {' '.join(map(str, flags))}\n")
    options = ["--try"] if tries else []
    done = run("doctor", *options, script)
    assert done.stdout.startswith("torchrun --nproc_per_node 2 -m megatron_ds train")
    assert "--hidden-size 32" in done.stdout
    assert ("trying 2 processes" in done.stderr) == tries


def test_an_installed_package_writes_a_job_that_starts_itself(run: Command, tmp_path: Path) -> None:
    flags = to_flags({**MODEL, "train_iters": 10, "global_batch_size": 4})
    job = run("slurm", "submit", tmp_path / "run", "--ranks-per-node", 2, "--print", *flags).stdout
    assert "program=(-m megatron_ds train)\n" in job
    assert "slurm=(-m megatron_ds slurm)\n" in job
    assert str(REPOSITORY) not in job


def test_wrong_numbers_of_ranks_are_refused(run: Command) -> None:
    done = run("train", "--num-gpus", "two", check=False)
    assert done.returncode == ExitCode.BAD_SETTINGS
    assert "[bad-rank-count]" in done.stderr
    assert "Traceback" not in done.stderr
