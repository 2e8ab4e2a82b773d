"""Checks of machine and files before a run: each problem is reported, together with all others."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from megatron_ds.checkpoint.lineage import Lineage
from megatron_ds.checkpoint.location import RunFolders
from megatron_ds.checkpoint.metadata import (
    MANIFEST,
    RUN,
    DataOrder,
    ParallelLayout,
    RunRecord,
    manifest_text,
)
from megatron_ds.cli.arguments import build_config
from megatron_ds.config import Config
from megatron_ds.config.problems import Problem
from megatron_ds.data import validation
from megatron_ds.data.build_datasets import build_datasets
from megatron_ds.data.token_files.indexed_dataset import IndexedDataset
from megatron_ds.launch import device
from megatron_ds.loading.plan import LoadPlan
from megatron_ds.planning import swap_disk
from megatron_ds.tokenizer.null import NullTokenizer
from megatron_ds.train_state import TrainState
from megatron_ds.training.run import complete_settings
from megatron_ds.training.start import preflight, rank_settings
from tests.problems import codes, fields
from tests.tables import tables
from tests.token_files import write_pair
from tests.unit.checkpoint.fakes import records_of

TABLES = tables(__file__)

NOTHING = LoadPlan(RunFolders())
REPOSITORY = Path(__file__).resolve().parents[3]
BASE = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --micro-batch-size 2 "
    "--lr 1e-3 --train-iters 4 --data-path small --tokenizer-type NullTokenizer --vocab-size 120 "
    "--eval-iters 0"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Valid files, and files with the errors of the table below."""
    here = tmp_path_factory.mktemp("preflight")
    draw = np.random.default_rng(0)
    for name, dtype, vocab, documents in (
        ("small", np.uint16, 120, 300),
        ("corpus_text_document", np.uint16, 120, 3),
        ("large", np.int32, 70000, 300),
        ("single", np.uint16, 120, 1),
        ("short", np.uint16, 120, 3),
    ):
        write_pair(here / name, [draw.integers(0, vocab, 40) for _ in range(documents)], dtype)
    write_pair(here / "ended", [[*draw.integers(0, 120, 40), 120] for _ in range(300)])
    joined = [*draw.integers(0, 120, 40), 120, *draw.integers(0, 120, 40)]
    write_pair(here / "joined", [joined])
    (here / "short.bin").write_bytes((here / "short.bin").read_bytes()[:-8])
    for suffix in (".bin", ".idx"):
        (here / f"junk{suffix}").write_bytes(b"junk" * 30)
        (here / f"directory{suffix}").mkdir()
    (here / "file").touch()
    (here / "blend").write_text("1 small 2 nothing")
    (here / "groups").write_text('"V: 1 0:1 small, 2 0:0.5 large"')
    (here / "narrow").write_text('"V: 1 0.999:1 small"')
    (here / "list.json").write_text("[]")
    (here / "merges.txt").write_text("#version: 0.2\n")
    (here / "torn.json").write_text('{"train_batch_size":')
    (here / "batch.json").write_text('{"train_batch_size": 6}')
    (here / "tokenizer").mkdir()
    (here / "tokenizer" / "tokenizer.json").write_text("{}")
    (here / "megatron" / "iter_0000010").mkdir(parents=True)
    (here / "megatron" / "latest_checkpointed_iteration.txt").write_text("10")
    (here / "unfinished" / "global_step3").mkdir(parents=True)
    return here


@pytest.fixture(autouse=True)
def in_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(device, "known_without_fp16", lambda: True)


def check(line: str, world_size: int = 1) -> tuple[Config, list[Problem], list[Problem]]:
    """The configuration, problems and warnings of the base's flags, replaced by those of `line`.

    A flag followed by `-` is left out.
    """
    flags = {}
    for part in f" {BASE} {line}".split(" --")[1:]:
        name, _, value = part.partition(" ")
        flags[f"--{name}"] = value
    words = [
        word for name, value in flags.items() if value != "-" for word in (name, *value.split())
    ]
    warnings: list[Any] = []
    plans: list[LoadPlan] = []

    def complete(*arguments: Any) -> tuple[Config, list[Problem]]:
        config, plan, problems = complete_settings(*arguments)
        plans.append(plan)
        return config, problems

    config, problems = build_config(
        words,
        world_size=world_size,
        warn=warnings.append,
        complete=complete,
        check=lambda config, *arguments: preflight.check(config, plans[0], *arguments)[0],
    )
    return config, cast(list[Problem], problems), warnings


