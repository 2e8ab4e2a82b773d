"""A run that gpt-neox began goes on in several layouts; tests/interop/write_neox.py recorded it."""

from __future__ import annotations

import shutil
import tarfile
from pathlib import Path

import numpy
import pytest
import torch
from torch.nn import functional

from megatron_ds import schedules
from megatron_ds.config import (
    CheckpointConfig,
    Config,
    DeepSpeedConfig,
    ParallelConfig,
    ScheduleConfig,
)
from megatron_ds.conversion.registry import open_source
from megatron_ds.conversion.source import ReadOptions
from megatron_ds.engine.build import build_engine
from megatron_ds.engine.device_batches import DeviceBatch
from megatron_ds.loading.initial_load import InitialLoad
from megatron_ds.loading.plan import make_plan
from tests.dist.engine_harness import prepare
from tests.dist.test_trainer_start import check_starts
from tests.distributed import run_ranks
from tests.problems import raises_problem
from tests.unit.conversion.models import logits_of
from tests.unit.conversion.test_trainers import Peer, reference_of

ARCHIVE = Path(__file__).parents[1] / "golden" / "neox.tar.xz"
LAYOUTS_OF_NEOX = ("pipeline", "shards", "sequential")
RUNS = ("pipeline", "sequential")
"""Those whose optimizer can go on."""
SAVED = 3
TOLERANCE = 1e-5
LAYOUTS = ((1, 1, 1), (2, 2, 0))
"""Tensor-parallel size, pipeline stages and ZeRO stage; the other ranks are replicas."""


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("neox")
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, filter="data")
    return folder


def config_of(folder: Path, layout: tuple[int, int, int]) -> Config:
    tp_size, stages, zero_stage = layout
    given = {"lr_decay_style", "lr_decay_iters", "min_lr", "lr_warmup_fraction", "train_iters"}
    return Config(
        parallel=ParallelConfig(
            tensor_model_parallel_size=tp_size, pipeline_model_parallel_size=stages
        ),
        schedule=ScheduleConfig(
            micro_batch_size=1,
            global_batch_size=4,
            train_iters=10,
            lr_decay_style="cosine",
            lr_decay_iters=10,
            min_lr=0.001,
            lr_warmup_fraction=0.2,
        ),
        deepspeed=DeepSpeedConfig(zero_stage=zero_stage),
        checkpoint=CheckpointConfig(load=f"neox:{folder}"),
        given=frozenset({*given, "global_batch_size", "micro_batch_size", "load"}),
    )


def go_on(rank: int, folder: str) -> None:
    """Computes steps 4 to 6 of each recorded run, in each layout."""
    meshes = prepare()
    for run in RUNS:
        path = Path(folder) / run
        with numpy.load(path / "results.npz") as arrays:
            samples = torch.from_numpy(arrays["samples"])
            losses = arrays["losses"]
            rates = arrays["rates"]
        for layout in LAYOUTS:
            config, plan, problems = make_plan(config_of(path, layout))
            assert problems == []
            source = plan.imported
            assert source is not None
            config = config.with_vocab(source.settings.model.vocab_size)
            mesh = meshes.of(config.parallel)
            engine = build_engine(config, mesh, torch.device("cpu"), init_weights=False)
            initial = InitialLoad.of(source, config)
            engine.reshard(initial)
            state = initial.state
            assert (state.iteration, state.consumed_samples) == (SAVED, 4 * SAVED)
            for index in range(SAVED, len(losses)):
                step = schedules.plan(config, state, mesh.dp.size)
                assert step.lr == pytest.approx(rates[index], rel=1e-6)
                own = samples[4 * index : 4 * index + 4][mesh.dp.rank :: mesh.dp.size]
                batches = (
                    DeviceBatch(sample[None, :-1], sample[None, 1:], None, position=place)
                    for place, sample in enumerate(own)
                )
                result = engine.train_step(batches, step)
                total = torch.tensor(float(result.loss))
                torch.distributed.all_reduce(total, group=mesh.dp.handle)
                found = float(total) / mesh.dp.size
                assert found == pytest.approx(losses[index], abs=TOLERANCE), (run, layout, index)
                state = state.advance(step, result)
            engine._engine.destroy()


def test_a_run_of_neox_goes_on_with_its_losses(recorded: Path) -> None:
    """Claim (checkpoints): a run that gpt-neox's model and DeepSpeed's ZeRO 1 began goes on here
    with its losses and learning rates, to 1e-5 in fp32, in replicas and in two tensor-parallel
    shards of two pipeline stages"""
    run_ranks(go_on, 4, str(recorded), timeout=600.0)


@pytest.mark.parametrize("run", LAYOUTS_OF_NEOX)
def test_logits_are_those_of_neox(run: str, recorded: Path) -> None:
    """Claim (conversion): checkpoints that gpt-neox's own model wrote, in pipeline stages, in
    tensor-parallel shards and in one process, have the logits of its next forward pass, to 1e-5"""
    source = open_source(recorded / run)
    assert source.format == "neox"
    tokens, expected = reference_of(recorded / run)
    assert (logits_of(source, tokens) - expected).abs().max() < TOLERANCE


def test_a_run_of_four_ranks_starts_with_the_logits_of_neox(recorded: Path) -> None:
    """Claim (conversion): a run in two tensor-parallel shards and two pipeline stages starts from
    checkpoints that gpt-neox's own model wrote with its logits at every position, to 1e-5"""
    check_starts([Peer("neox", run, run) for run in LAYOUTS_OF_NEOX], recorded)


def test_biases_of_tensor_parallel_ranks_are_summed(recorded: Path) -> None:
    """gpt-neox adds them on each rank before the sum over ranks, so that its loss has their sum.

    Claim (conversion): checkpoints of gpt-neox in two tensor-parallel shards have the loss of
    gpt-neox's own next step, to 1e-5
    """
    folder = recorded / "shards"
    source = open_source(folder, options=ReadOptions(optimizer=True))
    with numpy.load(folder / "results.npz") as arrays:
        batch = torch.from_numpy(arrays["samples"])[4 * SAVED : 4 * SAVED + 4]
        expected = arrays["losses"][SAVED]
    logits = logits_of(source, batch[:, :-1])
    loss = functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
    assert float(loss) == pytest.approx(expected, abs=TOLERANCE)
    assert not source.optimizer
    assert "biases" in source.unread


def test_another_optimizer_is_named(recorded: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(recorded / "sequential", folder)
    path = folder / f"global_step{SAVED}" / "configs" / "settings.yml"
    path.write_text(path.read_text().replace('"Adam"', '"Lion"'))
    options = ReadOptions(optimizer=True)
    with raises_problem("foreign-optimizer-other", contains="Lion"):
        open_source(folder, options=options)


@pytest.mark.parametrize("name", ["configs/settings.yml", "mp_rank_00_model_states.pt"])
def test_links_and_folders_in_place_of_files_are_refused(
    name: str, recorded: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(recorded / "sequential", folder)
    path = folder / f"global_step{SAVED}" / name
    outside = tmp_path / "elsewhere"
    path.rename(outside)
    path.symlink_to(outside)
    with raises_problem("foreign-link-outside", contains=path.name):
        open_source(folder)
    path.unlink()
    path.mkdir()
    with raises_problem("checkpoint-file-missing", contains=path.name):
        open_source(folder)
