"""The experts of OLMo-core: its tensors, whose first two dimensions are one, and its losses.

    feed_forward_moe.router.weight          [E x H]
    feed_forward_moe.experts.mlp.w1, w3     [E x F, H]
    feed_forward_moe.experts.mlp.w2         [E x F, H], each expert's transposed

Facts: ai2-olmo-core 3.0.0, `olmo_core/nn/moe`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from megatron_ds.conversion.huggingface.config_rows import Fields
from megatron_ds.conversion.model_settings import ModelSettings
from megatron_ds.conversion.trainers.layout import matrices
from megatron_ds.conversion.trainers.olmo_core_settings import blocks_of, object_of
from megatron_ds.engine.states.state_reader import TensorReader, TensorReaders

EXPERTS = "feed_forward_moe"
BALANCED = {"local_batch": "aux_loss", "instance": "seq_aux_loss"}
"""Types of the load-balancing loss."""


class StepsOfExperts(NamedTuple):
    """What a run states of the steps of its experts."""

    options: Fields
    """Options of the losses and of the bias of the selection."""
    lacking: str = ""
    """Why they cannot be had here; empty if they can."""


def steps_of_experts(model: Mapping[str, Any]) -> StepsOfExperts:
    """The options of the steps of a model's experts.

    Args:
        model: The settings "model" of a run.

    Raises:
        KeyError, TypeError, ValueError: If they are malformed.
    """
    layers = model["n_layers"]
    experts = [block[EXPERTS] for block in blocks_of(model) if block.get(EXPERTS) is not None]
    steps = [_steps_of_layer(object_of(values), layers) for values in experts]
    if any(others != steps[0] for others in steps):
        return StepsOfExperts({}, "the losses of its layers differ")
    return steps[0]


def _steps_of_layer(values: Mapping[str, Any], layers: int) -> StepsOfExperts:
    """The same of one layer. What the files of a run do not have is None there, not a default."""
    router = object_of(values.get("router") or {})
    balance = float(values.get("lb_loss_weight") or 0.0)
    rate = router.get("bias_gamma")
    if router.get("jitter_eps"):
        return StepsOfExperts({}, "its routers have random noise, which is another one here")
    if balance and rate is not None:
        reason = "its load-balancing loss counts the experts that the bias selects"
        return StepsOfExperts({}, reason)
    parts = layers if values.get("scale_loss_by_num_layers", True) else 1
    options: Fields = {
        "moe_aux_loss_coeff": balance / parts,
        "moe_z_loss_coeff": float(values.get("z_loss_weight") or 0.0) / parts,
    }
    if balance:
        granularity = values.get("lb_loss_granularity", "local_batch")
        options["moe_router_load_balancing_type"] = BALANCED[granularity]
    if rate is not None:
        options["moe_router_bias_update_rate"] = float(rate)
    return StepsOfExperts(options)


def expert_matrices(theirs: TensorReaders, settings: ModelSettings) -> dict[str, TensorReader]:
    """The tensors of a model, with those of experts as a matrix for each expert."""
    model = settings.model
    width = settings.moe.width(model)
    shaped = dict(theirs)
    for name, tensor in theirs.items():
        module = name.partition(f".{EXPERTS}.")[2]
        if not tensor.shape:  # the steps of a weight
            continue
        if module == "router.weight":
            shaped[name] = matrices(tensor, model.hidden_size)
        elif module.startswith("experts.mlp."):
            shaped[name] = matrices(tensor, width, is_transposed=module.endswith("w2"))
    return shaped


def joined_experts(theirs: TensorReaders) -> dict[str, TensorReader]:
    """The tensors of a model, with the matrices of experts as one: undoes `expert_matrices`."""
    joined = dict(theirs)
    for name, tensor in theirs.items():
        module = name.partition(f".{EXPERTS}.")[2]
        if module == "router.weight":
            shape: tuple[int, ...] = (tensor.numel,)
        elif module.endswith("w2"):
            shape = (tensor.shape[0] * tensor.shape[2], tensor.shape[1])
        elif module.startswith("experts.mlp."):
            shape = (tensor.shape[0] * tensor.shape[1], tensor.shape[2])
        else:
            continue
        load = functools.partial(_flat, tensor, shape, module.endswith("w2"))
        joined[name] = TensorReader.full(shape, tensor.dtype, load)
    return joined


def _flat(tensor: TensorReader, shape: tuple[int, ...], is_transposed: bool) -> Tensor:
    value = tensor.read()
    return (value.transpose(1, 2) if is_transposed else value).reshape(shape)
