"""Makes the optimizers that DeepSpeed cannot make from its configuration."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from megatron_ds.config.problems import user_error
from megatron_ds.engine.optimizers.adam_kernels import apex_adam
from megatron_ds.engine.optimizers.distributed_matrices import find_matrices
from megatron_ds.engine.optimizers.matrix_optimizer import MatrixOptimizer
from megatron_ds.engine.optimizers.param_groups import with_own_settings
from megatron_ds.engine.optimizers.rounding import blocks_of
from megatron_ds.engine.optimizers.stochasticadamw import StochasticAdamW, Update
from megatron_ds.engine.states.flats import own_flats
from megatron_ds.parallel.mesh import Mesh

OWN = "megatron_ds"
"""First part of the types of this package's optimizers."""


def client_optimizer(block: Mapping[str, Any]) -> Callable[..., Any] | None:
    """Makes the optimizer of parameter groups; None if DeepSpeed makes it.

    Args:
        block: `optimizer` of the generated DeepSpeed configuration.

    Raises:
        UserError: If it was requested and is not installed.
    """
    package, _, name = block["type"].rpartition(".")
    if package == OWN:
        module = importlib.import_module(f"megatron_ds.engine.optimizers.{name.lower()}")
        return partial(getattr(module, name), **block["params"])
    if block["type"] == "bitsandbytes.AdamW8bit":
        return partial(_adam_with_8_bit_moments(), **block["params"])
    if block["type"] != "ApexFusedAdam":
        return None
    adam: Callable[..., Any] | None = apex_adam()
    if adam is None:
        raise user_error("apex-not-installed")
    params = {name: value for name, value in block["params"].items() if name != "torch_adam"}
    return partial(adam, **params, adam_w_mode=True)


def _adam_with_8_bit_moments() -> Callable[..., Any]:
    """The class of bitsandbytes (Dettmers et al. 2022), which loads states but no settings.

    Raises:
        UserError: If it is not installed.
    """
    try:
        base: Any = importlib.import_module("bitsandbytes.optim").AdamW8bit
    except ImportError as error:
        raise user_error("bitsandbytes-not-installed") from error

    class AdamW8bit(base):  # type: ignore[misc]
        def load_state_dict(self, state_dict: dict[str, Any], move_to_device: bool = True) -> None:
            # Its own method calls no hooks.
            super().load_state_dict(with_own_settings(self, state_dict), move_to_device)

    return AdamW8bit


def attach_matrices(engine: Any, stage: int, mesh: Mesh, device: torch.device) -> None:
    """Give an optimizer of full matrices the locations of its matrices in DeepSpeed's partitions.

    Muon orthogonalizes them in the type of the parameters, but fp16 ones in bf16, which has the
    range of fp32. SOAP computes in fp32.

    Args:
        engine: Engine of `deepspeed.initialize`.
        stage: ZeRO stage.
        mesh: Mesh of this process.
        device: Device on which they are updated.
    """
    optimizer = engine.basic_optimizer
    if not isinstance(optimizer, MatrixOptimizer):
        return
    in_fp32 = optimizer.computes_in_fp32 or engine.get_data_types()[0] == torch.float32
    dtype = torch.float32 if in_fp32 else torch.bfloat16
    empty = torch.empty(0, dtype=dtype, device=device)
    optimizer.attach(find_matrices(engine, stage, mesh, empty))


def attach_elements(engine: Any, stage: int, mesh: Mesh, seed: int, step: Update | None) -> None:
    """Give an optimizer that rounds stochastically the elements of its flat tensors.

    Args:
        engine: Engine of `deepspeed.initialize`.
        stage: ZeRO stage.
        mesh: Mesh of this process.
        seed: Seed of the run.
        step: The compiled step; None: it is not compiled.
    """
    optimizer = engine.basic_optimizer
    if isinstance(optimizer, StochasticAdamW):
        flats = own_flats(engine, stage, mesh)
        optimizer.attach(seed, {flat.master: blocks_of(flat, mesh.tp) for flat in flats}, step)
