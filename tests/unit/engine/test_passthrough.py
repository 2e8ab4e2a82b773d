"""Keys that are passed on without a test: with which settings, and on which devices."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import deepspeed.accelerator
import pytest
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from deepspeed.compile import util
from deepspeed.runtime.superoffload import superoffload_stage3

from megatron_ds.config import support_matrix
from megatron_ds.config.deepspeed_file import get
from megatron_ds.engine.ds_config import passthrough
from megatron_ds.engine.ds_config.generate import build_ds_config
from megatron_ds.engine.ds_config.passthrough import (
    CORES,
    DEEPCOMPILE,
    PASSED,
    SUPER_OFFLOAD,
    PassedKey,
    unsupported_reason,
)
from tests.problems import codes
from tests.unit.engine.ds_files import Merge
from tests.unit.engine.passed_key_files import KEYS


@pytest.mark.parametrize("one", PASSED, ids=lambda one: one.key)
def test_key_reaches_deepspeed(one: PassedKey, merge: Merge) -> None:
    config, problems, warnings = merge(*KEYS[one.key])
    generated = build_ds_config(config, 2, "xpu")

    assert (problems, warnings) == ([], [])
    assert passthrough.find(config) == [one]
    assert get(generated, one.key) is True
    if one.key == SUPER_OFFLOAD:
        assert get(generated, CORES) == 0.5
    if one.key == DEEPCOMPILE:
        assert generated["compile"] == {"deepcompile": True, "double_buffer": False}


@pytest.mark.parametrize("one", PASSED, ids=lambda one: one.key)
def test_key_is_passed_on_with_the_values_of_its_row_only(one: PassedKey, merge: Merge) -> None:
    values, flags = KEYS[one.key]
    layout = support_matrix.layout_of(merge(values, flags).config)
    for name, axis in support_matrix.AXES.items():
        for value in axis.values:
            part = layout | {name: value}
            is_row = value in one.values.get(name, (axis.default,))
            assert (one.excluded(part) == {}) == is_row
    # Axes whose flags do not contradict the file's keys.
    for name in ("tp", "sequence", "pp", "sp", "experts", "mlp", "optimizer"):
        for value in support_matrix.AXES[name].values:
            flags = f"{KEYS[one.key][1]} {support_matrix.AXES[name].values[value]}"
            config, problems, _ = merge(values, flags)
            is_row = not one.excluded(support_matrix.layout_of(config))
            assert ("passed-key-with-layout" in codes(problems)) != is_row


def test_settings_that_a_key_ignores_are_rejected(merge: Merge) -> None:
    def found(key: str, flags: str) -> list[str]:
        values, own = KEYS[key]
        return codes(merge(values, f"{own} {flags}").problems)

    assert found(DEEPCOMPILE, "--compile") == ["deepcompile-with-compile"]
    for folder in ("--save x", "--load x"):
        assert found(SUPER_OFFLOAD, folder) == ["super-offload-with-checkpoints"]
    schedule = "--start-weight-decay 0 --end-weight-decay 0.1 --weight-decay-incr-style linear"
    assert found(SUPER_OFFLOAD, schedule) == ["super-offload-with-weight-decay-schedule"]
    offload = {"device": "cpu", "super_offload": True, "cpuadam_cores_perc": 0}
    file = {"zero_optimization": {"stage": 3, "offload_optimizer": offload}}
    assert codes(merge(file, "--bf16").problems) == ["ds-value-invalid"]


@pytest.mark.parametrize(
    "file",
    [
        {"zero_optimization": {"stage": 2, "zero_quantized_weights": True}},
        {"zero_optimization": {"stage": 3, "zero_quantized_nontrainable_weights": True}},
        {"zero_optimization": {"offload_optimizer": {"device": "cpu", "cpuadam_cores_perc": 1}}},
        {"compile": {"deepcompile": False, "double_buffer": True}},
    ],
)
def test_keys_without_effect_are_a_warning(file: dict[str, Any], merge: Merge) -> None:
    config, problems, warnings = merge(file)
    assert (problems, passthrough.find(config)) == ([], [])
    assert codes(warnings) in (["ds-keys-ineffective"], ["ds-key-dropped"])


@pytest.mark.parametrize("one", PASSED, ids=lambda one: one.key)
def test_cpu_supports_no_key(one: PassedKey, monkeypatch: pytest.MonkeyPatch) -> None:
    use(CPU_Accelerator(), monkeypatch)
    assert unsupported_reason(one)


@pytest.mark.parametrize("one", PASSED, ids=lambda one: one.key)
def test_accelerator_supports_a_key_if_deepspeed_says_so(
    one: PassedKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    supporting = {"device_name": lambda: "cuda"}
    other = {"device_name": lambda: "xpu"}
    there = Mock()
    broken = Mock(NAME="op")
    there.is_compatible.return_value = True
    broken.is_compatible.return_value = False
    is_any = "quantized" in one.key  # what DeepSpeed asks the operation for, and not the device
    for names, builder in itertools.product((supporting, other), (there, broken, None)):
        fake = SimpleNamespace(**names, create_op_builder=lambda _, found=builder: found)
        use(fake, monkeypatch)
        is_supported = builder is there and (is_any or names is supporting)
        assert (unsupported_reason(one) is None) == is_supported


def use(accelerator: object, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (deepspeed.accelerator, util, superoffload_stage3):
        monkeypatch.setattr(module, "get_accelerator", lambda: accelerator)
