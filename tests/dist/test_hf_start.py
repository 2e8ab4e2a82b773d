"""A Hugging Face model is trained at every ZeRO stage, in stages and shards, and exported again.

On each layout the loss of the first step is that of transformers, the engine has the model's
weights, and after a step the exported model has the loss of the run's next step. Tokens are the
same on all data-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from megatron_ds.checkpoint.files.collective_io import CollectiveIO
from megatron_ds.checkpoint.location import RunFolders
from megatron_ds.checkpoint.manager import CheckpointManager
from megatron_ds.checkpoint.run_checkpoints import RunCheckpoints
from megatron_ds.config import (
    CheckpointConfig,
    Config,
    DeepSpeedConfig,
    OptimizerConfig,
    ParallelConfig,
    PrecisionConfig,
    ScheduleConfig,
)
from megatron_ds.conversion.huggingface.read_write import open_hf, write_hf
from megatron_ds.conversion.native import open_native
from megatron_ds.conversion.source import WriteOptions
from megatron_ds.engine.build import build_engine
from megatron_ds.engine.device_batches import DeviceBatch
from megatron_ds.loading.initial_load import InitialLoad
from megatron_ds.loading.plan import LoadPlan, make_plan
from megatron_ds.train_state import StepPlan, TrainState
from tests.dist.engine_harness import full_weights, prepare
from tests.distributed import run_ranks
from tests.proofs.cases import with_proofs
from tests.unit.conversion.hf_models import TOKENS, VOCAB, load_strictly, random_model

WORLD = 4
BATCHES = (TOKENS[:1], TOKENS[1:])
LENGTH = TOKENS.shape[1] - 1
Layout = tuple[int, int, int, bool]
"""ZeRO stage, tensor-parallel size, pipeline stages, bf16."""
LAYOUTS: tuple[Layout, ...] = (
    (0, 2, 2, False),
    (1, 2, 1, True),
    (2, 1, 1, False),
    (3, 2, 1, False),
)
FURTHER: tuple[Layout, ...] = ((0, 1, 1, False), (1, 2, 1, False))


def config_of(layout: Layout, load: Path, save: Path) -> tuple[Config, LoadPlan]:
    stage, tp_size, stages, bf16 = layout
    config = Config(
        parallel=ParallelConfig(
            tensor_model_parallel_size=tp_size, pipeline_model_parallel_size=stages
        ),
        optimizer=OptimizerConfig(lr=0.01),
        schedule=ScheduleConfig(micro_batch_size=1, train_iters=2),
        precision=PrecisionConfig(bf16=bf16),
        deepspeed=DeepSpeedConfig(zero_stage=stage),
        checkpoint=CheckpointConfig(save=str(save), load=f"hf:{load}"),
        given=frozenset(),
    )
    merged, plan, problems = make_plan(config)
    assert problems == []
    return merged.with_vocab(VOCAB).with_values({"seq_length": LENGTH}), plan


def train(rank: int, layouts: Sequence[Layout], folder: str) -> None:
    meshes = prepare()
    load = Path(folder) / "theirs"
    expected = {name: tensor.read() for name, tensor in open_hf(load).tensors.items()}
    for number, layout in enumerate(layouts):
        save = Path(folder) / str(number)
        config, plan = config_of(layout, load, save)
        mesh = meshes.of(config.parallel)
        engine = build_engine(config, mesh, torch.device("cpu"), init_weights=False)
        assert plan.imported is not None
        engine.reshard(InitialLoad.of(plan.imported, config))
        for name, value in full_weights(engine, mesh).items():
            rounded = expected[name].bfloat16().float() if layout[3] else expected[name]
            assert torch.equal(value[: len(rounded)], rounded), (layout, name)
            assert not value[len(rounded) :].any()  # padding
        losses = []
        state = TrainState()
        for tokens in BATCHES:
            batch = DeviceBatch(tokens[:, :-1], tokens[:, 1:], None, position=0)
            plan = StepPlan(state.iteration + 1, mesh.dp.size, 1, 0.01, 0.0, seq_length=LENGTH)
            result = engine.train_step(iter([batch]), plan)
            losses.append(float(result.loss))
            state = state.advance(plan, result)
            if state.iteration == 1:
                folders = RunFolders.local(config.checkpoint)
                run = RunCheckpoints(config, mesh, lambda _: None, CollectiveIO(), folders)
                CheckpointManager(run).saving.save(engine, state)
        torch.save(losses, save / f"losses.{rank}")
        engine._engine.destroy()


def loss_of(folder: Path, tokens: torch.Tensor) -> float:
    with torch.no_grad():
        return float(load_strictly(folder, dtype=torch.float32)(tokens, labels=tokens).loss)


@pytest.mark.parametrize("layouts", with_proofs([(LAYOUTS,), (FURTHER,)], [(FURTHER,)]))
def test_a_model_is_trained_and_exported_on_every_layout(
    layouts: Sequence[Layout], tmp_path: Path
) -> None:
    """Claim (conversion): a training run starts from a Hugging Face model at every ZeRO stage,
    sharded and in stages, with the loss of `transformers`, and its export has the loss of its next
    step"""
    model = random_model("llama")
    model.generation_config.update(eos_token_id=[1, 2])
    model.save_pretrained(tmp_path / "theirs")
    first = loss_of(tmp_path / "theirs", BATCHES[0])

    run_ranks(train, WORLD, layouts, str(tmp_path), timeout=400.0)

    for number, layout in enumerate(layouts):
        saved = tmp_path / str(number)
        export = tmp_path / f"export-{number}"
        write_hf(open_native(saved), export, WriteOptions(hf_model_type="llama"))
        exported = load_strictly(export)
        assert exported.config.max_position_embeddings == model.config.max_position_embeddings
        assert exported.generation_config.eos_token_id == [1, 2]
        second = loss_of(export, BATCHES[1])
        error = 2e-2 if layout[3] else 1e-5
        for rank in range(WORLD):
            losses = torch.load(saved / f"losses.{rank}")
            assert losses == pytest.approx([first, second], rel=error), (layout, rank)
