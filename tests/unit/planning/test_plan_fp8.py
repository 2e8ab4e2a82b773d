"""Plans of runs with linear layers in fp8."""

from __future__ import annotations

import dataclasses
import shlex

import pytest

from megatron_ds.cli import arguments
from megatron_ds.planning import command as tool
from megatron_ds.planning.hardware import HARDWARE, Hardware
from megatron_ds.planning.plan import Plan, make_plan

MODEL = (
    "--num-layers 4 --hidden-size 2048 --num-attention-heads 16 --seq-length 2048 "
    "--micro-batch-size 4 --global-batch-size 16 --tokenizer-type NullTokenizer --vocab-size 255 "
    "--lr 1e-4 --train-iters 2 --data-path unused --bf16"
)
FP8 = "--fp8-format hybrid --fp8-recipe rowwise"
MATRICES = 4 * 12 * 2048**2
"""Elements of the matrices of the layers."""
H200 = dataclasses.replace(HARDWARE["h200"], kernels=1e-9)


def planned(flags: str = "", ranks: int = 1, hardware: Hardware = H200) -> Plan:
    config = arguments.parse(
        shlex.split(f"{MODEL} {flags}"),
        world_size=ranks,
        complete=tool.complete,
        program="plan.py",
    )
    return make_plan(config.with_vocab(256), ranks, hardware)


def test_products_have_the_rate_of_fp8_and_casts_that_of_the_memory() -> None:
    tokens = 16 * 2048
    saved = 6 * tokens * MATRICES / (0.72 * 1e12) * (1 / 989 - 1 / 1979)
    features = 4 * (2048 + 6144 + 2 * 2048 + 2 * (2048 + 8192))
    casts = 10 * (tokens * features + MATRICES) / 4800e9
    plain = planned()
    rounded = planned(FP8)
    assert plain.compute - rounded.compute == pytest.approx(saved - casts, rel=1e-6)
    assert rounded.flops == plain.flops


def test_layers_in_bf16_are_planned_as_such() -> None:
    half = planned(f"{FP8} --first-last-layers-bf16").compute
    assert half == pytest.approx((planned().compute + planned(FP8).compute) / 2)
    small = planned(f"{FP8} --fp8-min-features 1025")  # of the projection of attention's output
    assert planned(FP8).compute < small.compute < planned().compute


def test_tokens_are_multiplied_by_the_experts_that_they_use() -> None:
    experts = "--num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 4096"
    some, more = (
        planned(f"{experts} {flags}").compute - planned(f"{experts} {flags} {FP8}").compute
        for flags in ("", "--moe-router-topk 4")
    )
    assert 0 < some < more
    weights = planned(f"{experts} {FP8}").memory.parts["loss"]["weights in fp8"]
    assert weights == 2 * 4 * (4 * 2048**2 + 8 * 2 * 2048 * 4096)


def test_devices_without_fp8_are_as_fast_as_with_bf16() -> None:
    a100 = dataclasses.replace(HARDWARE["a100"], kernels=1e-9)
    assert planned(FP8, hardware=a100).compute == planned(hardware=a100).compute


def test_rounded_weights_are_kept_twice_during_the_passes_of_a_step() -> None:
    for flags, ranks, elements in (
        ("", 1, MATRICES),
        ("--tensor-model-parallel-size 2", 2, MATRICES // 2),
        ("--pipeline-model-parallel-size 2", 2, MATRICES // 2),
        ("--zero-stage 3", 1, 0),
    ):
        plain = planned(flags, ranks).memory.phases
        phases = planned(f"{flags} {FP8}", ranks).memory.phases
        more = {name: phases[name] - plain[name] for name in plain}
        assert more.pop("averaging of the gradients") == 0
        assert set(more.values()) == {2 * elements}, flags


def test_a_given_peak_keeps_the_ratio_of_fp8() -> None:
    device = tool.Options(world_size=1, hardware="h200", peak_tflops=494.5).device
    assert device.tflops_8 / device.tflops_16 == pytest.approx(1979 / 989)
