"""tools/ds_config.py generates, explains, validates and migrates DeepSpeed files."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_ds.cli.arguments import build_config
from megatron_ds.config.deepspeed_file import leaves
from megatron_ds.engine.ds_config import command as ds_config
from megatron_ds.engine.ds_config.generate import build_ds_config
from megatron_ds.engine.ds_config.merge import merge_file
from tests.peer_ds_files import FILES, FOLDER, OWN, fill_placeholders
from tests.problems import printed_codes
from tests.tables import tables

TABLES = tables(__file__)

FLAGS = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 2 "
    "--lr 1e-4 --train-iters 10 --tokenizer-type NullTokenizer --vocab-size 90 "
    "--data-path nowhere --adam-beta1 0.8 --adam-beta2 0.95"
)
REPOSITORY = Path(__file__).resolve().parents[3]
PUBLISHED = {
    **{name: json.dumps(file) for name, (file, _) in OWN.items()},
    **{name: fill_placeholders((FOLDER / f"{name}.json").read_text("utf-8")) for name in FILES},
}
"""Text of files for earlier versions, by name."""
WITHOUT_TORCH = """
import sys, time
from megatron_ds.engine.ds_config import command as ds_config
for line in sys.argv[1:]:
    start = time.monotonic()
    assert ds_config.main(line.split()) in (0, 1), line
    assert time.monotonic() - start < 3, line
assert not {"torch", "deepspeed"} & set(sys.modules)
"""


@pytest.fixture
def line(tmp_path: Path) -> list[str]:
    path = tmp_path / "ds.json"
    path.write_text(
        '{\n"gradient_clipping": 0.5,\n"zero_optimization": {\n"stage": 3,\n"cpu_offload": true,\n'
        '"sub_group_size": 5\n},\n"steps_per_print": "auto",\n'
        '"scheduler": {"type": "WarmupLR", "params": {"warmup_type": "linear"}}\n}'
    )
    return [*FLAGS.split(), "--deepspeed_config", str(path)]


def test_printed_json_equals_the_configuration_of_a_run(
    line: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ds_config.main(["--world-size", "4", *line]) == 0
    printed = json.loads(capsys.readouterr().out)
    config, _ = build_config(line, world_size=4, warn=lambda _: None, complete=merge_file)
    assert printed == build_ds_config(config.with_vocab(91), 4)
    assert printed["train_batch_size"] == 8

    again = tmp_path / "again.json"
    again.write_text(json.dumps(printed))
    flags = [*line[:-1], str(again), "--lr-decay-style", "constant"]
    ds_config.main(["generate", "--world-size", "4", *flags])
    assert json.loads(capsys.readouterr().out) == printed


@pytest.mark.parametrize(
    "flags",
    ["--pipeline-model-parallel-size 2", "--optimizer lion", "--optimizer sgd --bf16", "--fp16"],
)
def test_json_of_a_run_is_valid(
    flags: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [*FLAGS.partition(" --adam")[0].split(), *flags.split()]
    assert ds_config.main(["generate", "--world-size", "4", *argv]) == 0
    path = tmp_path / "ds_config.json"
    path.write_text(capsys.readouterr().out)
    assert ds_config.main(["validate", str(path), "--world-size", "4", *argv]) == 0


def test_vocabulary_is_that_of_the_tokenizer(capsys: pytest.CaptureFixture[str]) -> None:
    """NullTokenizer adds a token, and the embedding is padded to a multiple of 128."""
    buckets = []
    for size in ("127", "128"):
        assert ds_config.main(FLAGS.replace("--vocab-size 90", f"--vocab-size {size}").split()) == 0
        printed = json.loads(capsys.readouterr().out)
        buckets.append(printed["zero_optimization"]["reduce_bucket_size"])
    assert buckets[1] - buckets[0] == 128 * 32


def test_origin_of_each_value_is_printed(
    line: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    ds_config.main(line)
    printed = capsys.readouterr().err
    rows = dict(text.split("  ", 1) for text in printed.splitlines() if not text.startswith("WARN"))
    rows = {key: source.strip().replace(line[-1], "ds.json") for key, source in rows.items()}
    assert rows == TABLES["origins"]
    assert "[ds-old-key]" in printed
    assert "[ds-scheduler-translated]" in printed


@pytest.mark.parametrize("command", ["generate", "explain", "validate"])
def test_all_contradictions_are_reported(
    command: str, line: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [*line, "--zero-stage", "1", "--clip-grad", "2"]
    if command == "validate":
        flags = [line[-1], *line[:-2], *flags[-4:]]
    assert ds_config.main([command, *flags]) == 2
    assert capsys.readouterr().err.count("[ds-key-contradicts-flag]") == 2


def test_explanation_has_every_key_of_the_json(
    line: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    ds_config.main(["explain", "--json", *line])
    rows = {row["key"]: row for row in json.loads(capsys.readouterr().out)}
    ds_config.main(line)
    generated = json.loads(capsys.readouterr().out)
    assert rows["gradient_clipping"]["value"] == generated["gradient_clipping"] == 0.5
    assert [*rows] == leaves(generated)

    ds_config.main(["explain", "stage", "gradient_clipping", *line])
    table = capsys.readouterr().out.splitlines()
    assert [row.split()[:2] for row in table[1:]] == [
        ["gradient_clipping", "0.5"],
        ["zero_optimization.stage", "3"],
    ]
    assert table[1].endswith("0 disables it.")


def test_keys_are_explained_without_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert ds_config.main(["explain", "gradient_clipping"]) == 0
    assert capsys.readouterr().out.splitlines()[2:] == TABLES["explained"]
    assert ds_config.main(["explain", "curriculum_learning.schedule_config", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == 6
    assert ds_config.main(["explain", "gradient_cliping"]) == 2
    assert "did you mean 'gradient_clipping'" in capsys.readouterr().err


def test_a_misspelt_key_with_a_near_name_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Else the run would train with another stage and batch than the file names."""
    path = tmp_path / "ds.json"
    path.write_text('{"zero_optimisation": {"stage": 3},\n"train_micro_batchsize_per_gpu": 2}')
    assert ds_config.main(["validate", str(path)]) == 2
    assert printed_codes(capsys.readouterr().err) == ["ds-key-unknown", "ds-key-unknown"]
    path.write_text('{"my_own_note": 1}')
    assert ds_config.main(["validate", str(path)]) == 0
    assert printed_codes(capsys.readouterr().err) == ["ds-key-dropped"]


