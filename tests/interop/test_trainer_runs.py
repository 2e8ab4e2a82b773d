"""Runs of other trainers, which their own packages began on the CPU, go on here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
import pytest

from megatron_ds.config import DataConfig
from megatron_ds.conversion.megatron.optimizer import MOMENTS
from megatron_ds.conversion.registry import open_source
from megatron_ds.conversion.source import ReadOptions
from megatron_ds.conversion.trainers.runs.olmo_schedules import schedule_of
from megatron_ds.data.build_datasets import build_datasets
from megatron_ds.data.validation import DataFiles
from megatron_ds.engine.states.state_reader import MASTER
from tests.e2e.conftest import VOCAB, write_corpus
from tests.e2e.runs import Launcher, Settings, steps, to_flags
from tests.fork_server import REPOSITORY
from tests.interop.trainer_mistakes import FIRST, LAST, MISTAKES

pytestmark = [pytest.mark.interop, pytest.mark.filterwarnings("ignore")]

PACKAGES = REPOSITORY / "build" / "trainers"
LENGTH = 16
BATCH = 4
ITERATIONS = 20
SAVED = 3
END = 6
TOLERANCE = 1e-5


@dataclass(frozen=True)
class Run:
    """A run of a trainer.

    Attributes:
        trainer: Name of the format.
        layouts: Layouts in which it goes on.
        words: Arguments of the trainer's program that choose the model.
        flags: Those that no file of the trainer has.
    """

    trainer: str
    layouts: tuple[str, ...]
    words: tuple[str, ...] = ()
    flags: Settings = field(default_factory=dict)


LAYOUTS: dict[str, tuple[Settings, int]] = {
    "one process": ({}, 1),
    "TP 2 x PP 2": ({"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}, 4),
    "ZeRO 3": ({"zero_stage": 3}, 2),
    "EP 2": ({"expert_model_parallel_size": 2}, 2),
}
DENSE = ("one process", "TP 2 x PP 2", "ZeRO 3")
HEADS: Settings = {"num_attention_heads": 4, "rotary_base": 500000}
EXPERTS: Settings = {"moe_router_topk": 2, "moe_router_score_function": "sigmoid"}
RUNS = {
    "torchtitan": Run("torchtitan", DENSE, (), HEADS),
    "olmo_core": Run("olmo_core", DENSE),
    "nanotron": Run("nanotron", DENSE),
    "torchtitan, experts": Run(
        "torchtitan", ("one process", "EP 2"), ("experts",), {"rotary_base": 1e6, **EXPERTS}
    ),
    "olmo_core, experts": Run("olmo_core", ("one process", "TP 2 x PP 2"), ("experts",)),
    "olmo_core, bias": Run("olmo_core", ("EP 2",), ("bias",)),
}
CHECKPOINTS = {"torchtitan": "checkpoint", "olmo_core": ".", "nanotron": "."}
"""Folder of the checkpoints in that of a run."""
FOLDERS = {"torchtitan": "step-{}", "olmo_core": "step{}", "nanotron": "{}"}
SCHEDULE: dict[str, Settings] = {
    "torchtitan": {"lr_decay_style": "cosine", "lr_warmup_iters": 2, "clip_grad": 0.1},
    "olmo_core": {"lr_decay_style": "deepspeed-cosine", "lr_warmup_iters": 2, "min_lr": 3e-4},
    "nanotron": {"lr_decay_style": "cosine", "lr_warmup_iters": 2, "min_lr": 3e-4},
}
"""Their schedules after the warmup; see docs/checkpoints/other_trainers.md."""


@pytest.fixture(scope="module")
def launcher(tmp_path_factory: pytest.TempPathFactory) -> Launcher:
    return Launcher(tmp_path_factory.mktemp("output"))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prefix of token files."""
    return write_corpus(tmp_path_factory.mktemp("corpus") / "tokens", 300, seed=0, step=1)


@pytest.fixture(scope="module")
def samples(corpus: Path) -> Path:
    """The samples that a run here reads, in their order."""
    data = build_datasets(
        DataFiles(DataConfig(data_path=(str(corpus),), split="1")),
        num_samples=(ITERATIONS * BATCH, 0, 0),
        seq_length=LENGTH,
        seed=1234,
        tokenizer_fingerprint="of the trainer",
        vocab_size=VOCAB + 8,
    ).train
    assert data is not None
    file = corpus.parent / "samples.npz"
    numpy.savez(file, tokens=numpy.stack([data[index] for index in range(ITERATIONS * BATCH)]))
    return file


def settings_of(run: Run, folder: Path, corpus: Path) -> dict[str, Any]:
    """The flags with which a run goes on."""
    trainer = run.trainer
    return {
        "load": f"{trainer}:{folder}",
        "data_path": corpus,
        "split": "1",
        "tokenizer_type": "NullTokenizer",
        "vocab_size": VOCAB + 7,
        "seq_length": LENGTH,
        "micro_batch_size": 2,
        "global_batch_size": BATCH,
        "train_iters": ITERATIONS,
        "exit_interval": END,
        "eval_iters": 0,
        "num_workers": 0,
        "log_interval": 1,
        **run.flags,
        **SCHEDULE[trainer],
    }


