"""The GPT: embedding, transformer layers, final norm, output layer.

Owns the order of a forward pass. Parameter names are the canonical ones of the checkpoints.

Shapes: S sequence, B micro-batch, H hidden, V padded vocabulary. Activations are [S, B, H], as in
Megatron, so that a sequence split is dimension 0.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megatron_ds.config import ModelConfig, MoEConfig, RecomputeConfig
from megatron_ds.model.attention.backends import CALLERS, AttentionOptions
from megatron_ds.model.attention.cores import VARYING_SIZES, backends_in_order
from megatron_ds.model.attention.packed import Documents, Keys
from megatron_ds.model.attention.rule import attention_rules
from megatron_ds.model.attention.self_attention import KeyValueCache
from megatron_ds.model.block import Block
from megatron_ds.model.embedding import Embedding
from megatron_ds.model.experts.router_log import RouterLog
from megatron_ds.model.layers import BUILT_IN, CustomParts, LayerBuilder, build_layers, layer_specs
from megatron_ds.model.moe import logged_shapes
from megatron_ds.model.output_layer import Z_LOSS, OutputLayer, TokenLoss
from megatron_ds.model.position_embedding import AttentionContext, PositionEncoder
from megatron_ds.model.prediction import ahead
from megatron_ds.model.weight_init import Initializer
from megatron_ds.parallel.activation_checkpointing import ActivationCheckpointing
from megatron_ds.parallel.context.slices import SequenceSlices
from megatron_ds.parallel.mesh import Mesh
from megatron_ds.parallel.rng import MicroBatchSeed, RngStreams

ALL_LAYERS = (slice(None),)
DENSE = MoEConfig()
EAGER_TEXT = "nothing (eager)"
EMBEDDING = -1
"""Number of the embedding among the layers, for its dropout."""


Contexts = Mapping[int, AttentionContext]
"""Attention of a forward pass by layer; layers with the same rule share it."""


@dataclass(frozen=True)
class ForwardPass:
    """A forward pass over tokens, as far as its steps share it.

    Attributes:
        tokens_BS: Token ids of complete sequences.
        documents: Their documents, if boundaries matter; not with a cache.
        cache: Keys and values of earlier tokens.
        dropout: Seed of the dropout; None: there is none.
        local: This rank's slices of the sequences.
    """

    tokens_BS: Tensor
    documents: Documents | None
    cache: KeyValueCache | None
    dropout: MicroBatchSeed | None
    local: SequenceSlices

    @property
    def offset(self) -> int:
        """Tokens before these, in the cache."""
        return 0 if self.cache is None else self.cache.length

    @property
    def positions_BS(self) -> Tensor | None:
        """Positions of the tokens, where they are not `offset`, `offset` + 1, and so on."""
        return _positions(self.documents, self.cache)

    def local_positions(self, positions_BS: Tensor | None) -> Tensor | None:
        """Positions [B or 1, S] of this rank's tokens; None where they follow each other.

        Args:
            positions_BS: Positions of complete sequences, where they do not continue the cache's.
        """
        if positions_BS is not None:
            return self.local.take(positions_BS, 1)
        if self.local.is_contiguous:
            return None
        return self.local.positions(self.tokens_BS.device)[None]


def keys_of(
    x: Tensor, queries: int, documents: Documents | None, cache: KeyValueCache | None = None
) -> Keys:
    """Returns the properties for attention of a pass with activations like these.

    Args:
        x: Activations of the layers, or a weight of their type.
        queries: Tokens of the pass, of all sequence-parallel ranks.
        documents: Their documents, if boundaries matter.
        cache: Keys and values of earlier tokens.
    """
    has_documents = documents is not None and documents.options.reset_attention
    positions_BS = _positions(documents, cache)
    cached: tuple[Any, ...] = ()
    if cache is not None:
        cached = cache.length, cache.num_keys, cache.is_wider, cache.positions_of
    return Keys(queries, x.dtype, x.device, has_documents, documents, positions_BS, *cached)


def _positions(documents: Documents | None, cache: KeyValueCache | None) -> Tensor | None:
    if cache is not None:
        return cache.positions_BS
    return None if documents is None else documents.positions_BS


class GPTModel(nn.Module):
    """A decoder-only language model, or a pipeline stage of one, on one tensor-parallel rank.

    Args:
        config: Architecture.
        mesh: Process groups.
        rng: Random streams of dropout.
        seed: Seed of the initial weights, which are the same for every mesh. None: weights are not
            initialized, because a checkpoint will be loaded.
        checkpointing: Recomputation in the backward pass; None without it.
        attention: Attention backend, and document boundaries, of passes without a cache.
        stages: Slices of `layer_specs` that this model has; each is computed in one call.
        moe: Options of mixture-of-experts layers.
        parts: Replacements of parts of the model.
    """

    embedding: Embedding
    layers: nn.ModuleDict
    final_norm: nn.Module
    predictions: nn.ModuleDict
    head: OutputLayer
    compiled: str
    """Description of what torch.compile compiles, for the banner."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        mesh: Mesh,
        rng: RngStreams,
        seed: int | None,
        checkpointing: ActivationCheckpointing | None = None,
        attention: AttentionOptions = CALLERS,
        stages: Sequence[slice] = ALL_LAYERS,
        moe: MoEConfig = DENSE,
        parts: CustomParts = BUILT_IN,
    ) -> None:
        super().__init__()
        self.config = config
        self.compiled = EAGER_TEXT
        self.has_compiled_layers = False
        self.attention = attention
        self._depths = {k: f"mtp_{k}_loss" for k in range(1, config.mtp_num_layers + 1)}
        losses = [*([Z_LOSS] if config.z_loss_coeff else []), *self._depths.values()]
        self.router_log = RouterLog(logged_shapes(moe) | dict.fromkeys(losses, ()))
        self._rng = rng
        self.sequence_group = mesh.sequence
        self._slicing_groups = mesh.cp, mesh.ulysses
        recompute = RecomputeConfig() if checkpointing is None else checkpointing.config
        granularity = recompute.recompute_granularity
        self.checkpointing = checkpointing if granularity == "full" else None
        core = checkpointing if granularity == "selective" else None
        shared = mesh, self.router_log, rng, Initializer(seed), core, recompute.tiled_mlp
        all_specs = layer_specs(LayerBuilder(0, config, moe, *shared), parts)
        specs = [spec for stage in stages for spec in all_specs[stage]]
        self._stages = [[spec.name for spec in all_specs[stage]] for stage in stages]
        self.has_head = any(spec.name == "head" for spec in specs)
        self._has_dropout = max(config.hidden_dropout, config.attention_dropout) > 0
        self._tied = not config.untie_embeddings_and_output_weights
        self.positions = PositionEncoder(config, mesh, attention)
        build_layers(self, specs)
        if not hasattr(self, "layers"):
            self.layers = nn.ModuleDict()

    def forward(
        self, *inputs: Any, compute: Callable[..., Any] | None = None, **options: Any
    ) -> Any:
        """Returns `outputs`, or what another method of this model computes.

        DeepSpeed's hooks surround calls of the model: with ZeRO-3 they gather parameters that
        several layers have in common. `hidden` and `logits` are therefore such calls.
        """
        return (compute or self.outputs)(*inputs, **options)

    def outputs(
        self,
        tokens_BS: Tensor,
        labels_BS: Tensor | None = None,
        loss_weights_BS: Tensor | None = None,
        cache: KeyValueCache | None = None,
        *,
        documents: Documents | None = None,
    ) -> Tensor | TokenLoss:
        """The loss or, without labels, the logits.

        Every sequence-parallel rank is passed the same complete sequences and computes its slice.

        Args:
            tokens_BS: Token ids.
            labels_BS: Id of the token that follows each token.
            loss_weights_BS: Weight of each label's loss. None: ones.
            cache: Keys and values of earlier tokens; positions continue after them.
            documents: The documents of the tokens, if boundaries matter; not with a cache.

        Returns:
            With labels, the loss, on every rank that processes these samples. Without, logits
            [B, S, V] in fp32, all of them on every tensor-parallel rank, -inf for padding.

        Raises:
            UserError: If an id is outside the vocabulary (on the CPU), or a sequence is too long.
        """
        current = self._begin(tokens_BS, documents, cache)
        x_SBH, contexts = self.run(current)
        if labels_BS is None:
            return self._logits(x_SBH)
        return self.loss(x_SBH, current, contexts, labels_BS, loss_weights_BS)

    def compute_stage(
        self,
        stage: int,
        x_SBH: Tensor | None,
        tokens_BS: Tensor,
        labels_BS: Tensor,
        loss_weights_BS: Tensor | None = None,
        *,
        documents: Documents | None = None,
    ) -> Tensor | TokenLoss:
        """Computes a pipeline stage: hidden states [S, B, H] or, of the last stage, the loss.

        Args:
            stage: Index into this model's `stages`.
            x_SBH: Output of the previous stage; None: the tokens are embedded.
            tokens_BS: See `outputs`, like the further arguments.
        """
        current = self._begin(tokens_BS, documents, None)
        x_SBH, contexts = self.run(current, x_SBH, stage)
        if not (self.has_head and "head" in self._stages[stage]):
            return x_SBH
        return self.loss(x_SBH, current, contexts, labels_BS, loss_weights_BS)

    def hidden(self, tokens_BS: Tensor, cache: KeyValueCache | None = None) -> Tensor:
        """The last layer's output [S, B, H], of which `logits` needs some positions.

        Args:
            tokens_BS: Token ids.
            cache: Keys and values of earlier tokens; positions continue after them.
        """
        x_SBH: Tensor = self(tokens_BS, cache, compute=self._hidden)
        return x_SBH

    def logits(self, x_SBH: Tensor) -> Tensor:
        """The logits [B, S, V] of the last layer's output at some positions."""
        logits: Tensor = self(x_SBH, compute=self._logits)
        return logits

    def embed(
        self, current: ForwardPass, tokens_BS: Tensor, positions_BS: Tensor | None, depth: int = 0
    ) -> Tensor:
        """This rank's slice [S, B, H] of embedded tokens.

        Args:
            current: The pass.
            tokens_BS: Its tokens, or those that follow `depth` places later.
            positions_BS: Their positions, where they do not continue the cache's.
            depth: Depth of multi-token prediction.
        """
        self._rng.begin_layer(current.dropout, EMBEDDING - depth)
        own_BS = current.local.take(tokens_BS, 1)
        offset = current.offset + current.local.stop - current.local.size
        x_SBH: Tensor = self.embedding(own_BS, offset, current.local_positions(positions_BS))
        return x_SBH

    def run(
        self, current: ForwardPass, x_SBH: Tensor | None = None, stage: int | None = None
    ) -> tuple[Tensor, Contexts]:
        """Computes the transformer layers, without those of multi-token prediction.

        Args:
            current: The pass.
            x_SBH: Input of the first layer. None: the embedded tokens.
            stage: Index into this model's `stages`. None: all layers.

        Returns:
            The last layer's output, and what layers shared.
        """
        if x_SBH is None:
            x_SBH = self.embed(current, current.tokens_BS, current.positions_BS)
        like = next(self.parameters()) if self.config.fp32_residual_connection else x_SBH
        keys = keys_of(like, current.tokens_BS.shape[1], current.documents, current.cache)
        blocks = self.blocks(stage)
        contexts = self.positions.contexts({block.layer: block.rule for block in blocks}, keys)
        main = [block for block in blocks if block.layer < self.config.num_layers]
        with self.router_log.recording(training=self.training):
            return self._run_blocks(main, x_SBH, current, contexts), contexts

    def loss(
        self,
        x_SBH: Tensor,
        current: ForwardPass,
        contexts: Contexts,
        labels_BS: Tensor,
        loss_weights_BS: Tensor | None,
    ) -> TokenLoss:
        """The loss of the last layer's output; in training with the losses of multi-token
        prediction."""
        x_SBH = self.final_norm(x_SBH)
        loss = self._loss(x_SBH, labels_BS, loss_weights_BS, current)
        if not (self.training and self._depths):
            return loss
        tokens_BS = current.tokens_BS
        all_weights = self.weights_ahead(tokens_BS, loss_weights_BS, current.documents)
        documents_BS = None if current.documents is None else current.documents.attended_BS
        positions_BS = current.positions_BS
        if positions_BS is None:
            positions_BS = torch.ones_like(tokens_BS).cumsum(1) - 1
        factor = self.config.mtp_loss_scaling_factor / len(self._depths)
        losses = dict[str, tuple[Tensor, Tensor]]()
        blocks = self.blocks()[-len(self._depths) :]
        ends = zip(
            self._depths.items(), self.predictions.values(), blocks, all_weights, strict=True
        )
        for (depth, name), prediction, block, weights_BS in ends:
            next_BS, places_BS, targets_BS = (
                ahead(values, depth, documents_BS)
                for values in (tokens_BS, positions_BS, labels_BS)
            )
            x_SBH = prediction(x_SBH, self.embed(current, next_BS, places_BS, depth))
            with self.router_log.recording(training=True):
                x_SBH = self._run_blocks([block], x_SBH, current, contexts)
            x_SBH = prediction.output_norm(x_SBH)  # type: ignore[union-attr, operator]
            total, count = self._loss(x_SBH, targets_BS, weights_BS, current)[:2]
            losses[name] = total.detach() + factor * (total - total.detach()), count
        return loss._replace(extras={**loss.extras, **losses})

    def _begin(
        self, tokens_BS: Tensor, documents: Documents | None, cache: KeyValueCache | None
    ) -> ForwardPass:
        assert (documents is None) == (self.attention.packing is None or cache is not None)
        dropout = self._rng.next_micro_batch() if self.training and self._has_dropout else None
        local = SequenceSlices.of(tokens_BS.shape[1], *self._slicing_groups)
        return ForwardPass(tokens_BS, documents, cache, dropout, local)

    def _hidden(self, tokens_BS: Tensor, cache: KeyValueCache | None) -> Tensor:
        return self.run(self._begin(tokens_BS, None, cache))[0]

    def _logits(self, x_SBH: Tensor) -> Tensor:
        x_SBH = self._scaled(self.final_norm(x_SBH))
        logits: Tensor = self.head(x_SBH, weight_vH=self._tied_weight)
        return logits

    def _loss(
        self, x_SBH: Tensor, labels_BS: Tensor, weights_BS: Tensor | None, current: ForwardPass
    ) -> TokenLoss:
        """The loss of this rank's slices of normalized hidden states, summed over all slices."""
        weights_BS = None if weights_BS is None else current.local.take(weights_BS, 1)
        labels_BS = current.local.take(labels_BS, 1)
        loss: TokenLoss = self.head(self._scaled(x_SBH), labels_BS, weights_BS, self._tied_weight)
        return loss.of_all_slices(self.sequence_group)

    def _scaled(self, x_SBH: Tensor) -> Tensor:
        """Normalized hidden states as the output layer takes them."""
        multiplier = self.config.logits_factor
        return x_SBH if multiplier == 1.0 else x_SBH * multiplier

    @property
    def _tied_weight(self) -> Tensor | None:
        return self.embedding.word.weight if self._tied else None

    def weights_ahead(
        self, tokens_BS: Tensor, loss_weights_BS: Tensor | None, documents: Documents | None
    ) -> list[Tensor]:
        """Weights [B, S] of the losses of each depth of multi-token prediction."""
        weights_BS = torch.ones_like(tokens_BS) if loss_weights_BS is None else loss_weights_BS
        documents_BS = None if documents is None else documents.attended_BS
        return [ahead(weights_BS, depth, documents_BS) for depth in self._depths]

    def enter_phase(self, config: ModelConfig) -> None:
        """Continue with another sequence length and other rotary positions.

        Args:
            config: The architecture with them.
        """
        self.config = config
        rules = attention_rules(config)
        self.positions.max_length = config.seq_length
        for block in self.blocks():
            block.rule = rules[block.layer]

    def blocks(self, stage: int | None = None) -> list[Block]:
        """Transformer layers of a stage, or all; layers of multi-token prediction are last."""
        names = None if stage is None else self._stages[stage]
        layers: Any = self.layers.items()
        return [block for layer, block in layers if names is None or f"layers.{layer}" in names]

    def _run_blocks(
        self, blocks: list[Block], x_SBH: Tensor, current: ForwardPass, contexts: Contexts
    ) -> Tensor:
        def run(blocks: list[Block], x_SBH: Tensor) -> Tensor:
            for block in blocks:
                self._rng.begin_layer(current.dropout, block.layer)
                x_SBH = block(x_SBH, contexts[block.layer], current.cache)
            return x_SBH

        if self.checkpointing is None or current.cache is not None:
            return run(blocks, x_SBH)
        size = self.checkpointing.config.checkpoint_num_layers
        for start in range(0, len(blocks), size):
            chunk = partial(run, blocks[start : start + size])
            x_SBH = self.checkpointing.run(chunk, x_SBH)
        return x_SBH


@contextmanager
def inference_form(model: GPTModel, mesh: Mesh) -> Iterator[None]:
    """Changes a model, inside the context, to what tools load from its checkpoint.

    Every rank computes complete sequences of any length, without sequence parallelism and compiled
    functions; documents are not separated; experts drop no tokens.

    Args:
        model: This rank's shard.
        mesh: Mesh with which the model was built, and no other model.
    """
    before = (model.attention, model.positions)
    log = model.router_log
    order = backends_in_order(VARYING_SIZES, next(model.parameters()).device)
    is_compiled = "torch._dynamo" in sys.modules  # otherwise nothing is compiled
    eager = torch.compiler.set_stance("force_eager") if is_compiled else nullcontext()
    with mesh.complete_sequences(), order, eager:
        model.attention = CALLERS
        model.positions = PositionEncoder(model.config, mesh)
        log.keeps_all_tokens = True
        try:
            yield
        finally:
            model.attention, model.positions = before
            log.keeps_all_tokens = False
