"""Checkpoints of other trainers are loaded by a run of several ranks, which has their logits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn import functional

from megatron_ds.config import (
    CheckpointConfig,
    Config,
    DeepSpeedConfig,
    OptimizerConfig,
    ParallelConfig,
    ScheduleConfig,
)
from megatron_ds.engine.build import build_engine
from megatron_ds.engine.device_batches import DeviceBatch
from megatron_ds.loading.initial_load import InitialLoad
from megatron_ds.loading.plan import make_plan
from megatron_ds.train_state import StepPlan
from tests.dist.engine_harness import full_weights, prepare
from tests.distributed import run_ranks
from tests.unit.conversion.test_trainers import PEERS, Peer, opened, reference_of

WORLD = 4
LENGTH = 31


def config_of(peer: Peer, folder: Path) -> Config:
    """TP 2 x PP 2 from a checkpoint of another trainer."""
    return Config(
        parallel=ParallelConfig(tensor_model_parallel_size=2, pipeline_model_parallel_size=2),
        optimizer=OptimizerConfig(lr=0.01),
        schedule=ScheduleConfig(micro_batch_size=2, train_iters=1),
        deepspeed=DeepSpeedConfig(zero_stage=0),
        checkpoint=CheckpointConfig(load=f"{peer.name}:{folder / peer.folder}"),
        given=frozenset(peer.flags),
    ).with_values(peer.flags)


def start(rank: int, folder: str) -> None:
    meshes = prepare()
    shared = Path(folder)
    for peer in PEERS:
        config, plan, problems = make_plan(config_of(peer, shared))
        assert problems == [], peer
        source = plan.imported
        assert source is not None
        config = config.with_vocab(source.settings.model.vocab_size)
        config = config.with_values({"seq_length": LENGTH})
        mesh = meshes.of(config.parallel)
        engine = build_engine(config, mesh, torch.device("cpu"), init_weights=False)
        engine.reshard(InitialLoad.of(source, config))
        expected = opened(peer, shared / peer.folder).tensors
        for name, value in full_weights(engine, mesh).items():
            whole = expected[name].read()
            assert torch.equal(value[: len(whole)], whole), (peer, name)
        tokens, logits = reference_of(shared / peer.reference)
        batch = DeviceBatch(tokens[:, :-1], tokens[:, 1:], None, position=0)
        step = StepPlan(1, mesh.dp.size, 1, 0.01, 0.0, seq_length=LENGTH)
        loss = float(engine.train_step(iter([batch]), step).loss)
        known = functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        assert loss == pytest.approx(float(known), abs=1e-5), peer
        engine._engine.destroy()


def test_a_run_of_four_ranks_starts_with_the_loss_of_the_trainer(shared_data: Path) -> None:
    """Claim (conversion): a run in two tensor-parallel shards and two pipeline stages starts from a
    checkpoint of another trainer with the loss of the trainer's own logits, to 1e-5"""
    run_ranks(start, WORLD, str(shared_data / "peer_checkpoints2"), timeout=300.0)