def train(trainer: str, samples: Path, folder: Path, count: int, *words: str) -> list[Any]:
    """Runs the trainer's package; returns its losses and gradient norms."""
    if not PACKAGES.is_dir():
        pytest.skip("`make test-interop` installs the packages of trainers")
    folder.mkdir()
    script = Path(__file__).with_name(f"{trainer}_run.py")
    environment = {**os.environ, "PYTHONPATH": str(PACKAGES), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, script, samples, folder, str(count), *words]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr[-5000:]
    log: list[Any] = json.loads((folder / "log.json").read_text())
    return log


@pytest.fixture(scope="module", params=RUNS)
def run(
    request: pytest.FixtureRequest, samples: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Run, Path, list[Any]]:
    """A run of six steps, the folder of its checkpoints, and what it logged."""
    run = RUNS[request.param]
    folder = tmp_path_factory.mktemp(run.trainer) / "run"
    log = train(run.trainer, samples, folder, END, *run.words)
    return run, folder / CHECKPOINTS[run.trainer], log


@pytest.mark.parametrize(
    ("run", "layout"),
    [(name, layout) for name, run in RUNS.items() for layout in run.layouts],
    indirect=["run"],
)
def test_a_run_goes_on_with_the_losses_of_the_trainer(
    run: tuple[Run, Path, list[Any]],
    layout: str,
    corpus: Path,
    launcher: Launcher,
    tmp_path: Path,
) -> None:
    """Claim (checkpoints): a run that torchtitan, OLMo-core or nanotron began goes on here with the
    losses, gradient norms, weights and moments of its own next steps, to 1e-5 in fp32, on several
    layouts; with experts too, whose losses and biases are those of the trainer (`make
    test-interop`)"""
    began, folder, log = run
    trainer = began.trainer
    flags, ranks = LAYOUTS[layout]
    settings = settings_of(began, folder, corpus) | {"save": tmp_path / "ours", "ckpt_step": 3}
    output = launcher.start({**settings, **flags}, ranks=ranks).succeed()

    logged = log[SAVED:END]
    ours = steps(tmp_path / "ours")
    assert [step["iteration"] for step in ours] == [step["step"] for step in logged] == [4, 5, 6]
    for name, key in (("lm_loss", "loss"), ("grad_norm", "norm")):
        values = [step[key] for step in logged]
        assert [step[name] for step in ours] == pytest.approx(values, abs=TOLERANCE)
    assert "at iteration 3, after 12 samples" in output
    assert "step-data-other" in output
    options = ReadOptions(optimizer=True, model=began.flags, given=frozenset(began.flags))
    theirs = open_source(folder / FOLDERS[trainer].format(END), trainer, options)
    states = open_source(tmp_path / "ours" / f"global_step{END}", options=options)
    # Masters, but of the biases of experts, which no optimizer has, the tensors themselves.
    masters = {**states.tensors, **states.optimizer.get(MASTER, {})}
    tables = (masters, *map(states.optimizer.get, MOMENTS))
    for table, expected in zip(
        tables, (theirs.tensors, *map(theirs.optimizer.get, MOMENTS)), strict=True
    ):
        for name, reader in expected.items():
            value = reader.read()
            mine = table[name].read(range(len(value)))
            if name.endswith("expert_bias"):  # of which a common part selects the same experts
                value = value - value.mean()
                mine = mine - mine.mean()
                assert value.any()
            assert (mine - value).norm() < TOLERANCE * value.norm(), name
    states.release()


SCHEDULERS: tuple[dict[str, Any], ...] = (
    {"_CLASS_": "ConstantScheduler"},
    {"_CLASS_": "ConstantWithWarmup", "warmup": 4},
    {"_CLASS_": "WSD", "warmup": 4, "decay": 6, "decay_fraction": None, "decay_min_lr": 1e-5},
    {"_CLASS_": "WSD", "warmup_fraction": 0.2, "warmup_min_lr": 1e-4},
    {"_CLASS_": "LinearWithWarmup", "warmup": 4, "alpha_f": 0.2},
    {"_CLASS_": "CosWithWarmup", "warmup": 3},
    {"_CLASS_": "CosWithWarmup", "warmup": 3, "t_max": 15},
    {"_CLASS_": "InvSqrtWithWarmup", "warmup": 3},
)


