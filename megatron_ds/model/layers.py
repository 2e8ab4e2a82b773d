"""The model as an ordered list of layer specifications.

Owns the order of the layers and their canonical names, the prefixes of their parameters in every
checkpoint. A plain model, or a pipeline stage, is built from the list or a part of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from megatron_ds.config import ModelConfig, MoEConfig
from megatron_ds.model.block import Block
from megatron_ds.model.embedding import Embedding, build_word_embedding
from megatron_ds.model.mlp import MLP, TiledMLP
from megatron_ds.model.moe import MoE
from megatron_ds.model.norm import build_norm
from megatron_ds.model.output_layer import OutputLayer
from megatron_ds.model.weight_init import Initializer
from megatron_ds.parallel.activation_checkpointing import ActivationCheckpointing
from megatron_ds.parallel.mesh import Group
from megatron_ds.parallel.rng import RngStreams
from megatron_ds.parallel.router_log import RouterLog
from megatron_ds.parallel.sequence import sum_gradients


@dataclass(frozen=True)
class LayerSpec:
    """One layer, built where it is needed."""

    name: str
    """Canonical name, e.g. "layers.3"."""
    build: Callable[[], nn.Module]
    tied_to: LayerSpec | None = None
    """Part of an earlier layer whose weight this layer uses. A stage that lacks the earlier layer
    builds this part, with the same initial weight; the gradients of both must be summed."""


def layer_specs(
    config: ModelConfig,
    moe: MoEConfig,
    *,
    group: Group,
    sp_group: Group,
    ep_group: Group,
    router_log: RouterLog,
    rng: RngStreams,
    init: Initializer,
    checkpoint_core: ActivationCheckpointing | None = None,
    tiled_mlp: bool = False,
) -> list[LayerSpec]:
    """Embedding, transformer layers, final norm and output layer, in this order.

    Args:
        config: Architecture.
        moe: Which layers have experts, and how many.
        group: Tensor-parallel group.
        sp_group: Group of DeepSpeed-Ulysses.
        ep_group: Expert-parallel group.
        router_log: Receives what the routers report.
        rng: Random streams of dropout.
        init: Draws the initial weights.
        checkpoint_core: Recomputes the attention cores. None: they are stored.
        tiled_mlp: Compute the feed-forward layers in tiles.
    """

    def block(layer: int) -> nn.Module:
        mlp: nn.Module
        if moe.has_experts(layer):
            groups = {"group": group, "sp_group": sp_group, "ep_group": ep_group}
            mlp = MoE(config, moe, layer, **groups, init=init, log=router_log)
        else:
            mlp = (TiledMLP if tiled_mlp else MLP)(config, layer, group=group, init=init)
        return Block(
            config, layer, group=group, rng=rng, init=init, mlp=mlp, checkpoint_core=checkpoint_core
        )

    untied = config.untie_embeddings_and_output_weights
    word = LayerSpec("embedding.word", lambda: build_word_embedding(config, group, init))
    return [
        LayerSpec("embedding", lambda: Embedding(config, group=group, init=init)),
        *(
            LayerSpec(f"layers.{layer}", lambda layer=layer: block(layer))  # type: ignore[misc]
            for layer in range(config.num_layers)
        ),
        LayerSpec("final_norm", lambda: sum_gradients(build_norm(config), group)),
        LayerSpec(
            "head",
            lambda: _build_head(config, group, init if untied else None),
            tied_to=None if untied else word,
        ),
    ]


def _build_head(config: ModelConfig, group: Group, init: Initializer | None) -> OutputLayer:
    """The output layer; without an initializer, it is passed the embedding's weight."""
    return OutputLayer(
        config.vocab_size,
        config.padded_vocab(group.size),
        config.hidden_size,
        softmax_rows=config.softmax_rows,
        group=group,
        init=None if init is None else init.normal("head.weight", config.init_method_std),
    )


def build_layers(model: nn.Module, specs: list[LayerSpec]) -> None:
    """Build layers as submodules of a model, under their canonical names."""
    names = [spec.name for spec in specs]
    for spec in specs:
        tied = spec.tied_to
        if tied is not None and tied.name.partition(".")[0] not in names:
            _add(model, tied.name, tied.build())
        _add(model, spec.name, spec.build())


def _add(root: nn.Module, name: str, layer: nn.Module) -> None:
    """Add a submodule with a dotted name."""
    *parents, last = name.split(".")
    for parent in parents:
        if not hasattr(root, parent):
            # Not a ModuleList: a later stage's layers do not begin at 0.
            root.add_module(parent, nn.ModuleDict())
        root = root.get_submodule(parent)
    root.add_module(last, layer)
