"""The memory estimate against what autograd really saves, and its own arithmetic."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from megatron_ds.config import Config, DataConfig, ModelConfig, RecomputeConfig, ScheduleConfig
from megatron_ds.engine.memory_estimate import FP32, MemoryEstimate, MemoryInputs, estimate
from megatron_ds.model.gpt import GPTModel
from megatron_ds.model.packed_attention import PackingOptions
from megatron_ds.parallel.activation_checkpointing import ActivationCheckpointing
from megatron_ds.parallel.mesh import Mesh
from megatron_ds.parallel.rng import RngStreams

BATCH, SEQUENCE, HIDDEN, VOCAB = 3, 64, 64, 128
SHAPE: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": HIDDEN,
    "num_attention_heads": 4,
    "seq_length": SEQUENCE,
    "vocab_size": VOCAB,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
}
MODELS: dict[str, dict[str, Any]] = {
    "plain": {},
    "hidden dropout": {"hidden_dropout": 0.1},
    "attention dropout": {"attention_dropout": 0.1},
    "rope": {"position_embedding_type": "rope"},
    "rope, attention dropout": {"position_embedding_type": "rope", "attention_dropout": 0.1},
    "alibi": {"position_embedding_type": "alibi"},
    "grouped queries": {"num_query_groups": 2},
    "swiglu, RMSNorm": {"activation": "swiglu", "normalization": "RMSNorm"},
    "reglu": {"activation": "reglu"},
    "liglu": {"activation": "liglu"},
    "squared relu": {"activation": "squared-relu"},
}
CUT = ("plain", "attention dropout", "rope", "rope, attention dropout", "alibi", "grouped queries")
"""Models that are counted with attention that ends with a document, too."""
COUNTED = [*((name, False) for name in MODELS), *((name, True) for name in CUT)]
ALONE = MemoryInputs(
    zero_stage=0,
    tp_size=1,
    dp_size=1,
    param_bytes=4,
    accumulation_bytes=4,
    reduction_bytes=4,
    moments=2,
    bucket_elements=0,
    on_cpu=True,
)


def config(
    recompute: RecomputeConfig | None = None, *, documents: bool = False, **model: Any
) -> Config:
    return Config(
        data=DataConfig(reset_attention_mask=documents),
        model=ModelConfig(**{**SHAPE, **model}),
        schedule=ScheduleConfig(micro_batch_size=BATCH, global_batch_size=BATCH, train_iters=1),
        recompute=recompute or RecomputeConfig(),
    )


def saved(config: Config, dtype: torch.dtype) -> int:
    """Bytes that a forward pass keeps for the backward pass, parameters and ids left out."""
    mesh, rng = Mesh.single(), RngStreams(0)
    recompute = ActivationCheckpointing(config.recompute, rng)
    documents = PackingOptions(1, False, True) if config.data.reset_attention_mask else None
    model = GPTModel(
        config.model, mesh=mesh, rng=rng, seed=1, checkpointing=recompute, packing=documents
    ).to(dtype)
    ours = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        place = tensor.untyped_storage().data_ptr()
        if place not in ours and tensor.is_floating_point():
            kept[place] = tensor
        return tensor

    tokens = torch.zeros(BATCH, SEQUENCE, dtype=torch.long)
    with saved_tensors_hooks(keep, lambda tensor: tensor):
        model(tokens, tokens)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


def kept_by_head(element: int) -> int:
    """The gradients of the head's input and of its weight."""
    return element * HIDDEN * (BATCH * SEQUENCE + VOCAB)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("model", "documents"), COUNTED)
def test_activations_are_what_autograd_saves(
    model: str, documents: bool, dtype: torch.dtype
) -> None:
    run = config(documents=documents, **MODELS[model])
    engine = dataclasses.replace(ALONE, param_bytes=dtype.itemsize)

    measured = saved(run, dtype) - kept_by_head(dtype.itemsize)

    assert estimate(run, engine).activations == pytest.approx(measured, rel=0.02)


def test_recomputation_keeps_the_inputs_of_its_units_and_one_units_inside() -> None:
    unit = {"recompute_granularity": "full", "checkpoint_num_layers": 2}
    recomputed, stored = config(RecomputeConfig(**unit)), config()
    layer = saved(stored, torch.float32) - saved(config(num_layers=3), torch.float32)

    measured = saved(recomputed, torch.float32) - kept_by_head(FP32) + 2 * layer

    assert estimate(recomputed, ALONE).activations == pytest.approx(measured, rel=0.02)


@pytest.mark.parametrize("documents", [False, True])
def test_selective_recomputation_keeps_no_scores(documents: bool) -> None:
    selective = RecomputeConfig(recompute_granularity="selective")
    run = config(selective, documents=documents, attention_dropout=0.1)
    measured = saved(run, torch.float32) - kept_by_head(FP32)
    assert estimate(run, ALONE).activations == pytest.approx(measured, rel=0.02)


def states(stage: int, **changes: Any) -> MemoryEstimate:
    """Of bf16 with fp32 accumulation over four data-parallel ranks."""
    engine = dataclasses.replace(
        ALONE, zero_stage=stage, dp_size=4, param_bytes=2, accumulation_bytes=4, **changes
    )
    return estimate(config(), engine)


def whole() -> int:
    """Bytes of the parameters in bf16."""
    return estimate(config(), dataclasses.replace(ALONE, zero_stage=1, param_bytes=2)).device[
        "parameters"
    ]


@pytest.mark.parametrize(
    ("stage", "bytes_per_parameter"), [(1, 8 + 12 / 4), (2, 2 + 16 / 4), (3, 18 / 4)]
)
def test_states_are_those_of_the_readme(stage: int, bytes_per_parameter: float) -> None:
    assert states(stage).states == pytest.approx(bytes_per_parameter / 2 * whole(), rel=1e-3)


def test_offloaded_states_are_the_hosts() -> None:
    found = states(3, offload_optimizer=True, offload_parameters=True)
    assert found.states == 0
    assert sum(found.host.values()) == pytest.approx(18 / 4 / 2 * whole(), rel=1e-3)


def test_the_peak_is_that_of_the_fullest_phase() -> None:
    found = MemoryEstimate(phases={"loss": 5, "start of the backward pass": 9, "later": 7})
    assert (found.peak, found.peak_phase) == (9, "start of the backward pass")


def test_gradients_are_there_while_the_loss_is_computed_only_if_they_are_summed_up() -> None:
    once = config()
    schedule = dataclasses.replace(once.schedule, global_batch_size=2 * BATCH)
    twice = dataclasses.replace(once, schedule=schedule)
    first, second = (estimate(run, ALONE) for run in (once, twice))
    gradients = first.device["gradients"]
    assert second.phases["loss"] - first.phases["loss"] == gradients
    assert first.phases["gradient reduction"] == second.phases["gradient reduction"]


def test_a_device_keeps_more_of_the_loss_and_gives_activations_back() -> None:
    on_cpu = estimate(config(), ALONE)
    elsewhere = estimate(config(), dataclasses.replace(ALONE, on_cpu=False))
    assert elsewhere.head > on_cpu.head
    reduced = "gradient reduction"
    assert on_cpu.phases[reduced] - elsewhere.phases[reduced] == on_cpu.activations
