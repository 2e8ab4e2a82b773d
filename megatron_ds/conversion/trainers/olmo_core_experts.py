"""The experts' tensors of OLMo-core, which has the first two dimensions as one.

    feed_forward_moe.router.weight          [E x H]
    feed_forward_moe.experts.mlp.w1, w3     [E x F, H]
    feed_forward_moe.experts.mlp.w2         [E x F, H], each expert's transposed

Facts: ai2-olmo-core 3.0.0, `olmo_core/nn/moe`.
"""

from __future__ import annotations

from megatron_ds.conversion.model_settings import ModelSettings
from megatron_ds.conversion.trainers.layout import matrices
from megatron_ds.engine.states.state_reader import TensorReader, TensorReaders

EXPERTS = "feed_forward_moe"


def expert_matrices(theirs: TensorReaders, settings: ModelSettings) -> dict[str, TensorReader]:
    """The tensors of a model, with those of experts as a matrix for each expert."""
    model = settings.model
    width = settings.moe.width(model)
    shaped = dict(theirs)
    for name, tensor in theirs.items():
        module = name.partition(f".{EXPERTS}.")[2]
        if module == "router.weight":
            shaped[name] = matrices(tensor, model.hidden_size)
        elif module.startswith("experts.mlp."):
            shaped[name] = matrices(tensor, width, is_transposed=module.endswith("w2"))
    return shaped