GPT2 = "--tokenizer-type GPT2BPETokenizer --vocab-file list.json --merge-file merges.txt"
WRONG = TABLES["wrong"]


@pytest.mark.parametrize(("line", "code", "value"), WRONG)
def test_a_wrong_command_line_is_rejected(line: str, code: str, value: str) -> None:
    _, problems, _ = check(line)

    matching = [problem for problem in problems if value in str(problem)]
    assert matching, problems
    assert code in codes(matching)


@pytest.mark.parametrize("others", ["", "--data-path nothing", "--clip-grad -3"])
def test_a_disk_is_checked_whatever_else_is_wrong(
    others: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = Problem("nvme-without-libaio", error="")
    monkeypatch.setattr(swap_disk, "find_problem", lambda: missing)
    line = f"--zero-stage 3 --nvme-optimizer --nvme-path file {others}"

    _, problems, _ = check(line)

    expected = {"nvme-without-libaio", "nvme-path-unusable"}
    assert expected <= set(codes(problems))
    assert (len(problems) > 2) == bool(others)


def test_problems_of_flags_files_and_machine_are_reported_together() -> None:
    line = (
        "--num-layers -1 --hidden-size 33 --global-batch-size 5 --lr-warmup-samples 9 --fp16 "
        "--split 5,x --data-path 1 nothing 1 large --load file --save file/x --seed -3 --bf16 "
        "--deepspeed_config none --num-layerz 3"
    )

    _, problems, _ = check(line, 2)

    for value in TABLES["problems"]:
        assert sum(value in str(problem) for problem in problems) == 1, (value, problems)


def test_a_vocab_size_other_than_that_of_the_tokenizer_is_rejected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(preflight, "build_tokenizer", lambda *_: NullTokenizer(120))
    assert codes(check(f"{GPT2} --vocab-size 7")[1]) == ["vocab-size-differs-from-tokenizer"]
    assert check(f"{GPT2} --vocab-size -")[1] == []


class WithoutEnd(NullTokenizer):
    """A tokenizer without an end-of-document token."""

    def __init__(self) -> None:
        super().__init__(120)
        self.eod = None


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--eod-mask-loss", ["eod_mask_loss"]),
        (
            "--reset-position-ids --reset-attention-mask",
            ["reset_position_ids", "reset_attention_mask"],
        ),
        ("--eod-mask-loss --reset-position-ids --document-boundaries idx", None),
        ("", None),
    ],
)
def test_documents_that_end_with_a_token_need_a_tokenizer_that_has_it(
    flags: str, named: list[str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "build_tokenizer", lambda *_: WithoutEnd())
    _, problems, _ = check(flags)
    assert codes(problems) == ([] if named is None else ["tokenizer-without-eod"])
    assert fields(problems) == ([] if named is None else [tuple(named)])


BLEND_WITHOUT_EOD = "--reset-position-ids --data-path 1 small 2 ended 1 single"


@pytest.mark.parametrize(("line", "code", "named"), TABLES["ineffective"])
def test_flags_without_effect_cause_a_warning(line: str, code: str, named: str) -> None:
    warnings = check(line)[2]
    assert (code, tuple(named.split())) in zip(codes(warnings), fields(warnings), strict=True)


@pytest.mark.parametrize(("zero", "world_size", "expected"), TABLES["buckets"])
def test_an_overlapped_bucket_below_the_largest_parameter_causes_a_warning(
    zero: dict[str, Any], world_size: int, expected: bool, tmp_path: Path
) -> None:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"zero_optimization": zero}))
    _, problems, warnings = check(f"--deepspeed_config {file}", world_size)
    assert (problems, codes(warnings)) == ([], ["ds-bucket-too-small"] * expected)


def test_warnings_name_the_files_without_end_of_document_tokens() -> None:
    (warning,) = check(BLEND_WITHOUT_EOD)[2]
    assert "small, single" in str(warning)
    assert "ended" not in str(warning)


@pytest.mark.parametrize("line", ["", "--reset-attention-mask --data-path ended"])
def test_a_sound_command_line_has_no_problems_and_no_warnings(line: str) -> None:
    assert check(line)[1:] == ([], [])


