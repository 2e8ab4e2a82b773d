"""The model as an ordered list of layer specifications.

Owns the order of the layers and their canonical names, the prefixes of their parameters in every
checkpoint. A plain model, or a pipeline stage, is built from the list or a part of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import nn

from megatron_ds.config import ModelConfig, MoEConfig
from megatron_ds.config.problems import user_error
from megatron_ds.model.block import Block
from megatron_ds.model.declaration.architecture import tied_layer
from megatron_ds.model.declaration.parts import NormSpec, OutputSpec
from megatron_ds.model.declaration.residual import Residual
from megatron_ds.model.embedding import Embedding, build_word_embedding
from megatron_ds.model.experts.router_log import RouterLog
from megatron_ds.model.mlp import MLP, TiledMLP
from megatron_ds.model.moe import MoE
from megatron_ds.model.norm import build_norm
from megatron_ds.model.output_layer import OutputLayer
from megatron_ds.model.prediction import Prediction
from megatron_ds.model.weight_init import Initializer
from megatron_ds.parallel.activation_checkpointing import ActivationCheckpointing
from megatron_ds.parallel.fused_linear_cross_entropy import LossFunction, LossTerms
from megatron_ds.parallel.mesh import Group, Mesh
from megatron_ds.parallel.rng import RngStreams


@dataclass(frozen=True)
class LayerBuilder:
    """Builds a transformer layer, of the model's parts or with others."""

    layer: int
    """Number of the layer, from 0."""
    config: ModelConfig
    moe: MoEConfig
    mesh: Mesh
    router_log: RouterLog
    rng: RngStreams
    init: Initializer
    """Draws the initial weights, which are the same in every layout."""
    checkpoint_core: ActivationCheckpointing | None
    tiled_mlp: bool

    @property
    def group(self) -> Group:
        """Tensor-parallel group."""
        return self.mesh.tp

    def mlp(self) -> nn.Module:
        """The feed-forward layer that the options select."""
        config = self.config
        group = self.group
        init = self.init
        if not self.moe.has_experts(min(self.layer, config.num_layers - 1)):
            return (TiledMLP if self.tiled_mlp else MLP)(config, self.layer, group=group, init=init)
        return MoE(config, self.moe, self.layer, self.mesh, init=init, log=self.router_log)

    def block(
        self,
        mlp: nn.Module | None = None,
        block_type: type[Block] = Block,
        residual: Residual | None = None,
    ) -> Block:
        """The transformer layer.

        Args:
            mlp: Its feed-forward layer, [S, B, H] to [S, B, H]. None: as in the options.
            block_type: Its class.
            residual: How attention and the feed-forward layer add to the residual stream. None: as
                in the options.
        """
        return block_type(
            self.config,
            self.layer,
            group=self.group,
            rng=self.rng,
            init=self.init,
            mlp=self.mlp() if mlp is None else mlp,
            checkpoint_core=self.checkpoint_core,
            residual=residual,
        )


@dataclass(frozen=True)
class CustomParts:
    """Replacements by a program for parts of the model."""

    loss: LossFunction | None = None
    layer: Callable[[LayerBuilder], Block] | None = None


BUILT_IN = CustomParts()


@dataclass(frozen=True)
class LayerSpec:
    """One layer, built where it is needed."""

    name: str
    """Canonical name, e.g. "layers.3"."""
    build: Callable[[], nn.Module]
    tied_to: LayerSpec | None = None
    """Earlier layer, or part of one, whose weights the last stage uses. If it lacks the layer it
    builds this, with the same initial weights; the gradients of both must be summed."""


def layer_specs(builder: LayerBuilder, parts: CustomParts = BUILT_IN) -> list[LayerSpec]:
    """Embedding, transformer layers, final norm, predictions and output layer, in this order.

    Args:
        builder: Builds the first transformer layer; has what all layers are built of.
        parts: Replacements of parts of the model.

    Raises:
        UserError: When a layer is built that is not a `Block`.
    """
    config = builder.config
    group = builder.group
    init = builder.init

    def block(layer: int) -> nn.Module:
        built = (parts.layer or LayerBuilder.block)(replace(builder, layer=layer))
        if not isinstance(built, Block):
            raise user_error("layer-of-other-type", found=type(built).__name__)
        return built

    def head() -> nn.Module:
        named = OutputSpec(config, config.padded_vocab(group.size)).named("head")
        weight = named.get("weight")
        bias = named.get("bias")
        sizes = config.vocab_size, config.softmax_rows
        terms = LossTerms(config.z_loss_coeff, config.final_logit_softcapping)
        return OutputLayer(
            *sizes, weight, group=group, init=init, loss=parts.loss, terms=terms, bias=bias
        )

    embedding = LayerSpec("embedding", lambda: Embedding(config, group=group, init=init))
    word = LayerSpec("embedding.word", lambda: build_word_embedding(config, group, init))
    tied = {layer.name: layer for layer in (embedding, word)}.get(tied_layer(config) or "")
    return [
        embedding,
        *(
            LayerSpec(f"layers.{layer}", lambda layer=layer: block(layer))  # type: ignore[misc]
            for layer in range(config.num_layers + config.mtp_num_layers)
        ),
        LayerSpec("final_norm", lambda: build_norm(NormSpec(config), "final_norm", group)),
        *(
            LayerSpec(name, lambda name=name: Prediction(config, name, group, init))  # type: ignore[misc]
            for name in (f"predictions.{depth}" for depth in range(config.mtp_num_layers))
        ),
        LayerSpec("head", head, tied_to=tied),
    ]


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
