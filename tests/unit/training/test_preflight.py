"""Wrong command lines as a stranger types them: each is named with its flags and what would be
right, all together, before anything of the run exists."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megatron_ds.checkpoint.metadata import (
    MANIFEST,
    RUN,
    DataOrder,
    ParallelLayout,
    RunRecord,
    checksum_manifest,
)
from megatron_ds.cli.arguments import build_config
from megatron_ds.config import Config
from megatron_ds.data import validation
from megatron_ds.data.indexed_writer import IndexedWriter
from megatron_ds.engine.ds_config_merge import merge_file
from megatron_ds.launch import device
from megatron_ds.train_state import TrainState
from megatron_ds.training import preflight
from tests.problems import codes, fields

REPOSITORY = Path(__file__).resolve().parents[3]
BASE = {
    "--num-layers": "2",
    "--hidden-size": "32",
    "--num-attention-heads": "4",
    "--seq-length": "32",
    "--micro-batch-size": "2",
    "--lr": "1e-3",
    "--train-iters": "4",
    "--data-path": "small",
    "--tokenizer-type": "NullTokenizer",
    "--vocab-size": "120",
    "--eval-iters": "0",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files that are right, and files that are wrong in all the ways of the table below."""
    here = tmp_path_factory.mktemp("preflight")
    draw = np.random.default_rng(0)
    for name, dtype, vocab, documents in (
        ("small", np.uint16, 120, 300),
        ("corpus_text_document", np.uint16, 120, 3),
        ("large", np.int32, 70000, 300),
        ("single", np.uint16, 120, 1),
        ("short", np.uint16, 120, 3),
    ):
        with IndexedWriter(here / name, dtype) as writer:
            for _ in range(documents):
                writer.add_document(draw.integers(0, vocab, 40))
    with IndexedWriter(here / "ended", np.uint16) as writer:
        for _ in range(300):
            writer.add_document([*draw.integers(0, 120, 40), 120])
    with IndexedWriter(here / "joined", np.uint16) as writer:
        writer.add_document([*draw.integers(0, 120, 40), 120, *draw.integers(0, 120, 40)])
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


def judged(line: str, world_size: int = 1) -> tuple[Config, list[str], list[str]]:
    """The configuration, problems and warnings of the base's flags with those of `line` in place.

    A flag followed by `-` is left out.
    """
    flags = dict(BASE)
    for part in f" {line}".split(" --")[1:]:
        name, _, value = part.partition(" ")
        flags[f"--{name}"] = value
    words = [
        word for name, value in flags.items() if value != "-" for word in (name, *value.split())
    ]
    said: list[str] = []
    config, problems = build_config(
        words,
        world_size=world_size,
        warn=said.append,
        complete=merge_file,
        check=preflight.check,
    )
    return config, problems, said


def test_the_base_is_sound() -> None:
    assert judged("")[1:] == ([], [])


