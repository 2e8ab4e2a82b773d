"""The form of a training run's model in which text is scored and generated, as tools load it."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from megatron_ds.config import MoEConfig
from megatron_ds.model.attention.backends import CALLERS
from megatron_ds.model.attention.cores import VARYING_SIZES, backends_in_order
from megatron_ds.model.gpt import GPTModel
from megatron_ds.model.position_embedding import PositionEncoder
from megatron_ds.parallel.mesh import Group, Mesh


@contextmanager
def inference_form(model: GPTModel, mesh: Mesh) -> Iterator[None]:
    """Changes a model, inside the context, to what tools load from its checkpoint.

    Every rank computes complete sequences of any length, without sequence parallelism and compiled
    functions; documents are not separated; experts drop no tokens.

    Args:
        model: This rank's shard.
        mesh: With which it was built.
    """
    alone = Group((mesh.rank,), 0, None)
    tp = dataclasses.replace(mesh.tp, sequence_parallel=False)

    def changed(value: Any) -> Any:
        if isinstance(value, Group) and value.sequence_parallel:
            return tp
        if value is mesh.sp and mesh.sp.size > 1:
            return alone
        if isinstance(value, MoEConfig):
            return dataclasses.replace(value, moe_token_dropping=False)
        return value

    plain = dataclasses.replace(mesh, tp=tp, sp=alone)
    with ExitStack() as before:
        for module in model.modules():
            for name, value in list(vars(module).items()):
                if (new := changed(value)) is not value:
                    before.callback(setattr, module, name, value)
                    setattr(module, name, new)
        for name, new in (
            ("attention", CALLERS),
            ("positions", PositionEncoder(model.config, plain)),
        ):
            before.callback(setattr, model, name, getattr(model, name))
            setattr(model, name, new)
        device = next(model.parameters()).device
        before.enter_context(backends_in_order(VARYING_SIZES, device))
        if "torch._dynamo" in sys.modules:  # otherwise nothing is compiled
            before.enter_context(torch.compiler.set_stance("force_eager"))
        yield
