"""The model as a list of layer declarations, and totals over its layers.

The only place where options become parts. Layers, weights and their order match the modules that
`model.layers` builds.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from typing import Any

from megatron_ds.config import Config, ModelConfig, MoEConfig
from megatron_ds.config.param_group import unused_groups
from megatron_ds.config.problems import Problem
from megatron_ds.dataclass import dataclass
from megatron_ds.model.declaration.experts import ExpertsSpec
from megatron_ds.model.declaration.forward_pass import Pass
from megatron_ds.model.declaration.latent import MLASpec
from megatron_ds.model.declaration.parts import (
    AttentionSpec,
    EmbeddingSpec,
    FeedForwardSpec,
    NormSpec,
    OutputSpec,
    Part,
    PredictionSpec,
)
from megatron_ds.model.declaration.residual import residual_form
from megatron_ds.parallel.weights import Role, Weight

DENSE = MoEConfig()
Keep = Callable[[Weight], bool]
"""Whether a weight is counted."""


@dataclass(frozen=True, eq=False)
class Layer:
    """Embedding, transformer layer, final norm or output layer."""

    name: str
    """Canonical name, e.g. "layers.3"."""
    parts: dict[str, Part]
    """Parts by their names below the layer; the layer itself has an empty name. Equal transformer
    layers have the same object."""
    tied: tuple[Weight, ...] = ()
    """Weights of an earlier layer; a stage that lacks that layer has copies."""
    is_parallel: bool = False
    """Whether two of the parts read the same hidden states."""

    @cached_property
    def weights(self) -> dict[str, Weight]:
        """Weights by canonical name."""
        weights = {weight.name: weight for weight in self.tied}
        for key, part in self.parts.items():
            prefix = f"{self.name}.{key}" if key else self.name
            weights |= {weight.name: weight for weight in part.named(prefix).values()}
        return weights

    @property
    def experts(self) -> list[ExpertsSpec]:
        """Its mixtures of experts."""
        return [part for part in self.parts.values() if isinstance(part, ExpertsSpec)]

    def matmul_macs(self, keys: int) -> int:
        """Multiply-adds of matmuls per token in a forward pass over `keys` keys."""
        return sum(part.matmul_macs(keys) for part in self.parts.values())

    def saved(self, run: Pass) -> int:
        """Bytes that a forward pass saves."""
        return (
            sum(part.saved(run) for part in self.parts.values()) - run.residual * self.is_parallel
        )


Layers = Iterable[Layer] | None
"""Some of the layers. None: all."""


@dataclass(frozen=True)
class ModelSpec:
    """The layers of the model, and totals over all or some of them."""

    before: tuple[Layer, ...]
    """Layers of the first stage before the transformer layers."""
    blocks: tuple[Layer, ...]
    """The transformer layers; the layers of multi-token prediction come last."""
    after: tuple[Layer, ...]
    """Layers of the last stage after them, the output layer last."""
    tp_size: int
    ep_size: int
    has_whole_experts: bool = False

    @cached_property
    def layers(self) -> tuple[Layer, ...]:
        """All, in the order of a forward pass."""
        return (*self.before, *self.blocks, *self.after)

    def weights(self, layers: Layers = None) -> dict[str, Weight]:
        """Weights and states by canonical name; a tied one counts once."""
        return _weights(self.layers if layers is None else layers)

    def sizes(self, layers: Layers = None, keep: Keep = bool) -> Counter[int]:
        """Elements of one model-parallel rank's weights -> number of weights of this size.

        Args:
            layers: Some of the layers. None: all.
            keep: Whether a weight is counted.
        """
        chosen = self.layers if layers is None else tuple(layers)
        return _sizes(chosen, keep, self.tp_size, self.ep_size, self.has_whole_experts)

    def elements(self, layers: Layers = None, keep: Keep = bool) -> int:
        """Elements of one model-parallel rank's weights; arguments as for `sizes`."""
        return sum(size * count for size, count in self.sizes(layers, keep).items())

    def flops(self, tokens: int, layers: Layers = None, *, is_causal: bool = False) -> int:
        """Operations of the forward and backward pass of a sample, without recomputation.

        Counts only matmuls, with two operations per multiply-add. This is the count of Narayanan et
        al. 2021 (section 5.1) without its approximations: the causal mask does not halve attention.
        Megatron-LM's program halves it, for which `is_causal` is.

        Args:
            tokens: Tokens of the sample.
            layers: Some of the layers. None: all.
            is_causal: A token attends to half of the sample, as on average behind a causal mask. A
                window that is shorter than this half counts in full.
        """
        chosen = self.layers if layers is None else tuple(layers)
        keys = tokens // 2 if is_causal else tokens
        # The backward pass has two matmuls for each one of the forward pass.
        return 3 * 2 * tokens * _matmul_macs(chosen, keys)


def _weights(layers: Iterable[Layer]) -> dict[str, Weight]:
    return {name: weight for layer in layers for name, weight in layer.weights.items()}


# A plan asks for a few sums of the same layers, many times.
@functools.lru_cache(maxsize=2048)
def _sizes(
    layers: tuple[Layer, ...], keep: Keep, tp_size: int, ep_size: int, has_whole_experts: bool
) -> Counter[int]:
    selected = (
        weight for weight in _weights(layers).values() if keep(weight) and not is_state(weight)
    )
    return Counter(w.size(tp_size, ep_size, has_whole_experts=has_whole_experts) for w in selected)


