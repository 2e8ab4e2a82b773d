"""Parameter groups: the parameters that have the same factors of learning rate and weight decay."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from megatron_ds.engine.states.threaded_copy import copy_tensors
from megatron_ds.model.declaration.rates import (
    MultiplierRule,
    Multipliers,
    decay_matrices_only,
)
from megatron_ds.parallel.sharding import declaration, expert_group


def parameter_groups(
    model: nn.Module,
    weight_decay: float,
    rule: MultiplierRule = decay_matrices_only,
    eps: float | None = None,
) -> tuple[list[dict[str, Any]], tuple[Multipliers, ...]]:
    """Group the parameters of a model by their factors, experts of other ranks' apart.

    Args:
        model: The model.
        weight_decay: --weight-decay.
        rule: Gives the factors of each parameter.
        eps: --adam-eps. None: the optimizer has none.

    Returns:
        The groups for the optimizer, in the order in which the model has them, and the factors of
        each group.
    """
    groups: dict[tuple[Multipliers, str | None], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        factors = rule(declaration(name, parameter))
        groups.setdefault((factors, expert_group(parameter)), []).append(parameter)
    optimizer_groups = []
    for (factors, experts), params in groups.items():
        group = {"params": params, "weight_decay": weight_decay * factors.weight_decay}
        if factors.is_matrix:
            group["is_matrix"] = True
        if eps is not None and factors.eps != 1.0:
            group["eps"] = eps * factors.eps
        if experts is not None:
            # DeepSpeed partitions these over the ranks that have the same experts.
            group |= {"name": experts, "moe": True}
        optimizer_groups.append(group)
    return optimizer_groups, tuple(factors for factors, _ in groups)


def set_lr_and_weight_decay(
    groups: list[dict[str, Any]],
    multipliers: Sequence[Multipliers],
    lr: float,
    weight_decay: float,
    decoupled_lr: float | None = None,
) -> None:
    """Set the learning rate and the weight decay of the next step.

    Args:
        groups: `param_groups` of an optimizer.
        multipliers: Factors of each group.
        lr: Learning rate of the schedule.
        weight_decay: Weight decay of the schedule.
        decoupled_lr: Learning rate of the decoupled groups' schedule; None: `lr`.
    """
    decoupled_lr = lr if decoupled_lr is None else decoupled_lr
    for group, factors in zip(groups, multipliers, strict=True):
        group["lr"] = (decoupled_lr if factors.is_decoupled else lr) * factors.lr
        group["weight_decay"] = weight_decay * factors.weight_decay


def keep_settings_on_load(optimizer: Optimizer) -> None:
    """Make the optimizer take states from a checkpoint, but none of its settings.

    `load_state_dict` replaces the parameter groups by saved ones: betas, epsilon and momentum of
    the run that saved them, and without the keys that only another optimizer class has.
    """
    optimizer.register_load_state_dict_pre_hook(with_own_settings)


@contextmanager
def reused_states(optimizer: Optimizer) -> Iterator[None]:
    """Within it, the optimizer copies loaded states into the memory of its current states.

    `load_state_dict` keeps the tensors that it is given. These may be mapped from a file, whose
    pages the next step would copy one by one; and until the old states are freed, both need memory.
    """
    before: dict[Tensor, dict[str, Any]] = {}

    def remember(optimizer: Optimizer, saved: Any) -> None:
        before.update({parameter: dict(state) for parameter, state in optimizer.state.items()})

    def copy(optimizer: Optimizer) -> None:
        pairs = []
        for parameter, state in optimizer.state.items():
            for key, new in state.items():
                if not isinstance(new, Tensor):
                    continue
                old = before.get(parameter, {}).get(key)
                state[key] = old if _is_alike(old, new) else torch.empty_like(new)
                pairs.append((state[key], new))
        before.clear()
        copy_tensors(pairs)

    hooks = (
        optimizer.register_load_state_dict_pre_hook(remember),
        optimizer.register_load_state_dict_post_hook(copy),
    )
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _is_alike(old: object, new: Tensor) -> bool:
    """Whether a state has the shape and type of a new one, and the same device."""
    return (
        isinstance(old, Tensor)
        and (old.shape, old.dtype, old.device) == (new.shape, new.dtype, new.device)
        and old.stride() == new.stride()
    )


def with_own_settings(optimizer: Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
    """A saved state dict with the optimizer's own settings.

    The number of steps is a tensor in each parameter's state for torch's optimizers, an integer
    there for DeepSpeed's, and an integer in the group for NVIDIA's.
    """
    library = type(optimizer).__module__.partition(".")[0]
    if isinstance(optimizer, AdamW):  # and the optimizers of matrices
        library = "torch"
    states = {index: dict(state) for index, state in saved["state"].items()}
    groups = []
    for current, group in zip(optimizer.param_groups, saved["param_groups"], strict=True):
        settings = {key: value for key, value in current.items() if key not in ("params", "step")}
        mine = [states[index] for index in group["params"] if index in states]
        steps = [int(state.get("step", group.get("step", 0))) for state in mine]
        if "step" in group or any("step" in state for state in mine):
            for state, step in zip(mine, steps, strict=True):
                state["step"] = float(step) if library == "torch" else step
            if library == "deepspeed" and "step" in group:
                settings["step"] = group["step"]
            elif library not in ("torch", "deepspeed"):
                settings["step"] = max(steps, default=0)
        groups.append({**settings, "params": group["params"]})
    return {"state": states, "param_groups": groups}
