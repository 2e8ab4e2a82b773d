"""AdamW with moments of other types than the weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.adamw import adamw

CHUNK = 2**24
"""Elements that are updated at once, which bounds the temporary memory: 64 MiB a tensor."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def state_types(**names: str) -> dict[str, torch.dtype]:
    """The types of the states that are not in fp32, by their names."""
    return {name: DTYPES[dtype] for name, dtype in names.items() if dtype != "fp32"}


def keep_state_types(optimizer: Optimizer, types: dict[str, torch.dtype]) -> None:
    """Make loaded states have their types; torch converts them to the weights' type."""

    def convert(optimizer: Optimizer) -> None:
        for state in optimizer.state.values():
            state |= {name: state[name].to(types[name]) for name in types.keys() & state.keys()}

    optimizer.register_load_state_dict_post_hook(convert)


class AdamW(torch.optim.AdamW):
    """Torch's AdamW. Moments in bf16 are rounded after each step, which computes in fp32.

    Args:
        params: Parameter groups.
        exp_avg_dtype: Type of the first moment, "fp32" or "bf16".
        exp_avg_sq_dtype: Type of the second moment.
        settings: Arguments of torch's AdamW.
    """

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        *,
        exp_avg_dtype: str = "fp32",
        exp_avg_sq_dtype: str = "fp32",
        **settings: Any,
    ) -> None:
        super().__init__(params, **settings)
        self.state_types = state_types(exp_avg=exp_avg_dtype, exp_avg_sq=exp_avg_sq_dtype)
        keep_state_types(self, self.state_types)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        if not self.state_types:
            super().step()
            return
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step_parameter(parameter, group)

    def _step_parameter(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            device = parameter.device if group["fused"] else None
            state["step"] = torch.zeros((), dtype=torch.float32, device=device)
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = torch.zeros_like(parameter, dtype=self.state_types.get(name))
        assert parameter.grad is not None
        tensors = (parameter, parameter.grad, state["exp_avg"], state["exp_avg_sq"])
        flat = [tensor.view(-1).split(CHUNK) for tensor in tensors]
        for weights, gradient, *moments in zip(*flat, strict=True):
            first, second = (moment.float() for moment in moments)
            adamw(
                [weights],
                [gradient],
                [first],
                [second],
                [],
                [state["step"].clone()],
                foreach=False,
                fused=bool(group["fused"]),
                amsgrad=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )
            for moment, value in zip(moments, (first, second), strict=True):
                moment.copy_(value)  # without an effect if they are one tensor
        state["step"] += 1
