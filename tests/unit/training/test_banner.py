"""The banner: contents, width, and plain text in logs; the name of the attention kernel."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
import torch

from megatron_ds.cli.flags import training_flags
from megatron_ds.config import CheckpointConfig, Config, ScheduleConfig
from megatron_ds.engine.settings import EngineSettings, LossScaleSettings
from megatron_ds.launch.ranks.distributed import ProcessContext
from megatron_ds.model.attention.backends import AttentionOptions
from megatron_ds.model.attention.cores import FIXED_SIZES
from megatron_ds.model.attention.packed import FlexKernel, PackingOptions
from megatron_ds.model.declaration.architecture import is_matrix, model_spec, run_spec
from megatron_ds.model.stages import stage_slices
from megatron_ds.parallel.mesh import Group, Mesh
from megatron_ds.planning.memory_estimate import estimate
from megatron_ds.planning.memory_inputs import MemoryInputs, OptimizerBytes
from megatron_ds.schedules import total_iterations
from megatron_ds.train_state import TrainState
from megatron_ds.training.start.banner import BannerData, banner
from megatron_ds.training.start.startup_report import StartReport, describe_kernel
from tests.tables import tables
from tests.unit.model.dense import computed_by, dense_flex

TABLES = tables(__file__, tuple)

CONFIG = Config().with_values(TABLES["config"])
SETTINGS = EngineSettings(
    betas=(0.9, 0.999),
    epsilon=(1e-8,),
    momentum=None,
    zero_stage=3,
    dp_size=4,
    accumulation_steps=8,
    optimizer="DeepSpeedCPUAdam",
    weight_decay=(0.1, 0.0),
    clip_grad=1.0,
    param_dtype="float16",
    accumulation_dtype="float32",
    reduction_dtype="bfloat16",
    master_dtype="float64",
    optimizer_offload="cpu",
    param_offload="nvme",
    loss_scale=LossScaleSettings(65536, 1000, 2),
)
LIMITS = (
    "reduce_bucket_size",
    "stage3_max_live_parameters",
    "stage3_max_reuse_distance",
    "stage3_prefetch_bucket_size",
    "stage3_param_persistence_threshold",
)
ENGINE = MemoryInputs(
    zero_stage=3,
    tp_size=2,
    dp_size=4,
    param_bytes=2,
    accumulation_bytes=4,
    reduction_bytes=2,
    optimizer=OptimizerBytes(2, 8.0),
    zero=dict.fromkeys(LIMITS, 500_000_000),
    offload_optimizer=True,
)
GROUPS = {
    **dict.fromkeys(("tp", "model", "same_batch", "ep_tp"), Group((0, 1), 0, None)),
    **dict.fromkeys(("dp", "expert_dp", "replicas"), Group((0, 2, 4, 6), 0, None)),
    **dict.fromkeys(
        ("pp", "cp", "ulysses", "sequence", "heads", "chunks", "ep", "embedding", "p2p"),
        Group((0,), 0, None),
    ),
}
FACTS = BannerData(
    config=CONFIG,
    mesh=Mesh(world_size=8, rank=0, **GROUPS),
    settings=SETTINGS,
    estimate=estimate(CONFIG, ENGINE),
    state=TrainState(iteration=4000),
    versions="DeepSpeed 0.19.8, torch 2.13.0, Python 3.11.7",
    device="cpu (gloo)",
    threads=4,
    attention="torch's scaled_dot_product_attention per document: flash",
    compiled="24 layers, loss by torch.compile",
    ops=("cpu_adam", "deepspeed_shm_comm"),
)


def words(config: Config = CONFIG, **changes: Any) -> str:
    """The banner of other facts, with single spaces."""
    return " ".join(banner(dataclasses.replace(FACTS, config=config, **changes)).split())


def test_banner_of_a_complete_run_names_no_iterations_to_come() -> None:
    schedule = ScheduleConfig(micro_batch_size=8, global_batch_size=256, train_iters=3000)
    checkpoint = CheckpointConfig(save="folder")
    text = words(dataclasses.replace(CONFIG, schedule=schedule, checkpoint=checkpoint))
    assert "complete: the checkpoint has 4,000 of 3,000 iterations" in text
    assert "iterations 4,001" not in text
    assert "checkpoint at the end, to folder" in text


def test_printed_arguments_are_flags(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    context = ProcessContext(0, 1, torch.device("cpu"), "gloo", {})
    config = CONFIG.with_values({"print_arguments": True})
    StartReport(config, context, Mesh.single()).print_arguments()
    shown = re.findall(r"^  (\w+) \.+ ", capsys.readouterr().out, flags=re.MULTILINE)
    fields = {flag.field for group in training_flags().shown for flag in group.flags}
    assert set(shown) <= fields
    assert len(shown) > 100


def test_banner_counts_the_samples_of_full_batches_only() -> None:
    schedule = ScheduleConfig(micro_batch_size=8, global_batch_size=256, train_samples=10_000)
    config = dataclasses.replace(CONFIG, schedule=schedule)
    assert "9,984 samples" in words(config, state=TrainState())


def test_banner_shows_the_layers_and_parameters_of_each_stage() -> None:
    sizes = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}
    stages = Group((0, 4), 0, None)
    mesh = dataclasses.replace(FACTS.mesh, pp=stages, dp=Group((0, 2), 0, None))
    config = CONFIG.with_values({**sizes, "pp_partition_method": "10,14"})
    text = words(config, mesh=mesh)
    assert "tensor parallel 2 x pipeline parallel 2 x data parallel 2" in text
    assert "0 4 (pipeline parallel)" in text
    spec = model_spec(config.model, tp_size=2)
    first, last = (spec.elements(spec.layers[part]) for part in stage_slices(spec, (10, 14)))
    assert f"stages 0: embedding, layers 0 to 9; {first:,} parameters" in text
    assert f"1: layers 10 to 23, final norm, output layer; {last:,} parameters" in text

    folded = {"pipeline_schedule": "dualpipev", "pp_partition_method": "6,5,1,12"}
    text = words(config.with_values(folded), mesh=mesh)
    assert "stages 0 (pipeline rank 0): embedding, layers 0 to 5;" in text
    assert "2 (pipeline rank 1): layer 11;" in text
    assert "3 (pipeline rank 0): layers 12 to 23, final norm, output layer;" in text


@pytest.mark.parametrize("width", [80, 100, 200])
def test_the_longest_banner_fits_on_a_screen(width: int) -> None:
    lines = banner(FACTS, width=width).splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= min(width, 100)


def test_banner_shows_every_engine_setting() -> None:
    text = words()
    for field, value in dataclasses.asdict(SETTINGS).items():
        values = tuple(value.values()) if isinstance(value, dict) else value
        for one in values if isinstance(values, tuple) else (values,):
            if one is None:
                continue
            shown = f"{one:g}" if isinstance(one, float) else str(one)
            assert re.search(rf"(?<![\w.]){re.escape(shown)}(?![\w.])", text), field
    for shown in ("0.1 or 0", "betas 0.9 0.999", "24 layers, loss by torch.compile"):
        assert shown in text
    assert "full, every 2 layers, by DeepSpeed, partition activations" in text


def test_banner_counts_the_parameters_that_muon_updates() -> None:
    muon = dataclasses.replace(SETTINGS, optimizer="Muon", momentum=0.95, matrices=96)
    muon = dataclasses.replace(muon, moment_dtypes=("bfloat16", "float32"))
    options = {"optimizer": "muon", "normuon": True, "cautious_weight_decay": True}
    text = words(CONFIG.with_values(options), settings=muon)
    assert "Muon, momentum 0.95, on 96 matrices (" in text
    assert "simple coefficients, second moments of neurons; AdamW" in text
    assert "cautious weight decay 0.1" in text
    assert "master weights float64, moments bfloat16 and float32" in text
    soap = dataclasses.replace(SETTINGS, optimizer="SOAP", matrices=96)
    found = words(CONFIG.with_values({"optimizer": "soap"}), settings=soap)
    assert "SOAP, on 96 matrices (" in found
    assert "eigenbases every 10 steps, Shampoo beta 0.95; AdamW on" in found
    spec = run_spec(CONFIG)
    tensors = spec.sizes()
    matrices = spec.sizes(keep=is_matrix)
    assert matrices.total() == 96
    others = tensors - matrices
    elements = sum(size * count for size, count in others.items())
    assert f"AdamW on {others.total()} other parameters ({elements:,} elements), betas" in text


def test_banner_shows_the_groups_of_parameters_by_name() -> None:
    groups = ("pattern=layers.*.mlp.*,lr=0.1x,wd=0.2", "pattern=final_norm.*,lr=3e-3")
    text = words(CONFIG.with_values({"param_group": groups}))
    mlp = sum(
        weight.size(2)
        for name, weight in model_spec(CONFIG.model, tp_size=2).weights().items()
        if ".mlp." in name
    )
    rates = "per model-parallel rank, learning rate"
    assert f"layers.*.mlp.*: {mlp:,} parameters {rates} 3e-05 (0.1x), weight decay 0.2" in text
    assert f"final_norm.*: 2,048 parameters {rates} 0.003 (10x), weight decay 0" in text
    assert "all other weights:" in text


def test_banner_of_lion_has_no_epsilon() -> None:
    lion = dataclasses.replace(SETTINGS, optimizer="Lion", betas=(0.9, 0.99), epsilon=None)
    assert "Lion, betas 0.9 0.99, learning rate" in words(settings=lion)


def test_banner_shows_layout_and_memory() -> None:
    text = words()
    assert "8 on cpu (gloo) = tensor parallel 2 x data parallel 4" in text
    assert "256 samples = micro-batch 8 x data parallel 4 x accumulation 8" in text
    assert "of rank 0: 0 1 (tensor parallel); 0 2 4 6 (data parallel)" in text
    assert f"iterations 4,001 to {total_iterations(CONFIG, 4, FACTS.state):,}; " in text
    assert "scaled_dot_product_attention per document: flash" in text
    assert "cpu_adam, deepspeed_shm_comm" in text
    for kind, size in (*FACTS.estimate.device.items(), *FACTS.estimate.host.items()):
        assert f"{kind} {size / 2**20:,.1f}" in text
    assert f"{FACTS.estimate.peak / 2**20:,.1f} MiB per process" in text


def test_banner_shows_where_experts_are() -> None:
    experts = Group((0, 2), 0, None)
    mesh = dataclasses.replace(FACTS.mesh, ep=experts)
    text = words(CONFIG.with_values({"num_experts": (4,)}), mesh=mesh)
    assert "data parallel 4 (expert parallel 2 x expert data parallel 2)" in text
    assert "parameters per rank, with its experts; vocabulary" in text


def test_memory_that_is_all_on_disk_is_a_sum_of_nothing() -> None:
    nothing = dataclasses.replace(FACTS.estimate, device={})
    assert "memory states 0.0 MiB temporary" in words(estimate=nothing)


def test_banner_shows_sequence_parallelism() -> None:
    parallel = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    text = words(CONFIG.with_values(parallel))
    assert "tensor parallel 2 (with sequence parallelism) x data parallel 4" in text
    mesh = dataclasses.replace(FACTS.mesh, cp=Group((0, 2, 4, 6), 0, None))
    config = CONFIG.with_values({"context_parallel_size": 4, "cp_comm_type": ("p2p", "all_gather")})
    assert "context parallel 4 (p2p and all_gather)" in words(config, mesh=mesh)


def test_headings_are_bold_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b" not in banner(FACTS)
    coloured = banner(FACTS, terminal=True)
    assert "\x1b[1m" in coloured
    assert re.sub(r"\x1b\[[\d;]*m", "", coloured).split() == banner(FACTS).split()


def test_banner_shows_that_nothing_is_saved() -> None:
    assert "no checkpoints (no --save)" in words(CONFIG.with_values({"save": None}))


def test_kernel_is_described() -> None:
    config = dataclasses.replace(CONFIG.model, seq_length=8)
    cpu = torch.device("cpu")

    def describe(packing: PackingOptions | None, kernel: Any = None) -> str:
        attention = dataclasses.replace(computed_by(kernel, config), packing=packing)
        return describe_kernel(config, 2, 1, torch.float32, cpu, attention)

    assert describe(None) == describe(PackingOptions(True, False))
    assert "scaled_dot_product_attention: " in describe(None)
    assert "per document" in describe(PackingOptions(False, True))
    long = dataclasses.replace(config, seq_length=2**20, position_embedding_type="alibi")
    # Asking torch allocates none of the tensors, of which the bias alone would be terabytes.
    assert "scaled" in describe_kernel(long, 2, 1, torch.float32, cpu)
    assert "flex_attention" in describe(PackingOptions(False, True), FlexKernel(dense_flex))


def test_the_order_of_kernels_is_shown() -> None:
    config = dataclasses.replace(CONFIG.model, seq_length=8)

    def describe(device: str, packing: PackingOptions | None, kernel: Any = None) -> str:
        kernels = computed_by(kernel, alibi).kernels
        where = torch.device(device)
        attention = AttentionOptions(FIXED_SIZES, kernels=kernels, packing=packing)
        shape = config if kernel is None else alibi
        return describe_kernel(shape, 2, 1, torch.bfloat16, where, attention)

    alibi = dataclasses.replace(config, position_embedding_type="alibi")
    order = "(first of cudnn, flash, efficient, math, overrideable)"
    per_document = PackingOptions(False, True)
    assert order in describe("meta", None)
    assert order.replace("cudnn, ", "") in describe("meta", per_document)
    assert "first of" not in describe("cpu", None)
    kernel = FlexKernel(dense_flex)
    assert "flex_attention with ALiBi" in describe("meta", None, kernel)
    assert "flex_attention within documents" in describe("meta", per_document, kernel)
    windows = dataclasses.replace(config, window_size="3,0")
    meta = torch.device("meta")
    attention = computed_by(kernel, windows)
    shown = describe_kernel(windows, 2, 1, torch.bfloat16, meta, attention)
    assert shown == "torch's flex_attention with windows"