def test_end_of_document_tokens_are_searched_at_ends_and_in_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    line = "--reset-attention-mask --data-path "
    assert check(line + "joined")[2] == []
    monkeypatch.setattr(IndexedDataset, "probe", lambda file, *_: file.tokens[:0])
    assert codes(check(line + "joined")[2]) == ["data-without-eod"]
    assert check(line + "ended")[2] == []


def test_tokenizer_and_data_files_are_opened_once(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    build = preflight.build_tokenizer
    load = validation.open_token_file
    monkeypatch.setattr(
        preflight, "build_tokenizer", lambda *args: opened.append("tokenizer") or build(*args)
    )
    monkeypatch.setattr(
        validation, "open_token_file", lambda prefix, *_: opened.append(prefix) or load(prefix)
    )
    config = check("--reset-attention-mask --data-path ended")[0]
    opened.clear()

    problems, inputs = preflight.check(config, NOTHING, 1, True, lambda _: None)

    assert problems == []
    build_datasets(
        inputs.data[0],
        seq_length=32,
        seed=1,
        num_samples=(4, 0, 0),
        tokenizer_fingerprint="x",
        vocab_size=inputs.tokenizer.vocab_size,
    )
    assert opened == ["tokenizer", "ended"]


def test_ranks_may_have_their_files_in_other_folders_and_nothing_else(
    folder: Path, tmp_path: Path
) -> None:
    """Claim (command-line): ranks that were started with different settings, versions or data do
    not train, and say what differs; folders may differ"""

    def described(line: str) -> dict[str, str]:
        config = check(line)[0]
        inputs = preflight.check(config, NOTHING, 1, True, lambda _: None)[1]
        assert inputs is not None
        return dict([*rank_settings.settings(config, NOTHING), *rank_settings.data(inputs)])

    for end in (".bin", ".idx"):
        shutil.copy(folder / f"small{end}", tmp_path)
    local = "--save x --local-save-interval 2 --local-checkpoint-dir"
    first = described(f"{local} a")
    assert described(f"{local.replace('x', 'y')} b --data-path {tmp_path / 'small'}") == first
    stages = '--train-iters - --stages {"train-iters":1} {"train-iters":1,"data-path":"%s"}'
    staged = described(f"{local} a {stages % 'small'}")
    assert described(f"{local} a {stages % (tmp_path / 'small')}") == staged
    other = described(f"{local} a {stages % 'ended'}")
    differing = {key for key in other if staged.get(key) != other[key]}
    assert "source 1 of --data-path (train ) in stage 2" in differing
    assert all(key.endswith("in stage 2") for key in differing)
    for line, name in (
        ("--lr 2e-3", "--lr"),
        ("--bf16", "--bf16"),
        ("--data-path ended", "source 1 of --data-path (train )"),
        ("--deepspeed_config batch.json", "--deepspeed_config: train_batch_size"),
    ):
        other = described(f"{local} a {line}")
        differing = {key for key in {*first, *other} if first.get(key) != other.get(key)}
        assert name in differing, differing


def saved(config: Config, folder: Path, iteration: int) -> None:
    """A checkpoint of one process, as far as the checks read it."""
    path = folder / f"global_step{iteration}"
    path.mkdir(parents=True)
    run = RunRecord(
        state=TrainState(iteration=iteration),
        config=config.to_dict(),
        layout=ParallelLayout.of(config, 1),
        data_order=DataOrder.of(config, 1),
        shards={},
        branch=Lineage.new(),
    )
    (path / RUN).write_text(json.dumps(run.to_dict()))
    (path / MANIFEST).write_text(manifest_text(records_of(path)))


ORDER = "resume-data-order-changed"


@pytest.fixture
def checkpoints(tmp_path: Path) -> Path:
    config = check("")[0].with_vocab(121)
    for iteration in (2, 4):
        saved(config, tmp_path / "saved", iteration)
    return tmp_path / "saved"


@pytest.mark.parametrize(("line", "expected"), TABLES["other_settings"])
def test_a_checkpoint_of_other_settings_is_rejected(
    checkpoints: Path, line: str, expected: list[list[object]]
) -> None:
    _, problems, _ = check(f"--load {checkpoints} {line}")

    assert [
        [code, [*f]] for code, f in zip(codes(problems), fields(problems), strict=True)
    ] == expected


def test_each_of_several_ranks_reads_only_the_record_of_a_checkpoint(checkpoints: Path) -> None:
    """Its files are checked once, when the ranks know each other."""
    for path in checkpoints.glob("*/manifest.json"):
        path.unlink()
    line = f"--load {checkpoints} --seed 7"
    assert codes(check(line)[1]) == ["all-checkpoints-damaged"]
    assert {*codes(check(line, world_size=2)[1])} == {ORDER}


def test_checkpoints_are_not_compared_with_contradictory_settings(checkpoints: Path) -> None:
    _, problems, _ = check(f"--load {checkpoints} --micro-batch-size 0 --seed 7")

    assert len(problems) == 1
    assert "--micro-batch-size 0" in str(problems[0])


def test_the_checkpoint_before_a_damaged_one_is_compared(checkpoints: Path) -> None:
    (checkpoints / "global_step4" / RUN).write_text("{}")

    assert check(f"--load {checkpoints}")[1] == []
    rejected = check(f"--load {checkpoints} --on-damaged-checkpoint error")[1]
    assert codes(rejected) == ["checkpoint-damaged"]
    assert "global_step2" in str(check(f"--load {checkpoints} --seed 1")[1][0])


def test_fp16_is_checked_by_torch_if_the_cpu_does_not_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "known_without_fp16", lambda: False)

    assert check("--fp16")[1] == []


