"""Each optimizer has the states that its declaration names, and loads them as they were."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

from megatron_ds.config import OptimizerConfig
from megatron_ds.config.fields import in_effect
from megatron_ds.config.options.optimizer_specs import (
    ADAM_8_BIT,
    ADAM_STOCHASTIC,
    MOMENT_TYPES,
    SPECS,
    OptimizerSpec,
    State,
)
from megatron_ds.engine.ds_config.generate import build_ds_config
from megatron_ds.engine.optimizers.build import client_optimizer
from megatron_ds.engine.optimizers.matrix_optimizer import MatrixOptimizer
from megatron_ds.engine.optimizers.param_groups import keep_settings_on_load
from tests.optimizers import options_of
from tests.unit.engine.ds_files import merged
from tests.unit.engine.test_muon import attached, stepped

ELEMENTWISE = [spec for spec in SPECS if spec not in (ADAM_8_BIT, ADAM_STOCHASTIC)]
"""Those of torch and of this package; bitsandbytes is not required, and stochastic rounding needs
the elements of flat tensors."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def start() -> nn.Parameter:
    return nn.Parameter(torch.randn(6, 4, generator=torch.Generator().manual_seed(3)))


def build(options: OptimizerConfig, weight: nn.Parameter, *, is_matrix: bool) -> Any:
    """The optimizer of the generated block, with one weight."""
    config = dataclasses.replace(merged("--vocab-size 90").config, optimizer=options)
    block = build_ds_config(config, 1)["optimizer"]
    make = client_optimizer(block)
    if make is None:  # DeepSpeed makes torch's
        params = {key: value for key, value in block["params"].items() if key != "torch_adam"}
        return getattr(torch.optim, block["type"])([weight], **params)
    optimizer = make([{"params": [weight]} | ({"is_matrix": True} if is_matrix else {})])
    return attached(optimizer, weight, (len(weight),), torch.float32) if is_matrix else optimizer


def declared(states: tuple[State, ...], options: OptimizerConfig) -> dict[str, torch.dtype]:
    """The types of the states by name."""
    options = in_effect(options)
    return {
        state.name: DTYPES["fp32" if state.dtype is None else getattr(options, state.dtype)]
        for state in states
        if state.only_with is None or getattr(options, state.only_with)
    }


CASES = [
    pytest.param(spec, dtype, is_matrix, id=f"{spec.checkpoint_name}-{dtype}-{is_matrix}")
    for spec in ELEMENTWISE
    for dtype in ("fp32", "bf16")
    for is_matrix in (False, True)
    if spec.matrices is not None or not is_matrix
]


@pytest.mark.parametrize(("spec", "dtype", "is_matrix"), CASES)
def test_states_are_those_declared_and_are_loaded_bit_for_bit(
    spec: OptimizerSpec, dtype: str, is_matrix: bool
) -> None:
    """Claim (precision): states of an optimizer have the types that its options name, and continue
    bit for bit, for weights that are updated as matrices, too"""
    options = options_of(spec, **dict.fromkeys(MOMENT_TYPES, dtype))
    optimizer = build(options, start(), is_matrix=is_matrix)
    assert isinstance(optimizer, MatrixOptimizer) == (spec.matrices is not None)
    weight = stepped(optimizer)
    resumed = build(options, nn.Parameter(weight.clone()), is_matrix=is_matrix)
    keep_settings_on_load(resumed)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    matrices = spec.matrices.states if spec.matrices and is_matrix else spec.states
    for one in (optimizer, resumed):
        (state,) = one.state.values() or ({},)
        found = {
            name: tensor.dtype
            for name, tensor in state.items()
            if name != "step" and isinstance(tensor, torch.Tensor)
        }
        assert found == declared(matrices, options)
    assert torch.equal(stepped(optimizer), stepped(resumed))


def test_names_of_the_classes_are_those_declared() -> None:
    for spec in ELEMENTWISE:
        bf16 = dict.fromkeys(MOMENT_TYPES, "bf16")  # Adam's kernels are several classes
        optimizer = build(options_of(spec, **bf16), start(), is_matrix=False)
        assert type(optimizer).__name__ == spec.title