def test_validation_reports_all_problems_with_their_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "ds.json"
    path.write_text(
        '{\n"dump_state": "x",\n"zero_optimization": {\n"stge": 0\n},\n"bf16": {},\n'
        '"amp": {"enabled": true},\n"optimizer": {"type": "Lamb"},\n"gradient_clipping": "x"\n}'
    )
    assert ds_config.main(["validate", str(path)]) == 2
    printed = capsys.readouterr().err
    lines = set(re.findall(f"{path}:(.)", printed))
    assert lines == {"2", "4", "7", "8", "9"}

    path.write_text('{"zero_optimization": {"stage": 3, "allgather_bucket_size": 5}}')
    assert ds_config.main(["validate", str(path)]) == 0
    shown = capsys.readouterr()
    assert shown.out == f"{path}: valid (without the flags of a run)\n"
    assert "[ds-keys-ineffective]" in shown.err
    assert ds_config.main(["validate", str(path), *FLAGS.split()]) == 0
    assert capsys.readouterr().out == f"{path}: valid\n"
    path.write_text('{"train_batch_size": 3}')
    assert ds_config.main(["validate", str(path), *FLAGS.split()]) == 2
    assert "[batch-size-not-divisible]" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("batch", "micro", "steps", "status"),
    [(64, 2, 4, 0), (64, 2, "auto", 0), ("auto", 2, 4, 0), (7, 2, 1, 2), (64, 2, 64, 2)],
)
def test_validation_assumes_the_processes_that_the_batch_sizes_imply(
    batch: Any, micro: Any, steps: Any, status: int, tmp_path: Path
) -> None:
    path = tmp_path / "ds.json"
    values = {
        "train_batch_size": batch,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": steps,
        "zero_optimization": {"stage": 3, "zero_hpz_partition_size": 8 if status == 0 else 1},
    }
    path.write_text(json.dumps(values))
    assert ds_config.main(["validate", str(path)]) == status


@pytest.mark.parametrize("name", PUBLISHED)
def test_migrated_files_of_other_projects_are_valid(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Claim (deepspeed): files for DeepSpeed 0.5 and later are migrated with the meaning that they
    had, and are valid afterwards"""
    old = tmp_path / "old.json"
    new = tmp_path / "new.json"
    old.write_text(PUBLISHED[name])
    assert ds_config.main(["migrate", str(old)]) == 0
    printed = capsys.readouterr()
    assert ds_config.main(["migrate", str(old), "--output", str(new)]) == 0
    assert new.read_text() == printed.out
    assert printed.err.startswith(f"{old}: from DeepSpeed 0.")
    assert ds_config.main(["validate", str(new)]) == 0
    again = tmp_path / "again.json"
    assert ds_config.main(["migrate", str(new), "--output", str(again)]) == 0
    assert again.read_text() == new.read_text()
    assert ds_config.main(["migrate", str(old), "--output", str(new)]) == 1
    assert "File exists" in capsys.readouterr().err


@pytest.mark.parametrize(("text", "shown"), TABLES["unreadable"])
def test_unreadable_files_are_reported(
    text: str | None, shown: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "ds.json"
    if text == "folder":
        path.mkdir()
    elif text is not None:
        path.write_bytes(text.encode("latin1"))
    assert ds_config.main(["validate", str(path)]) == 2
    printed = capsys.readouterr().err
    assert shown in printed
    assert "[ds-config-unreadable]" in printed


@pytest.mark.parametrize(("argv", "shown"), TABLES["wrong_command_lines"])
def test_wrong_command_lines_are_reported(
    argv: list[str], shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ds_config.main(argv) == 2
    assert shown in capsys.readouterr().err


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert ds_config.main(["--help"]) == ds_config.main([]) == 0
    shown = capsys.readouterr().out
    assert all(f"\n  {command} " in shown for command in ds_config.COMMANDS)
    assert ds_config.main(["explain", "--help"]) == 0
    assert "--world-size" in capsys.readouterr().out


def test_commands_need_neither_torch_nor_much_time(line: list[str]) -> None:
    """Claim (deepspeed): `tools/ds_config.py` imports neither torch nor DeepSpeed on a CPU, and
    takes less than 3 seconds"""
    lines = [" ".join(["generate", *line]), " ".join(["explain", *line]), f"validate {line[-1]}"]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, *lines],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
