"""Keyword arguments as flags, and what `import megatron_ds` imports."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import megatron_ds
from megatron_ds.api.settings_words import words_of
from megatron_ds.cli.command import table_of
from megatron_ds.cli.flags import training_flags
from megatron_ds.launch.exit_codes import ExitCode, SettingsRejected
from megatron_ds.planning.command import Options
from tests.import_graph import REPOSITORY

LIGHT = """
import sys
before = set(sys.modules)
import megatron_ds
assert megatron_ds.__version__ and "load" in dir(megatron_ds)
new = {name.split(".")[0] for name in set(sys.modules) - before}
print(sorted(new - sys.stdlib_module_names))
for name in ("Callback", "RunRecord", "UserError", "pretrain", "load"):
    getattr(megatron_ds, name)
print([name for name in ("torch", "deepspeed", "transformers", "tqdm") if name in sys.modules])
"""


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"num_layers": 2, "lr": 1e-3}, ["--num-layers", "2", "--lr", "0.001"]),
        ({"bf16": True, "swiglu": False, "save": None}, ["--bf16"]),
        ({"add_bias_linear": False}, ["--disable-bias-linear"]),
        ({"add_bias_linear": True}, []),
        ({"disable_bias_linear": True}, ["--disable-bias-linear"]),
        ({"disable_bias_linear": False}, []),
        ({"data_path": [0.3, "a", 0.7, "b"]}, ["--data-path", "0.3", "a", "0.7", "b"]),
        ({"save": Path("a b")}, ["--save", "a b"]),
        ({"world_size": 8}, ["--world-size", "8"]),
        ({"hidden_sise": 3}, ["--hidden-sise", "3"]),
    ],
)
def test_settings_are_flags(settings: dict[str, object], words: list[str]) -> None:
    assert words_of(settings, table_of(Options), training_flags()) == words


def test_importing_the_package_imports_no_other() -> None:
    """Claim (library): `import megatron_ds` imports no other package, and its names no torch until
    something is loaded or trained
    """
    code = f"import sys; sys.path.insert(0, {str(REPOSITORY)!r})\n{LIGHT}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    packages, heavy = done.stdout.splitlines()
    assert packages == "['megatron_ds']"
    assert heavy == "[]"


def test_every_public_name_has_a_docstring() -> None:
    for name in megatron_ds.__all__:
        assert getattr(megatron_ds, name).__doc__, name


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'lod'"):
        megatron_ds.lod  # noqa: B018


def test_all_problems_of_the_settings_are_raised_at_once() -> None:
    """Claim (library): problems of settings are raised at once, before anything is started"""
    with pytest.raises(SettingsRejected) as rejected:
        megatron_ds.plan(preset="gpt2-124n", hidden_sise=3, device_memory="much")
    assert rejected.value.code == ExitCode.BAD_SETTINGS
    with pytest.raises(SettingsRejected, match="not-a-size"):
        megatron_ds.plan(device_memory="much")


def test_a_plan_has_the_numbers_of_the_program(capsys: pytest.CaptureFixture[str]) -> None:
    """Claim (library): `plan` returns what the program prints as JSON"""
    import json

    from megatron_ds.planning.command import main

    words = ["--preset", "gpt2-124m", "--world-size", "8", "--micro-batch-size", "4"]
    assert main([*words, "--train-tokens", "10B", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    values = megatron_ds.plan(
        preset="gpt2-124m", world_size=8, micro_batch_size=4, train_tokens="10B"
    )
    assert json.loads(json.dumps(values)) == printed
    assert values["days"] > 0