@functools.lru_cache(maxsize=2048)
def _matmul_macs(layers: tuple[Layer, ...], keys: int) -> int:
    # Layers of the same parts have as many.
    forms = {id(layer.parts): layer for layer in layers}
    macs = {form: layer.matmul_macs(keys) for form, layer in forms.items()}
    return sum(macs[id(layer.parts)] for layer in layers)


@functools.lru_cache(maxsize=2048)
def expert_macs(layers: tuple[Layer, ...]) -> int:
    """Multiply-adds of the mixtures of experts of some layers, per token in a forward pass."""
    experts = [part for layer in layers for part in layer.experts]
    macs = {id(part): part.matmul_macs(keys=0) for part in experts}
    return sum(macs[id(part)] for part in experts)


def is_expert(weight: Weight) -> bool:
    """Whether expert-parallel ranks share a weight."""
    return weight.is_stacked


def is_expert_matrix(weight: Weight) -> bool:
    """Whether both hold."""
    return is_expert(weight) and is_matrix(weight)


def is_state(weight: Weight) -> bool:
    """Whether a weight is a state, such as a buffer, and not a parameter."""
    return weight.role is Role.STATE


def is_matrix(weight: Weight) -> bool:
    """Whether an optimizer of matrices updates a weight as one: a matrix of a transformer layer."""
    return weight.role is Role.MATRIX


def run_spec(config: Config) -> ModelSpec:
    """The model of a run; see `model_spec`."""
    tp_size = config.parallel.tensor_model_parallel_size
    spec = model_spec(config.model, config.moe, tp_size, config.expert_parallel_size)
    return dataclasses.replace(spec, has_whole_experts=config.has_whole_experts)


def param_group_problems(config: Config, names: Iterable[str] | None = None) -> Iterator[Problem]:
    """Check that every pattern of --param-group applies to a weight.

    Args:
        config: Configuration without other problems.
        names: Names of all weights. None: names of the package's own layers, if the model uses
            them.
    """
    texts = config.optimizer.param_group or ()
    if texts and (names is not None or "layer" not in config.custom_parts):
        weights = run_spec(config).weights().items()
        names = names or [name for name, weight in weights if not is_state(weight)]
        for text, reason in unused_groups(texts, names):
            yield Problem("param-group-invalid", text=text, reason=reason)


@functools.lru_cache(maxsize=64)
def model_spec(
    model: ModelConfig, moe: MoEConfig = DENSE, tp_size: int = 1, ep_size: int = 1
) -> ModelSpec:
    """Declare a model.

    Args:
        model: Architecture.
        moe: Options of mixture-of-experts layers.
        tp_size: Tensor-parallel size, which also determines the padding of the vocabulary.
        ep_size: Expert-parallel size.
    """
    rows = model.padded_vocab(tp_size)
    norm = NormSpec(model)
    embedding = Layer("embedding", {"": EmbeddingSpec(model, rows)})
    dense = FeedForwardSpec(model)
    sparse = ExpertsSpec(model, moe)
    form = residual_form(model)
    shared: dict[tuple[Part, Part], dict[str, Part]] = {}

    def block(layer: int) -> Layer:
        attention = MLASpec if model.multi_latent_attention else AttentionSpec
        mixer = attention.of(model, layer)
        mlp = sparse if moe.has_experts(min(layer, model.num_layers - 1)) else dense
        parts: dict[str, Part] = {}
        for key, part in (("attention", mixer), ("mlp", mlp)):
            parts |= {f"{key}_norm": norm, key: part, f"{key}_post_norm": norm}
        parts = {key: part for key, part in parts.items() if form.norms.get(key, True)}
        parts = shared.setdefault((mixer, mlp), parts)
        return Layer(f"layers.{layer}", parts, is_parallel=form.parallel)

    depths = range(model.mtp_num_layers)
    blocks = tuple(map(block, range(model.num_layers + len(depths))))
    tied = tied_layer(model) or "nothing"
    copied = tuple(w for name, w in embedding.weights.items() if name.startswith(tied))
    head = Layer("head", {"": OutputSpec(model, rows)}, copied)
    prediction = PredictionSpec(model, rows)
    predictions = (Layer(f"predictions.{depth}", {"": prediction}) for depth in depths)
    after = Layer("final_norm", {"": norm}), *predictions, head
    return ModelSpec((embedding,), blocks, after, tp_size, ep_size)


def tied_layer(model: ModelConfig) -> str | None:
    """The tied embedding that the last pipeline stage shares."""
    if model.mtp_num_layers:
        return "embedding"
    return None if model.untie_embeddings_and_output_weights else "embedding.word"


@functools.cache
def unit_weights() -> dict[str, Weight]:
    """Weights of a layer of each form and of both ends at size 1, for what does not depend on
    sizes.

    The layer is "layers.0", and two experts are in it.
    """
    sizes = ("num_layers", "hidden_size", "num_attention_heads", "seq_length", "vocab_size")
    options: dict[str, Any] = dict.fromkeys(sizes, 1)
    options |= {"untie_embeddings_and_output_weights": True, "output_layer_bias": True}
    experts = MoEConfig((2,), moe_latent_size=1, moe_shared_expert_intermediate_size=1)
    latent = {**options, "multi_latent_attention": True, "position_embedding_type": "rope"}
    models = (
        model_spec(ModelConfig(**latent), experts),
        model_spec(ModelConfig(**latent, q_lora_rank=1)),
        model_spec(ModelConfig(**options, softmax_type="learnable")),
    )
    return {name: weight for model in models for name, weight in model.weights().items()}