WRONG = [
    # Data.
    (1, "--data-path nothing", "--data-path nothing: nothing.idx"),
    (1, "--data-path small.bin", "--data-path small.bin: small.bin.idx", ": small)"),
    (1, "--data-path corpus", "(did you mean corpus_text_document?)"),
    (1, "--data-path 0.5 small 0.5", "--data-path 0.5 small 0.5: "),
    (1, "--data-path x small 1 large", "the weight 'x'"),
    (1, "--data-path 0 small 0 large", "--data-path 0 small 0 large: "),
    (1, "--split 1,a", "--split 1,a: must be up to three", "such as 969,30,1"),
    (1, "--split 0,1,1", "--split 0,1,1: "),
    (
        1,
        "--data-path single --eval-iters 2",
        "4 valid samples of single",
    ),
    (1, "--data-path junk", "--data-path junk: junk.idx"),
    (1, "--data-path directory", "--data-path directory: directory."),
    (1, "--data-path short", "short.bin has 232 bytes, but short.idx describes 240"),
    (
        1,
        "--data-path large",
        "--data-path large: its .bin has the token id 699",
        "but the tokenizer's ids are 0 to 120",
    ),
    (
        1,
        "--vocab-size 70_000",
        "16-bit tokens (uint16)",
    ),
    (
        1,
        "--data-path - --data-args-path blend",
        "--data-args-path blend: nothing: nothing.bin",
    ),
    (
        1,
        "--data-path - --train-data-path small --valid-weighted-split-paths-path groups",
        "--valid-weighted-split-paths-path groups: V: large: its .bin has the token id 699",
    ),
    (
        1,
        "--data-path - --train-data-path small --valid-weighted-split-paths-path narrow "
        "--eval-iters 2",
        "narrow: V: small: the run needs 4 valid samples of small, but 0.999:1",
    ),
    # The tokenizer.
    (
        1,
        "--tokenizer-type GPT2BPETokenizer --vocab-file list.json --merge-file merges.txt",
        "--vocab-file list.json: must be one JSON object",
    ),
    (
        1,
        "--vocab-size - --tokenizer-type HFTokenizer --tokenizer-model tokenizer",
        "--tokenizer-model tokenizer/tokenizer.json: not a tokenizer.json",
    ),
    (
        1,
        "--vocab-size - --tokenizer-type HFTokenizer --tokenizer-model nope",
        "--tokenizer-model nope: there is no such",
    ),
    # Folders, checkpoints, the DeepSpeed file.
    (
        1,
        "--load megatron",
        "--load megatron: megatron/latest_checkpointed_iteration.txt names '10'",
        "iter_0000010",
    ),
    (1, "--load unfinished", "unfinished/global_step3: it has no manifest.json"),
    (1, "--load none --exit-on-missing-checkpoint", "--load none: there is no checkpoint"),
    (1, "--load none --ckpt-step 5", "--ckpt-step 5: none contains no checkpoint"),
    (1, "--deepspeed_config torn.json", "torn.json:1:"),
    (
        1,
        "--deepspeed_config batch.json --global-batch-size 4",
        "--global-batch-size 4 contradicts train_batch_size 6 of batch.json",
    ),
    # The machine.
    (1, "--fp16", "--fp16: DeepSpeed does not train in fp16 on this CPU; use --bf16"),
]


@pytest.mark.parametrize("case", WRONG, ids=lambda case: case[1])
def test_a_wrong_line_is_named_with_what_would_be_right(case: tuple[int, str, str]) -> None:
    world_size, line, *words = case

    _, problems, _ = judged(line, world_size)

    assert any(all(part in problem for part in words) for problem in problems), problems


def test_ten_problems_come_at_once() -> None:
    line = (
        "--num-layers -1 --hidden-size 33 --global-batch-size 5 --lr-warmup-samples 9 --fp16 "
        "--split 5,x --data-path 1 nothing 1 large --load file --save file/x --seed -3 --bf16 "
        "--deepspeed_config none --num-layerz 3"
    )

    _, problems, _ = judged(line, 2)

    for words in (
        "there is no flag --num-layerz",
        "--num-layers -1: must be",
        "--hidden-size 33 is not divisible",
        "--global-batch-size 5 is not divisible",
        "--lr-warmup-samples 9 cannot be combined with --train-iters",
        "--fp16 and --bf16 are mutually exclusive",
        "--fp16: DeepSpeed does not train in fp16",
        "--split 5,x",
        "--data-path nothing: nothing.bin",
        "--data-path large: its .bin has the token id",
        "--load file: is a file",
        "--save file/x:",
        "--seed -3",
        "--deepspeed-config none",
    ):
        assert sum(words in problem for problem in problems) == 1, (words, problems)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--sgd-momentum 0.2", "--sgd-momentum has no effect"),
        (
            "--reset-attention-mask --eod-mask-loss",
            "--reset-attention-mask, --eod-mask-loss have no effect on small: none of the first 64",
        ),
        (
            "--reset-position-ids --data-path 1 small 2 ended 1 single",
            "--reset-position-ids has no effect on small, single: none of the first 64 documents "
            "ends with the end-of-document token 120; preprocess with --append-eod",
        ),
        ("--train-iters - --train-samples 9", "--train-samples 9"),
    ],
)
def test_flags_that_do_nothing_are_remarked(line: str, words: str) -> None:
    assert any(words in text for text in judged(line)[2])


@pytest.mark.parametrize("line", ["--reset-attention-mask --data-path ended", "--data-path small"])
def test_data_with_ends_and_runs_without_flags_on_them_get_no_remark(line: str) -> None:
    assert not any("documents ends with" in text for text in judged(line)[2])


