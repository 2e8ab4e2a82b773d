"""Checkpoints of real engines: the files of every layout give the model's weights.

Covers ZeRO 0 to 3 x tensor-parallel size 1 and 2 x fp32 and bf16, except ZeRO 0 with bf16, which is
rejected, and pipeline stages with a tied embedding; on four ranks, so that ZeRO-3 partitions over
two and over four. The sizes divide by neither, so its partitions are padded.
"""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import torch

from megatron_ds.checkpoint.collective_io import CollectiveIO
from megatron_ds.checkpoint.full_weights import Weights, lazy_full_weights
from megatron_ds.checkpoint.manager import CheckpointManager
from megatron_ds.checkpoint.metadata import read_run
from megatron_ds.config import (
    CheckpointConfig,
    Config,
    DeepSpeedConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    PrecisionConfig,
    ScheduleConfig,
)
from megatron_ds.conversion.native import source_of
from megatron_ds.engine.device_batches import DeviceBatch
from megatron_ds.inference.load_checkpoint import load_model
from megatron_ds.parallel.mesh import Mesh
from megatron_ds.train_state import StepPlan, TrainState
from tests.dist.engine_harness import build, full_tensor, full_weights, prepare
from tests.distributed import run_ranks

WORLD = 4
VOCAB = 51  # of 60 padded rows at size 1 and 2, of 64 at size 4
MODEL = ModelConfig(
    num_layers=2,
    hidden_size=20,
    num_attention_heads=4,
    num_query_groups=4,
    kv_channels=6,
    ffn_hidden_size=28,
    activation="swiglu",
    untie_embeddings_and_output_weights=True,
    seq_length=9,
    vocab_size=VOCAB,
    make_vocab_size_divisible_by=30,
)


Layout = tuple[int, int, bool, int]
"""ZeRO stage, tensor-parallel size, bf16, pipeline stages."""


def layouts() -> list[Layout]:
    product = itertools.product((0, 1, 2, 3), (1, 2), (False, True), (1,))
    plain = [layout for layout in product if not (layout[0] == 0 and layout[2])]
    return [*plain, (0, 2, False, 2), (1, 1, True, 2)]


def config_of(layout: Layout, folder: Path) -> Config:
    stage, tp_size, bf16, stages = layout
    return Config(
        model=dataclasses.replace(MODEL, untie_embeddings_and_output_weights=stages == 1),
        parallel=ParallelConfig(
            tensor_model_parallel_size=tp_size, pipeline_model_parallel_size=stages
        ),
        optimizer=OptimizerConfig(lr=0.01),
        schedule=ScheduleConfig(micro_batch_size=1, train_iters=2),
        precision=PrecisionConfig(bf16=bf16),
        deepspeed=DeepSpeedConfig(zero_stage=stage),
        checkpoint=CheckpointConfig(save=str(folder)),
    )


class Batches:
    """Random micro-batches, the same on the ranks of one tensor-parallel group."""

    def __init__(self, dp_rank: int) -> None:
        self._generator = torch.Generator().manual_seed(dp_rank)

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> DeviceBatch:
        tokens = torch.randint(0, VOCAB, (1, 10), generator=self._generator)
        return DeviceBatch(tokens[:, :-1], tokens[:, 1:], None, position=0)


def save_and_read(rank: int, folder: str) -> None:
    meshes = prepare()
    for number, layout in enumerate(layouts()):
        where = Path(folder) / str(number)
        config, (stage, _, bf16, _) = config_of(layout, where), layout
        mesh = meshes.of(config.parallel)
        engine = build(config, mesh)
        state = TrainState()
        for _ in range(2):
            plan = StepPlan(state.iteration + 1, mesh.dp.size, 1, 0.01, 0.1, seq_length=9)
            state = state.advance(plan, engine.train_step(Batches(mesh.dp.rank), plan))
        CheckpointManager(config, mesh, lambda _: None, CollectiveIO()).save(engine, state)

        opened = lazy_full_weights(read_run(where / "global_step2"))
        saved = {name: tensor.read() for name, tensor in opened.items()}
        own = full_weights(engine, mesh)
        assert saved.keys() == own.keys(), layout
        dtype = torch.bfloat16 if bf16 else torch.float32
        for name, value in own.items():
            assert saved[name].dtype == (torch.float32 if stage == 3 else dtype)
            # ZeRO-3 keeps the fp32 values that the model's bf16 ones are rounded from.
            assert torch.equal(saved[name].to(dtype).float(), value), (layout, name)
        engine._engine.destroy()
        check_loaded_at_every_size(where, saved, meshes)


def check_loaded_at_every_size(where: Path, saved: Weights, meshes: dict[int, Mesh]) -> None:
    found = read_run(where / "global_step2")
    for mesh in meshes.values():
        model = load_model(source_of(found), mesh, torch.device("cpu"), precision="fp32")
        assert not model.training
        for name, parameter in model.named_parameters():
            full = full_tensor(parameter.detach(), parameter, mesh.tp)
            expected = saved[name].float()
            padding = full[expected.shape[0] :]
            assert torch.equal(full[: expected.shape[0]], expected), (mesh.tp.size, name)
            assert padding.count_nonzero() == 0


def test_every_layout_gives_the_weights_of_the_model(tmp_path: Path) -> None:
    run_ranks(save_and_read, WORLD, str(tmp_path), timeout=400.0)
