"""Checkpoints of other trainers are loaded by a run of several ranks, which has their logits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from megatron_ds.config import (
    CheckpointConfig,
    Config,
    DeepSpeedConfig,
    ModelConfig,
    MoEConfig,
    OptimizerConfig,
    ParallelConfig,
    ScheduleConfig,
)
from megatron_ds.conversion.registry import write
from megatron_ds.engine.build import build_engine
from megatron_ds.engine.device_batches import DeviceBatch
from megatron_ds.loading.initial_load import InitialLoad
from megatron_ds.loading.plan import make_plan
from megatron_ds.model.output_layer import OutputLayer, TokenLoss
from megatron_ds.train_state import StepPlan
from tests.dist.engine_harness import full_weights, prepare
from tests.distributed import run_ranks
from tests.unit.conversion.models import logits_of, random_source
from tests.unit.conversion.test_nanotron import write_nanotron
from tests.unit.conversion.test_trainer_experts import OLMO_CORE, TORCHTITAN, write_experts
from tests.unit.conversion.test_trainers import PEERS, TOLERANCE, Peer, opened, reference_of
from tests.unit.conversion.test_write_trainers import LLAMA

WORLD = 4
LENGTH = 32
FABRICATED = (
    Peer("litgpt", "experts", "experts"),
    Peer("nanotron", "nanotron", "nanotron"),
    TORCHTITAN,
    OLMO_CORE,
)
"""Checkpoints that this test writes itself."""
EXPERTS = MoEConfig(num_experts=(4,), moe_router_topk=2, moe_ffn_hidden_size=24)


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


@contextmanager
def recorded_logits() -> Iterator[list[Tensor]]:
    """The logits [B, S, V] of each pass through the output layer of this rank."""
    recorded: list[Tensor] = []
    compute = OutputLayer._loss

    def record(
        layer: OutputLayer, x_SBH: Tensor, labels_BS: Tensor, weights_BS: Any, weight_vH: Tensor
    ) -> TokenLoss:
        recorded.append(layer._logits(x_SBH.detach(), weight_vH.detach()))
        return compute(layer, x_SBH, labels_BS, weights_BS, weight_vH)

    with mock.patch.object(OutputLayer, "_loss", record):
        yield recorded


def start(rank: int, peers: Sequence[Peer], folder: str) -> list[int]:
    """Loads every checkpoint, and compares weights, logits by position and the loss of a step.

    Returns:
        The number of micro-batches whose logits this rank compared, by checkpoint.
    """
    meshes = prepare()
    shared = Path(folder)
    compared = []
    for peer in peers:
        config, plan, problems = make_plan(config_of(peer, shared))
        assert problems == [], (peer, [problem.render() for problem in problems])
        source = plan.imported
        assert source is not None
        config = config.with_vocab(source.settings.model.vocab_size)
        tokens, logits = reference_of(shared / peer.reference)
        config = config.with_values({"seq_length": tokens.shape[1]})
        mesh = meshes.of(config.parallel)
        engine = build_engine(config, mesh, torch.device("cpu"), init_weights=False)
        engine.reshard(InitialLoad.of(source, config))
        expected = opened(peer, shared / peer.folder).tensors
        for name, value in full_weights(engine, mesh).items():
            whole = expected[name].read()
            assert torch.equal(value[: len(whole)], whole), (peer, name)
        labels = tokens.roll(-1, 1)
        batch = DeviceBatch(tokens, labels, None, position=0)
        step = StepPlan(1, mesh.dp.size, 1, 0.01, 0.0, seq_length=tokens.shape[1])
        with recorded_logits() as recorded:
            loss = float(engine.train_step(iter([batch]), step).loss)
        # Rounding grows with the values, and differs between processors.
        scale = logits.abs().max().clamp(min=1)
        for value in recorded:
            assert value.shape[:2] == tokens.shape
            difference = (value[..., : logits.shape[-1]] - logits).abs().max()
            assert difference < TOLERANCE * scale, (peer, float(difference))
        compared.append(len(recorded))
        known = functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        assert loss == pytest.approx(float(known), abs=TOLERANCE), peer
        engine._engine.destroy()
    return compared


def check_starts(peers: Sequence[Peer], folder: Path) -> None:
    """Every rank of the last stage has the logits of every checkpoint."""
    compared = run_ranks(start, WORLD, tuple(peers), str(folder), timeout=300.0)
    once = [1] * len(peers)
    assert sorted(compared) == [[0] * len(peers)] * 2 + [once] * 2


def test_a_run_of_four_ranks_starts_with_the_logits_of_the_trainer(shared_data: Path) -> None:
    """Claim (conversion): a run in two tensor-parallel shards and two pipeline stages starts from a
    checkpoint of another trainer with the logits of the trainer's own program at every position, to
    1e-5 of the largest, and its loss, to 1e-5"""
    check_starts(PEERS, shared_data / "peer_checkpoints2")


def fabricate(peer: Peer, folder: Path) -> None:
    """Writes a checkpoint, with the logits of one process."""
    if peer.name == "nanotron":
        source = random_source(ModelConfig(**LLAMA))
        write_nanotron(folder / peer.folder / "10", 2)
    elif peer.name == "litgpt":
        source = random_source(ModelConfig(**LLAMA), moe=EXPERTS)
        write(source, folder / peer.folder, peer.name)
    else:
        source = write_experts(folder / peer.folder, peer.name)
    tokens = torch.randint(0, 60, (2, LENGTH), generator=torch.Generator().manual_seed(3))
    logits = logits_of(source, tokens)
    numpy.savez(folder / peer.folder / "reference.npz", tokens=tokens, logits=logits)


def test_a_run_of_four_ranks_has_the_logits_of_one_process(tmp_path: Path) -> None:
    """Of small checkpoints in the layouts of trainers, with experts and with shards of theirs."""
    for peer in FABRICATED:
        fabricate(peer, tmp_path)
    check_starts(FABRICATED, tmp_path)