@pytest.mark.parametrize(
    ("accelerator", "processor", "expected"),
    TABLES["a_cpu_without_fp16_is_detected_by_its_features"],
)
def test_a_cpu_without_fp16_is_detected_by_its_features(
    monkeypatch: pytest.MonkeyPatch, accelerator: str, processor: str, expected: bool
) -> None:
    monkeypatch.undo()
    monkeypatch.setenv("DS_ACCELERATOR", accelerator)
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: f"processor : 0\n{processor}\n")

    assert device.known_without_fp16() is expected


RUN_WITHOUT_SOCKETS = """
import sys, socket, runpy
def reject(*arguments, **keywords):
    raise AssertionError(f"something was started: {arguments}")
socket.socket.bind = socket.socket.connect = reject
del sys.argv[0]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
except SystemExit as end:
    heavy = {"torch", "deepspeed", "transformers", "tokenizers"} & set(sys.modules)
    print("ended", end.code, sorted(heavy))
"""


@pytest.mark.parametrize("rank", [0, 1])
def test_a_wrong_command_line_starts_imports_and_writes_nothing(
    tmp_path: Path, folder: Path, rank: int
) -> None:
    line = (
        "--num-layers 2 --hidden-size 33 --num-attention-heads 4 --fp16 --save save --load load "
        f"--tokenizer-type NullTokenizer --vocab-size 120 --data-path {folder}/small "
        "--tensorboard-dir board --data-cache-path cache --metrics-jsonl metrics/m.jsonl"
    )
    environment = {
        "DS_ACCELERATOR": "cpu",
        "WORLD_SIZE": "2",
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
        "PYTHONPATH": str(REPOSITORY),
        "PYTHONDONTWRITEBYTECODE": "1",
    }

    program = [sys.executable, "-c", RUN_WITHOUT_SOCKETS, str(REPOSITORY / "pretrain_gpt.py")]
    ended = subprocess.run(
        [*program, *line.split()], cwd=tmp_path, env=environment, capture_output=True, text=True
    )

    assert ended.stdout.strip() == "ended 2 []", ended.stdout + ended.stderr
    assert ("--hidden-size 33 is not divisible" in ended.stderr) is (rank == 0), ended.stderr
    assert list(tmp_path.rglob("*")) == []


def test_the_length_of_a_run_follows_from_its_data() -> None:
    """Claim (samples): `--train-data-exact-num-epochs` determines the length of the run"""
    line = "--train-iters - --train-data-exact-num-epochs 2"
    config, problems, _ = check(f"{line} --split 1")
    assert problems == []
    assert config.schedule.train_samples == (2 * 300 * 40 - 1) // 32
    _, problems, _ = check("--train-data-exact-num-epochs 2")
    assert codes(problems) == ["mutually-exclusive"]
    _, problems, _ = check(f"{line} --data-path nothing")
    assert set(codes(problems)) == {"data-file-missing"}
    _, problems, _ = check(f"{line} --data-path -  --mock-data")
    assert "mutually-exclusive" in codes(problems)