def test_an_end_is_looked_for_behind_the_first_documents_and_in_between(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    line = "--reset-attention-mask --data-path "
    assert not any("documents ends with" in text for text in judged(line + "joined")[2])
    monkeypatch.setattr(validation, "_probe", lambda tokens, *_: tokens[:0])
    assert any("documents ends with" in text for text in judged(line + "joined")[2])
    assert not any("documents ends with" in text for text in judged(line + "ended")[2])


def saved(config: Config, folder: Path, iteration: int) -> None:
    """A checkpoint of a run on one process as far as a preflight sees it."""
    path = folder / f"global_step{iteration}"
    path.mkdir(parents=True)
    run = RunRecord(
        state=TrainState(iteration=iteration),
        config=config.to_dict(),
        layout=ParallelLayout.of(config, 1),
        data_order=DataOrder.of(config, 1),
        shards={},
    )
    (path / RUN).write_text(json.dumps(run.to_dict()))
    (path / MANIFEST).write_text(checksum_manifest({RUN: {"bytes": (path / RUN).stat().st_size}}))


@pytest.fixture
def checkpoints(tmp_path: Path) -> Path:
    config = judged("")[0].with_vocab(121)
    for iteration in (2, 4):
        saved(config, tmp_path / "saved", iteration)
    return tmp_path / "saved"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("", []),
        ("--attention-dropout 0", []),
        ("--ckpt-step 2", []),
        ("--ckpt-step 3", [("ckpt-step-missing", ("ckpt_step",))]),
        (
            "--hidden-size 64 --seed 7 --zero-stage 2 --bf16 --no-bias-gelu-fusion",
            [
                ("resume-model-changed", ("hidden_size",)),
                ("resume-model-changed", ("gelu_approximation",)),
                ("resume-layout-changed", ("zero_stage",)),
                ("resume-layout-changed", ("precision",)),
                ("resume-data-order-changed", ("seed",)),
            ],
        ),
        (
            "--vocab-size 129",
            [("resume-vocabulary-changed", ("vocab_size", "make_vocab_size_divisible_by"))],
        ),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_reported(
    checkpoints: Path, line: str, expected: list[tuple[str, tuple[str, ...]]]
) -> None:
    _, problems, _ = judged(f"--load {checkpoints} {line}")

    assert list(zip(codes(problems), fields(problems), strict=True)) == expected


def test_checkpoints_are_not_judged_while_settings_contradict(checkpoints: Path) -> None:
    _, problems, _ = judged(f"--load {checkpoints} --micro-batch-size 0 --seed 7")

    assert len(problems) == 1
    assert "--micro-batch-size 0" in problems[0]


def test_the_checkpoint_before_a_damaged_one_is_compared(checkpoints: Path) -> None:
    (checkpoints / "global_step4" / RUN).write_text("{}")

    assert judged(f"--load {checkpoints}")[1] == []
    rejected = judged(f"--load {checkpoints} --on-damaged-checkpoint error")[1]
    assert codes(rejected) == ["checkpoint-damaged"]
    assert "global_step2" in judged(f"--load {checkpoints} --seed 1")[1][0]


def test_fp16_is_left_to_torch_where_only_torch_can_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "known_without_fp16", lambda: False)

    assert judged("--fp16")[1] == []


@pytest.mark.parametrize(
    ("accelerator", "processor", "expected"),
    [
        ("cpu", "flags : fpu avx512_vnni", True),
        ("cpu", "flags : fpu avx512_fp16", False),
        ("cpu", "Features : fp asimdhp", False),
        ("cuda", "flags : fpu", False),
    ],
)
def test_a_cpu_without_fp16_is_known_by_its_features(
    monkeypatch: pytest.MonkeyPatch, accelerator: str, processor: str, expected: bool
) -> None:
    monkeypatch.undo()
    monkeypatch.setenv("DS_ACCELERATOR", accelerator)
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: f"processor : 0\n{processor}\n")

    assert device.known_without_fp16() is expected


NOTHING_STARTED = """
import sys, socket, runpy
def refuse(*arguments, **keywords):
    raise AssertionError(f"something was started: {arguments}")
socket.socket.bind = socket.socket.connect = refuse
del sys.argv[0]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
except SystemExit as end:
    heavy = {"torch", "deepspeed", "transformers"} & set(sys.modules)
    print("ended", end.code, sorted(heavy))
"""


@pytest.mark.parametrize("rank", [0, 1])
def test_a_wrong_line_starts_loads_and_writes_nothing(
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

    ended = subprocess.run(
        [sys.executable, "-c", NOTHING_STARTED, str(REPOSITORY / "pretrain_gpt.py"), *line.split()],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )

    assert ended.stdout.strip() == "ended 2 []", ended.stdout + ended.stderr
    assert ("--hidden-size 33 is not divisible" in ended.stderr) is (rank == 0), ended.stderr
    assert list(tmp_path.rglob("*")) == []
