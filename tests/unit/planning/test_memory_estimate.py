"""The memory estimate, compared with what autograd saves, and its arithmetic."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.pipe import schedule
from torch.autograd.graph import saved_tensors_hooks

from megatron_ds.cli.arguments import build_config
from megatron_ds.config import (
    CheckpointConfig,
    Config,
    DataConfig,
    ModelConfig,
    MoEConfig,
    OptimizerConfig,
    ParallelConfig,
    RecomputeConfig,
    ScheduleConfig,
)
from megatron_ds.model.attention.backends import AttentionOptions
from megatron_ds.model.attention.packed import PackingOptions
from megatron_ds.model.declaration.architecture import is_expert, is_matrix, model_spec
from megatron_ds.model.declaration.forward_pass import FP32
from megatron_ds.model.gpt import GPTModel
from megatron_ds.model.stages import stage_slices
from megatron_ds.parallel.activation_checkpointing import ActivationCheckpointing
from megatron_ds.parallel.mesh import Group, Mesh
from megatron_ds.parallel.rng import RngStreams
from megatron_ds.planning.memory_estimate import MemoryEstimate, estimate, planned_memory
from megatron_ds.planning.memory_inputs import MemoryInputs, OptimizerBytes
from tests.proofs.cases import rotated, with_proofs
from tests.tables import tables

TABLES = tables(__file__, tuple)

BATCH = 3
SEQUENCE = 64
HIDDEN = 64
VOCAB = 128
COLLECTIVES = (
    "all_gather",
    "all_gather_into_tensor",
    "all_reduce",
    "all_to_all_single",
    "reduce_scatter_tensor",
)
SHAPE: dict[str, Any] = TABLES["shape"]
MODELS: dict[str, dict[str, Any]] = TABLES["models"]
OF_ATTENTION = {
    "attention_dropout",
    "position_embedding_type",
    "num_query_groups",
    "window_size",
    "window_attn_skip_freq",
}
COUNTED = [
    *((name, False, None) for name in MODELS),
    *((name, True, None) for name, model in MODELS.items() if model.keys() <= OF_ATTENTION),
    *(("attention dropout", documents, "selective") for documents in (False, True)),
]
"""Model, whether attention is inside documents, and what is recomputed."""
DTYPES = (torch.float32, torch.bfloat16)
LIMITS = TABLES["limits"]
SINGLE = MemoryInputs(
    zero_stage=0,
    tp_size=1,
    dp_size=1,
    param_bytes=4,
    accumulation_bytes=4,
    reduction_bytes=4,
    optimizer=OptimizerBytes(2, 8.0),
    zero={"reduce_bucket_size": 0, **LIMITS},
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


def saved_bytes(config: Config, dtype: torch.dtype, mesh: Mesh | None = None) -> int:
    """Bytes that a forward pass saves for the backward pass, without parameters and token ids."""
    rng = RngStreams(0)
    recompute = ActivationCheckpointing(config.recompute, rng)
    packing = PackingOptions(False, True) if config.data.reset_attention_mask else None
    attention = AttentionOptions(packing=packing)
    options: dict[str, Any] = {"checkpointing": recompute, "attention": attention}
    mesh = mesh or Mesh.single()
    options["moe"] = config.moe
    model = GPTModel(config.model, mesh=mesh, rng=rng, seed=1, **options).to(dtype)
    ours = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        place = tensor.untyped_storage().data_ptr()
        if place not in ours and tensor.is_floating_point():
            kept[place] = tensor
        return tensor

    tokens = torch.zeros(BATCH, SEQUENCE, dtype=torch.long)
    with saved_tensors_hooks(keep, lambda tensor: tensor):
        model(tokens, tokens, documents=packing and packing.documents(tokens == 1))
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


def saved_by_layers(config: Config, dtype: torch.dtype = torch.float32) -> int:
    """The same without gradients of the input and the weight of the output layer."""
    losses = 1 + config.model.mtp_num_layers
    head = dtype.itemsize * HIDDEN * (BATCH * SEQUENCE + VOCAB)
    return saved_bytes(config, dtype) - losses * head


@pytest.mark.parametrize(("counted", "dtype"), with_proofs(*rotated(COUNTED, DTYPES)))
def test_activations_equal_what_autograd_saves(
    counted: tuple[str, bool, str | None], dtype: torch.dtype
) -> None:
    """Claim (logging): the memory estimate counts the activations that autograd saves"""
    model, documents, granularity = counted
    recompute = RecomputeConfig(recompute_granularity=granularity)
    run = config(recompute, documents=documents, **MODELS[model])
    engine = dataclasses.replace(SINGLE, param_bytes=dtype.itemsize)

    assert estimate(run, engine).activations == pytest.approx(saved_by_layers(run, dtype), rel=0.02)


OF_TODAY = TABLES["of_today"]


@pytest.mark.parametrize(
    ("model", "parts", "dtype", "recompute"),
    with_proofs(
        *rotated(
            ("plain", "swiglu, RMSNorm"),
            ({}, OF_TODAY, {"moe_latent_size": HIDDEN // 2}),
            DTYPES,
            (None, RecomputeConfig(recompute_granularity="full", checkpoint_num_layers=2)),
        )
    ),
)
def test_activations_of_experts_equal_what_autograd_saves(
    model: str, parts: dict[str, Any], recompute: RecomputeConfig | None, dtype: torch.dtype
) -> None:
    pattern = {"moe_layer_freq": "[0,1]*2"} if parts else {"expert_interval": 2}
    experts = MoEConfig(num_experts=(8,), moe_router_topk=3, **pattern, **parts)
    run = dataclasses.replace(config(recompute, **MODELS[model]), moe=experts)
    engine = dataclasses.replace(SINGLE, param_bytes=dtype.itemsize)
    stored = dataclasses.replace(run, recompute=RecomputeConfig())

    measured = saved_by_layers(stored, dtype)
    if recompute is not None:
        # Half of the layers, and the inputs of both halves instead of the last layer's.
        residual = BATCH * SEQUENCE * HIDDEN * dtype.itemsize
        ends = estimate(dataclasses.replace(run, model=no_layers(run.model)), engine).activations
        measured = ends + (measured - ends) // 2 + 2 * residual

    assert estimate(run, engine).activations == pytest.approx(measured, rel=0.02)


def no_layers(model: ModelConfig) -> ModelConfig:
    return dataclasses.replace(model, num_layers=0)


@pytest.mark.parametrize("experts", [1, 2])
def test_experts_are_partitioned_over_the_ranks_that_have_them(experts: int) -> None:
    """All 4 data-parallel ranks have 8 experts each, or two pairs of ranks have 4 each."""
    run = dataclasses.replace(
        config(),
        moe=MoEConfig(num_experts=(8,)),
        parallel=ParallelConfig(expert_model_parallel_size=experts),
    )
    spec = model_spec(run.model, run.moe, 1, experts)
    one = spec.elements()
    of_experts = spec.elements(keep=is_expert)
    memory = estimate(run, dataclasses.replace(SINGLE, zero_stage=1, dp_size=4))
    assert memory.device["parameters"] == FP32 * one
    partition = (one - of_experts) / 4 + of_experts / (4 / experts)
    assert memory.device["master weights"] == pytest.approx(FP32 * partition, abs=FP32 * 2)


TENSOR_PARALLEL = [
    (model, {"tp": 2, "sequence": sequence, "experts": experts})
    for model in ("plain", "hidden dropout", "swiglu, RMSNorm")
    for sequence in (False, True)
    for experts in (1, 8)
]
ULYSSES = [
    (model, {"tp": tp, "sp": 4 // tp, "sequence": tp > 1})
    for model in ("plain", "hidden dropout", "rope", "grouped queries", "alibi")
    for tp in (1, 2)
]
FORMS = TABLES["forms"]


@pytest.mark.parametrize(("model", "layout"), [*TENSOR_PARALLEL, *ULYSSES, *FORMS])
def test_activations_of_a_parallel_rank_equal_what_autograd_saves(
    model: str, layout: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the other ranks: collectives leave their outputs as they are."""
    tp = layout["tp"]
    sp = layout.get("sp", 1)
    is_sharded = bool(layout["sequence"])
    run = dataclasses.replace(
        config(**MODELS[model]),
        moe=MoEConfig(num_experts=(layout.get("experts", 1),)),
        parallel=ParallelConfig(tensor_model_parallel_size=tp, sequence_parallel=is_sharded),
    )
    mesh = dataclasses.replace(
        Mesh.single(),
        tp=Group(tuple(range(tp)), 0, None, sequence_parallel=is_sharded),
        ulysses=Group(tuple(range(sp)), 0, None),
    )
    done = SimpleNamespace(wait=lambda: None)
    for name in COLLECTIVES:
        monkeypatch.setattr(dist, name, lambda *_, **__: done)
    engine = dataclasses.replace(SINGLE, tp_size=tp, ulysses_size=sp, sequence_ranks=sp, dp_size=sp)
    head = FP32 * HIDDEN * (BATCH * SEQUENCE // sp + VOCAB // tp)

    losses = 1 + run.model.mtp_num_layers
    measured = saved_bytes(run, torch.float32, mesh) - losses * head

    assert estimate(run, engine).activations == pytest.approx(measured, rel=0.02)


@pytest.mark.parametrize("model", ["plain", "swiglu, RMSNorm"])
def test_tiled_mlp_saves_no_inner_activations(model: str) -> None:
    tiled = config(RecomputeConfig(tiled_mlp=True), **MODELS[model])
    measured = saved_by_layers(tiled)
    inner = saved_by_layers(config(**MODELS[model])) - measured
    tiles = BATCH * SEQUENCE // HIDDEN
    one_tile = inner / SHAPE["num_layers"] / tiles  # exists during the backward pass

    found = estimate(tiled, SINGLE).activations

    assert found == pytest.approx(measured + one_tile, rel=0.02)


def test_full_recompute_saves_chunk_inputs_and_one_chunk() -> None:
    unit = {"recompute_granularity": "full", "checkpoint_num_layers": 2}
    recomputed = config(RecomputeConfig(**unit))
    stored = config()
    layer = saved_by_layers(stored) - saved_by_layers(config(num_layers=3))

    measured = saved_by_layers(recomputed) + 2 * layer

    assert estimate(recomputed, SINGLE).activations == pytest.approx(measured, rel=0.02)


def test_accelerator_repeats_the_keys_of_alibi_with_grouped_queries() -> None:
    elsewhere = dataclasses.replace(SINGLE, on_cpu=False)
    repeated, single = (
        estimate(config(position_embedding_type="alibi", num_query_groups=groups), elsewhere)
        for groups in (2, 4)
    )
    one = 4 * BATCH * SEQUENCE * HIDDEN * FP32  # of keys in four layers
    # Half of the heads project keys and values, but all of them save both.
    assert repeated.activations - single.activations == 2 * one - 2 * one // 2


def states(stage: int, **changes: Any) -> MemoryEstimate:
    """Estimate for bf16 with fp32 accumulation and data-parallel size 4."""
    engine = dataclasses.replace(
        SINGLE, zero_stage=stage, dp_size=4, param_bytes=2, accumulation_bytes=4, **changes
    )
    return estimate(config(), engine)


def parameter_bytes() -> int:
    """Bytes of the parameters in bf16."""
    return estimate(config(), dataclasses.replace(SINGLE, zero_stage=1, param_bytes=2)).device[
        "parameters"
    ]


@pytest.mark.parametrize(
    ("stage", "offload", "bytes_per_parameter"),
    [
        (1, False, 6 + 12 / 4),
        (2, False, 2 + 16 / 4),
        (3, False, 18 / 4),
        (1, True, 8 + 4 / 4),
        (2, True, 2 + 4 / 4),
        (3, True, 2 / 4),
    ],
)
def test_states_take_documented_bytes_per_parameter(
    stage: int, offload: bool, bytes_per_parameter: float
) -> None:
    found = states(stage, offload_optimizer=offload).states
    assert found == pytest.approx(bytes_per_parameter / 2 * parameter_bytes(), rel=1e-3)


@pytest.mark.parametrize(
    ("stage", "dp_size", "bytes_per_parameter"), [(2, 1, 8), (2, 4, 2 + 6 / 4), (3, 4, 8 / 4)]
)
def test_states_in_bf16_take_documented_bytes_per_parameter(
    stage: int, dp_size: int, bytes_per_parameter: float
) -> None:
    """The parameters are the master weights."""
    in_bf16: dict[str, Any] = {"param_bytes": 2, "accumulation_bytes": 2, "master_bytes": 2}
    engine = dataclasses.replace(SINGLE, zero_stage=stage, dp_size=dp_size, **in_bf16)
    found = estimate(config(), engine).states
    assert found == pytest.approx(bytes_per_parameter / 2 * parameter_bytes(), rel=1e-3)


def test_moments_have_the_bytes_of_the_declared_states() -> None:
    """The engine's test compares the declared states with those of the optimizers."""

    def of(name: str, **options: Any) -> MemoryEstimate:
        chosen = OptimizerConfig(optimizer=name, **options)
        return states(2, optimizer=OptimizerBytes.of(chosen, 2))

    full = of("adam").device["moments"]
    # One byte, and a scale in fp32 for 256 elements.
    small = of("adam", use_bnb_optimizer=True).device["moments"]
    assert small == pytest.approx(full * (1 + 4 / 256) / 4, rel=1e-3)
    assert of("lion").device["moments"] == of("sgd").device["moments"] == full / 2
    assert of("sgd", sgd_momentum=0.0).device["moments"] == 0
    muon = of("muon")
    matrices = model_spec(config().model).elements(keep=is_matrix)
    assert full - muon.device["moments"] == pytest.approx(4 * matrices / 4, abs=4)
    assert muon.reduction > of("adam").reduction
    half = {"exp_avg_sq_dtype": "bf16"}
    assert of("adam", **half).device["moments"] == pytest.approx(full * 3 / 4, rel=1e-3)
    less = of("muon", **half).device["moments"]
    assert full * 3 / 4 - less == pytest.approx(2 * matrices / 4, abs=4)
    normuon = of("muon", normuon=True)
    assert normuon.device["moments"] == full
    assert normuon.reduction > muon.reduction
    soap = of("soap")
    assert soap.device["moments"] - full == pytest.approx(2 * 4 * matrices / 4, abs=8)
    assert soap.reduction > normuon.reduction


def test_gradients_of_zero1_are_not_partitioned() -> None:
    first, zeroth = (
        estimate(config(), dataclasses.replace(SINGLE, zero_stage=stage, dp_size=4)).device
        for stage in (1, 0)
    )
    assert first["gradients"] == zeroth["gradients"] == 4 * first["master weights"]


def test_a_pipeline_stage_has_its_layers_and_several_micro_batches() -> None:
    model = config(num_layers=4)
    parallel = ParallelConfig(pipeline_model_parallel_size=2)
    staged = dataclasses.replace(model, parallel=parallel)
    accumulating = dataclasses.replace(staged.schedule, global_batch_size=4 * BATCH)
    found = estimate(staged, SINGLE)
    spec = model_spec(model.model)
    largest = max(spec.elements(spec.layers[part]) for part in stage_slices(spec, (2, 2)))
    assert found.device["parameters"] == FP32 * largest
    assert found.activations == estimate(config(num_layers=2), SINGLE).activations
    several = dataclasses.replace(staged, schedule=accumulating)
    assert estimate(several, SINGLE).activations == estimate(model, SINGLE).activations


@pytest.mark.parametrize("ranks", [2, 3])
def test_folded_stages_store_as_many_micro_batches_as_their_schedule(ranks: int) -> None:
    method = ",".join(map(str, range(1, 2 * ranks + 1)))
    parallel = ParallelConfig(
        pipeline_model_parallel_size=ranks,
        pipeline_schedule="dualpipev",
        pp_partition_method=method,
    )
    folded = config(num_layers=sum(parallel.given_layers_per_stage or ()))
    micro_batches = 2 * ranks + 1
    steps = dataclasses.replace(folded.schedule, global_batch_size=micro_batches * BATCH)
    folded = dataclasses.replace(folded, parallel=parallel, schedule=steps)
    most = max(_most_layers(parallel, rank, micro_batches) for rank in range(ranks))
    assert estimate(folded, SINGLE).activations == (
        estimate(config(num_layers=most), SINGLE).activations
    )


def _most_layers(parallel: ParallelConfig, rank: int, micro_batches: int) -> int:
    """Most layers between whose forward and backward passes a rank is, by DeepSpeed's schedule."""
    stages = parallel.stages_of_ranks
    layers = parallel.given_layers_per_stage
    stored = 0
    most = 0
    for commands in schedule.DualPipeVSchedule(micro_batches, len(stages), rank).steps():
        for command in commands:
            if isinstance(command, (schedule.ForwardPass, schedule.BackwardPass)):
                count = layers[stages[rank][command.phase]]
                stored += count if isinstance(command, schedule.ForwardPass) else -count
                most = max(most, stored)
    return most


def test_offloaded_states_are_in_host_memory() -> None:
    found = states(3, offload_optimizer=True, offload_parameters=True)
    assert found.states == 0
    assert sum(found.host.values()) == pytest.approx(18 / 4 / 2 * parameter_bytes(), rel=1e-3)


@pytest.mark.parametrize(
    ("stage", "offload", "bytes_per_parameter"),
    [(0, False, 2 + 8), (1, False, 2 + 12 / 4), (3, False, 12 / 4), (1, True, 2 + 12 / 4)],
)
def test_an_asynchronous_save_keeps_a_copy_in_host_memory(
    stage: int, offload: bool, bytes_per_parameter: float
) -> None:
    engine = dataclasses.replace(
        SINGLE,
        zero_stage=stage,
        dp_size=1 if stage == 0 else 4,
        param_bytes=2,
        offload_optimizer=offload,
    )
    run = dataclasses.replace(config(), checkpoint=CheckpointConfig(save="x", async_save=True))
    without = estimate(config(), engine)
    found = estimate(run, engine)
    assert found.device == without.device
    copied = sum(found.host.values()) - sum(without.host.values())
    assert copied == pytest.approx(bytes_per_parameter * parameter_bytes() / 2, rel=1e-3)


LLAMA_70B = ModelConfig(**TABLES["llama_70b"])


def gathered(model: ModelConfig, limits: dict[str, int], **recompute: Any) -> int:
    """Estimated parameters that ZeRO-3 keeps gathered, bf16."""
    zero = SINGLE.zero | limits
    run = dataclasses.replace(config(RecomputeConfig(**recompute)), model=model)
    zero3 = dataclasses.replace(
        SINGLE, zero_stage=3, dp_size=512, param_bytes=2, zero=zero, on_cpu=False
    )
    return estimate(run, zero3).gathered // 2


def test_zero3_gathers_a_few_layers_of_a_large_model() -> None:
    assert model_spec(LLAMA_70B).elements() == pytest.approx(70.6e9, rel=1e-3)
    table = 128_256 * 8192
    fc_in = 8192 * 2 * 28672
    norms = (2 * 80 + 1) * 8192  # below the threshold
    largest = max(table, fc_in)
    expected = 10**9 + 2 * largest + norms
    assert gathered(LLAMA_70B, {}) == expected
    assert expected * 2 / 2**30 < 6
    without_prefetch = {"stage3_prefetch_bucket_size": 0}
    assert gathered(LLAMA_70B, without_prefetch) == expected - 5 * 10**8
    full = {"recompute_granularity": "full"}
    assert gathered(LLAMA_70B, without_prefetch, **full) == expected - 10**9 + 10**9 // 3
    tied = dataclasses.replace(LLAMA_70B, untie_embeddings_and_output_weights=False)
    assert gathered(tied, {}) == expected + table
    unlimited = {"stage3_max_live_parameters": 10**12}
    assert gathered(LLAMA_70B, unlimited) == model_spec(LLAMA_70B).elements()


def test_peak_is_maximum_over_phases() -> None:
    found = MemoryEstimate(
        parts={"loss": {"a": 5}, "start of the backward pass": {"a": 4, "b": 5}, "later": {"b": 7}}
    )
    assert (found.peak, found.peak_phase) == (9, "start of the backward pass")


def test_gradients_exist_during_loss_only_with_accumulation() -> None:
    single = config()
    schedule = dataclasses.replace(single.schedule, global_batch_size=2 * BATCH)
    accumulated = dataclasses.replace(single, schedule=schedule)
    first, second = (estimate(run, SINGLE) for run in (single, accumulated))
    gradients = first.device["gradients"]
    assert second.phases["loss"] - first.phases["loss"] == gradients
    assert first.phases["averaging of the gradients"] == second.phases["averaging of the gradients"]


def test_accelerator_saves_softmax_and_frees_activations() -> None:
    on_cpu = estimate(config(), SINGLE)
    elsewhere = estimate(config(), dataclasses.replace(SINGLE, on_cpu=False))
    assert elsewhere.head > on_cpu.head
    reduced = "averaging of the gradients"
    assert on_cpu.phases[reduced] - elsewhere.phases[reduced] == on_cpu.activations


EXAMPLES = Path(__file__).parents[3] / "docs" / "start" / "choose_a_layout.md"


@pytest.mark.parametrize(
    ("start", "vocabulary", "world_size"),
    [("--num-layers 32", 32000, 8), ("--num-layers 24", 50257, 1)],
)
def test_the_documented_layouts_have_the_documented_memory(
    start: str, vocabulary: int, world_size: int
) -> None:
    page = EXAMPLES.read_text(encoding="utf-8")
    base, after = re.findall(rf"^```\n({start}.*?)```(.*?)^## ", page, re.DOTALL | re.MULTILINE)[0]
    header, *rows = re.findall(r"^\| (.*) \|$", after, re.MULTILINE)
    assert len(rows) >= 3
    tokenizer = f"--tokenizer-type NullTokenizer --vocab-size {vocabulary - 1}"
    common = f"--lr 1 --train-iters 9 --data-path x {tokenizer}"
    for row in rows:
        cells = dict(zip(header.split(" | "), row.split(" | "), strict=True))
        words = f"{common} {base} {cells['flags'].strip('`')}".split()
        config, problems = build_config(words, world_size=world_size, warn=lambda _: None)
        assert not problems
        memory = planned_memory(config, config.parallel.data_parallel_size(world_size), "cuda")
        found = {
            "states": memory.states,
            "activations": memory.activations,
            "host memory": sum(memory.host.values()),
            "peak": memory.peak,
        }
        for name, size in found.items():
            assert cells.get(name, f"{size / 1e9:.1f}") == f"{size / 1e9:.1f}", row