def test_the_rates_of_schedules_are_those_of_olmo_core() -> None:
    """Claim (checkpoints): the learning rates that a run of OLMo-core is to go on with are those
    of its own schedules (`make test-interop`)"""
    if not PACKAGES.is_dir():
        pytest.skip("`make test-interop` installs the packages of trainers")
    script = Path(__file__).with_name("olmo_core_rates.py")
    command = [sys.executable, script, "0.01", "20", json.dumps(SCHEDULERS)]
    environment = {**os.environ, "PYTHONPATH": str(PACKAGES), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr[-5000:]
    for settings, rates in zip(SCHEDULERS, json.loads(result.stdout), strict=True):
        schedule = schedule_of(settings, 0.01, 20, 3, 96)
        assert schedule.rate is not None
        ours = [schedule.rate(step) for step in range(1, 23)]
        assert ours == pytest.approx(rates, rel=1e-9), settings


EMBEDDING = "embedding.word.weight"
NAMED = {
    "decay of norms": ("layers.0.attention_norm.weight", "weight decay", "decays by 0.1 more"),
    "lost micro-batch": (EMBEDDING, "data", "of 2 micro-batches, 2 did not enter"),
    "stale moment": ("layers.1.mlp.fc_in.weight", "moments", "exp_avg"),
    "clipping left out": (EMBEDDING, "clipping", "was not clipped to a norm of 0.1"),
    "swapped rank": ("layers.0.mlp.fc_out.weight", "rank", "of 2 slices along dimension 1"),
    "doubled gradient": ("layers.0.attention.proj.weight", "gradient", "is 2 times"),
    "schedule off by one": (EMBEDDING, "schedule", "that of iteration 14"),
    "wrong loss mean": (EMBEDDING, "data", "weights of 0.4, 0.6"),
}
"""The tensor, the kind, and words of what is found."""


@pytest.fixture(scope="module", params=["olmo_core", "torchtitan", "nanotron"])
def mistaken(
    request: pytest.FixtureRequest, samples: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Run, Path]:
    """A run, and the folder of its checkpoints, each of a step with another mistake."""
    run = RUNS[request.param]
    folder = tmp_path_factory.mktemp(f"mistaken_{run.trainer}") / "run"
    train(run.trainer, samples, folder, LAST, "mistakes")
    return run, folder / CHECKPOINTS[run.trainer]


def check(
    run: Run, folder: Path, corpus: Path, first: int, second: int, samples: Path | None = None
) -> Any:
    """Runs tools/check_step.py; returns the finished process."""
    name = run.trainer
    locations = [f"{name}:{folder / FOLDERS[name].format(step)}" for step in (first, second)]
    settings = settings_of(run, folder, corpus)
    del settings["load"], settings["exit_interval"]
    words = [*locations, "--trust-recorded-files"]
    if samples is not None:
        del settings["data_path"], settings["split"]
        words += ["--samples", str(samples)]
    words += to_flags(settings)
    command = [sys.executable, REPOSITORY / "tools" / "check_step.py", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=600)


def test_steps_of_the_trainer_are_equal(mistaken: tuple[Run, Path], corpus: Path) -> None:
    """Claim (logging): steps that torchtitan, OLMo-core and nanotron computed are computed again by
    one process, and equal in weights and moments (`make test-interop`)"""
    result = check(*mistaken, corpus, 3, FIRST - 1)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "equal: weights, exp_avg and exp_avg_sq of " in result.stdout


def test_steps_on_given_samples_are_equal(
    mistaken: tuple[Run, Path], corpus: Path, samples: Path, tmp_path: Path
) -> None:
    """Claim (logging): steps of torchtitan, OLMo-core and nanotron are computed again on samples
    that are given in the order of the run (`make test-interop`)"""
    file = tmp_path / "steps.npy"
    with numpy.load(samples) as arrays:
        numpy.save(file, arrays["tokens"][SAVED * BATCH : (SAVED + 2) * BATCH])
    result = check(*mistaken, corpus, SAVED, SAVED + 2, file)
    assert result.returncode == 0, result.stdout + result.stderr


def test_steps_of_a_run_are_equal(run: tuple[Run, Path, list[Any]], corpus: Path) -> None:
    """Claim (logging): three steps of torchtitan, OLMo-core and nanotron, of experts too, between
    two checkpoints are computed again by one process, and equal (`make test-interop`)"""
    began, folder, _ = run
    result = check(began, folder, corpus, SAVED, END)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "equal: weights, exp_avg and exp_avg_sq of " in result.stdout


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_of_the_trainer_is_named(
    mistake: str, mistaken: tuple[Run, Path], corpus: Path
) -> None:
    """Claim (logging): of a step of torchtitan, OLMo-core or nanotron, the first tensor that
    differs and the kind of mistake are named (`make test-interop`)"""
    step = FIRST + MISTAKES.index(mistake)
    result = check(*mistaken, corpus, step - 1, step)
    name, kind, words = NAMED[mistake]
    lines = result.stdout.splitlines()
    assert (result.returncode, lines[1]) == (1, f"not equal: {name}"), result.stderr + result.stdout
    assert lines[2].startswith(f"    {kind} ("), lines
    assert words in lines[2], lines
