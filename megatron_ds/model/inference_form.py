"""The form of a training run's model in which text is scored and generated, as tools load it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch

from megatron_ds.model.attention.backends import CALLERS
from megatron_ds.model.attention.cores import VARYING_SIZES, backends_in_order
from megatron_ds.model.gpt import GPTModel
from megatron_ds.model.position_embedding import PositionEncoder
from megatron_ds.parallel.mesh import Mesh


@contextmanager
def inference_form(model: GPTModel, mesh: Mesh) -> Iterator[None]:
    """Changes a model, inside the context, to what tools load from its checkpoint.

    Every rank computes complete sequences of any length, without sequence parallelism and compiled
    functions; documents are not separated; experts drop no tokens.

    Args:
        model: This rank's shard.
        mesh: With which it was built; of no other model.
    """
    before, log = (model.attention, model.positions), model.router_log
    order = backends_in_order(VARYING_SIZES, next(model.parameters()).device)
    is_compiled = "torch._dynamo" in sys.modules  # otherwise nothing is compiled
    eager = torch.compiler.set_stance("force_eager") if is_compiled else nullcontext()
    with mesh.complete_sequences(), order, eager:
        model.attention, model.positions = CALLERS, PositionEncoder(model.config, mesh)
        log.keeps_all_tokens = True
        try:
            yield
        finally:
            (model.attention, model.positions), log.keeps_all_tokens = before, False
