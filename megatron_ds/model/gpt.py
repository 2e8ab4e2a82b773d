"""The GPT: embedding, transformer layers, final norm, output layer.

Owns the order of a forward pass. Parameter names are the canonical ones of the checkpoints.

Shapes: S sequence, B micro-batch, H hidden, V padded vocabulary. Activations are [S, B, H], as in
Megatron, so that a sequence split is dimension 0.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megatron_ds.config import ModelConfig, MoEConfig, RecomputeConfig
from megatron_ds.model.attention.backends import CALLERS, AttentionOptions
from megatron_ds.model.attention.cores import VARYING_SIZES, backends_in_order
from megatron_ds.model.attention.packed import Keys, PackedBatchInfo
from megatron_ds.model.attention.rule import AttentionRule, attention_rules
from megatron_ds.model.attention.self_attention import KeyValueCache
from megatron_ds.model.block import Block
from megatron_ds.model.embedding import Embedding
from megatron_ds.model.kernels.elementwise import Elementwise
from megatron_ds.model.layers import BUILT_IN, CustomParts, LayerBuilder, build_layers, layer_specs
from megatron_ds.model.moe import logged_shapes
from megatron_ds.model.output_layer import Z_LOSS, OutputLayer, TokenLoss
from megatron_ds.model.position_embedding import AttentionContext, PositionEncoder
from megatron_ds.model.prediction import ahead
from megatron_ds.model.weight_init import Initializer
from megatron_ds.parallel.activation_checkpointing import ActivationCheckpointing
from megatron_ds.parallel.fused_linear_cross_entropy import EAGER as EAGER_LOSS
from megatron_ds.parallel.fused_linear_cross_entropy import LossKernels
from megatron_ds.parallel.mesh import Mesh
from megatron_ds.parallel.rng import MicroBatchSeed, RngStreams
from megatron_ds.parallel.router_log import RouterLog
from megatron_ds.parallel.ulysses import local_slice

ALL_LAYERS = (slice(None),)
DENSE = MoEConfig()
EAGER_TEXT = "nothing (eager)"
EMBEDDING = -1
"""Number of the embedding among the layers, for its dropout."""


def keys_of(
    x: Tensor, queries: int, packed: PackedBatchInfo | None, cache: KeyValueCache | None = None
) -> Keys:
    """Returns the properties for attention of a pass with activations like these.

    Args:
        x: Activations of the layers, or a weight of their type.
        queries: Tokens of the pass, of all sequence-parallel ranks.
        packed: Their documents, if boundaries matter.
        cache: Keys and values of earlier tokens.
    """
    has_documents = packed is not None and packed.options.reset_attention
    positions_BS = getattr(cache or packed, "positions_BS", None)
    cached: tuple[Any, ...] = ()
    if cache is not None:
        cached = cache.length, cache.num_keys, cache.is_wider, cache.positions_of
    return Keys(queries, x.dtype, x.device, has_documents, packed, positions_BS, *cached)


def _documents(packed: PackedBatchInfo | None) -> Tensor | None:
    """Numbers of the tokens' documents, if attention ends with them."""
    return packed.doc_ids_BS if packed is not None and packed.options.reset_attention else None


class GPTModel(nn.Module):
    """A decoder-only language model, or a pipeline stage of one, on one tensor-parallel rank.

    Args:
        config: Architecture.
        mesh: Process groups.
        rng: Random streams of dropout.
        seed: Seed of the initial weights, which are the same for every mesh. None: weights are not
            initialized, because a checkpoint will be loaded.
        checkpointing: What is recomputed in the backward pass. None: nothing.
        attention: What computes attention, and ends documents, in passes without a cache.
        stages: Which of `layer_specs` this model has: the parts that `forward` computes together.
        moe: Which layers have experts, and how many.
        parts: What replaces parts of the model.
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
        self._sp = mesh.sp
        recompute = RecomputeConfig() if checkpointing is None else checkpointing.config
        granularity = recompute.recompute_granularity
        self.checkpointing = checkpointing if granularity == "full" else None
        core, init = checkpointing if granularity == "selective" else None, Initializer(seed)
        shared = mesh, self.router_log, rng, init, core, recompute.tiled_mlp
        all_specs = layer_specs(LayerBuilder(0, config, moe, *shared), parts)
        specs = [spec for stage in stages for spec in all_specs[stage]]
        self._stages = [[spec.name for spec in all_specs[stage]] for stage in stages]
        self._has_head = any(spec.name == "head" for spec in specs)
        self._has_dropout = max(config.hidden_dropout, config.attention_dropout) > 0
        self._tied = not config.untie_embeddings_and_output_weights
        self.positions = PositionEncoder(config, mesh, attention)
        build_layers(self, specs)
        if not hasattr(self, "layers"):
            self.layers = nn.ModuleDict()

    def forward(
        self,
        tokens_BS: Tensor,
        labels_BS: Tensor | None = None,
        loss_mask_BS: Tensor | None = None,
        cache: KeyValueCache | None = None,
        *,
        hidden_only: bool = False,
        logits_only: bool = False,
        x_SBH: Tensor | None = None,
        stage: int | None = None,
        max_documents: int | None = None,
    ) -> Tensor | TokenLoss:
        """Compute the loss or, without labels, the logits.

        Every sequence-parallel rank is passed the same complete sequences, which have the document
        boundaries, and computes its slice of them.

        Args:
            tokens_BS: Token ids.
            labels_BS: Id of the token that follows each token.
            loss_mask_BS: Weight of each label's loss. None: ones.
            cache: Keys and values of earlier tokens; positions continue after them.
            hidden_only: Return the last layer's output, for `logits`.
            logits_only: Compute the logits of `x_SBH`, the last layer's output, without the tokens.
            x_SBH: Output of the previous stage, instead of embedded tokens.
            stage: Which of this model's `stages` to compute. None: all of its layers.
            max_documents: At least the number of documents in the tokens, if the host knows it.

        Returns:
            With labels, the loss, on every rank that processes these samples. Without, logits
            [B, S, V] in fp32, all of them on every tensor-parallel rank, -inf for padding. With
            `hidden_only`, or of a stage without output layer: its last layer's output [S, B, H].

        Raises:
            UserError: If an id is outside the vocabulary (on the CPU), or a sequence is too long.
        """
        if logits_only:
            assert x_SBH is not None
            return self._output(self.final_norm(x_SBH), None, None, slice(None))
        dropout = self._rng.next_micro_batch() if self.training and self._has_dropout else None
        offset = 0 if cache is None else cache.length
        packed = self._find_documents(tokens_BS, max_documents) if cache is None else None
        positions_BS = getattr(cache or packed, "positions_BS", None)
        local = local_slice(length := tokens_BS.shape[1], self._sp)
        if x_SBH is None:
            x_SBH = self._embed(tokens_BS, offset, positions_BS, dropout)
        like = next(self.parameters()) if self.config.fp32_residual_connection else x_SBH
        keys, blocks = keys_of(like, length, packed, cache), self.blocks(stage)
        main = [block for block in blocks if block.layer < self.config.num_layers]
        contexts = self.positions.contexts([block.rule for block in blocks], keys)
        with self.router_log.recording(training=self.training):
            x_SBH = self._run_blocks(main, x_SBH, contexts, cache, dropout)
        has_head = self._has_head and (stage is None or "head" in self._stages[stage])
        if hidden_only or not has_head:
            return x_SBH
        batch = tokens_BS, labels_BS, loss_mask_BS
        return self._outputs(self.final_norm(x_SBH), batch, local, packed, contexts, dropout)

    def logits(self, x_SBH: Tensor) -> Tensor:
        """The logits [B, S, V] of the last layer's output at some positions."""
        # A call, for whose time ZeRO-3 gathers the parameters.
        logits = self(x_SBH, x_SBH=x_SBH, logits_only=True)
        assert isinstance(logits, Tensor)
        return logits

    def _embed(
        self,
        tokens_BS: Tensor,
        offset: int,
        positions_BS: Tensor | None,
        dropout: MicroBatchSeed | None,
        depth: int = 0,
    ) -> Tensor:
        """This rank's slice of the embedded tokens."""
        self._rng.begin_layer(dropout, EMBEDDING - depth)
        local = local_slice(tokens_BS.shape[1], self._sp)
        own_BS = None if positions_BS is None else positions_BS[:, local]
        ids_BS = self.attention.without_marks(tokens_BS[:, local])
        x_SBH: Tensor = self.embedding(ids_BS, offset + local.start, own_BS)
        return x_SBH

    def _output(
        self, x_SBH: Tensor, labels_BS: Tensor | None, loss_mask_BS: Tensor | None, local: slice
    ) -> Tensor | TokenLoss:
        """The logits of normalized hidden states or, with labels, the loss of this rank's slice of
        them."""
        tied = self.embedding.word.weight if self._tied else None
        if self.config.logits_multiplier != 1.0:
            x_SBH = x_SBH * self.config.logits_multiplier
        if labels_BS is None:
            logits: Tensor = self.head(x_SBH, weight_vH=tied)
            return logits
        mask_BS = None if loss_mask_BS is None else loss_mask_BS[:, local]
        loss: TokenLoss = self.head(x_SBH, labels_BS[:, local], mask_BS, tied)
        return loss.of_all_slices(self._sp)

    def _outputs(
        self,
        x_SBH: Tensor,
        batch: tuple[Tensor, Tensor | None, Tensor | None],
        local: slice,
        packed: PackedBatchInfo | None,
        contexts: Mapping[AttentionRule, AttentionContext],
        dropout: MicroBatchSeed | None,
    ) -> Tensor | TokenLoss:
        """As `_output`; in training the loss has those of multi-token prediction.

        Args:
            x_SBH: Normalized hidden states.
            batch: Tokens, labels and weights of the labels' losses, as of `forward`.
            local: This rank's slice of the sequence.
            packed: The documents of the tokens.
            contexts: What the layers share, by the rule of their attention.
            dropout: Seed of the dropout.
        """
        tokens_BS, labels_BS, loss_mask_BS = batch
        loss = self._output(x_SBH, labels_BS, loss_mask_BS, local)
        if labels_BS is None or isinstance(loss, Tensor) or not (self.training and self._depths):
            return loss
        masks, documents_BS = self.masks_ahead(tokens_BS, loss_mask_BS), _documents(packed)
        positions_BS = getattr(packed, "positions_BS", None)
        if positions_BS is None:
            positions_BS = torch.ones_like(tokens_BS).cumsum(1) - 1
        factor = self.config.mtp_loss_scaling_factor / len(self._depths)
        losses, blocks = dict[str, tuple[Tensor, Tensor]](), self.blocks()[-len(self._depths) :]
        ends = zip(self._depths.items(), self.predictions.values(), blocks, masks, strict=True)
        for (depth, name), prediction, block, mask_BS in ends:
            next_BS, places_BS, targets_BS = (
                ahead(values, depth, documents_BS)
                for values in (tokens_BS, positions_BS, labels_BS)
            )
            x_SBH = prediction(x_SBH, self._embed(next_BS, 0, places_BS, dropout, depth))
            with self.router_log.recording(training=True):
                x_SBH = self._run_blocks([block], x_SBH, contexts, None, dropout)
            x_SBH = prediction.output_norm(x_SBH)  # type: ignore[union-attr, operator]
            output = self._output(x_SBH, targets_BS, mask_BS, local)
            total, count = output[:2]
            losses[name] = total.detach() + factor * (total - total.detach()), count
        return loss._replace(extras={**loss.extras, **losses})

    def masks_ahead(self, tokens_BS: Tensor, loss_mask_BS: Tensor | None) -> list[Tensor]:
        """Weights [B, S] of the losses of each depth of multi-token prediction."""
        packed = self._find_documents(tokens_BS)
        mask_BS = torch.ones_like(tokens_BS) if loss_mask_BS is None else loss_mask_BS
        return [ahead(mask_BS, depth, _documents(packed)) for depth in self._depths]

    def _find_documents(
        self, tokens_BS: Tensor, max_documents: int | None = None
    ) -> PackedBatchInfo | None:
        packing = self.attention.packing
        return None if packing is None else packing.find_documents(tokens_BS, max_documents)

    def enter_stage(self, config: ModelConfig) -> None:
        """Continue with another sequence length and other rotary positions.

        Args:
            config: The architecture with them.
        """
        self.config, rules = config, attention_rules(config)
        self.positions.max_length = config.seq_length
        for block in self.blocks():
            block.rule = rules[block.layer]

    def compile_layers(self, *, lengths_vary: bool = False) -> None:
        """Compile each transformer layer and the loss with torch.compile (on their first call).

        Args:
            lengths_vary: Compile the second sequence length for all lengths, instead of once for
                each length.
        """
        has_documents, are_graphs = self.attention.has_documents, []
        weight = next(self.parameters())
        keys = Keys(self.config.seq_length, weight.dtype, weight.device, has_documents)
        for block in self.blocks():
            is_traceable = self.attention.backend(block.rule, keys).is_traceable
            is_traceable = is_traceable and self._sp.size == 1
            # The number of documents varies, and with it a dimension in the graph.
            dynamic = None if lengths_vary or (is_traceable and has_documents) else False
            is_graph = block.compile_parts(is_core_traceable=is_traceable, dynamic=dynamic)
            are_graphs.append(is_graph)
        self._set_loss_kernels(LossKernels.compiled())
        parts = "" if all(are_graphs) else " except attention"
        self.compiled = f"{len(are_graphs)} layers{parts}, loss by torch.compile"
        self.has_compiled_layers = True

    def use_elementwise(self, functions: Elementwise, reason: str = "") -> None:
        """Let each layer compute its elementwise parts by compiled functions.

        Args:
            functions: The functions.
            reason: Why the layers are not compiled.
        """
        for block in self.blocks():
            block.use_elementwise(functions)
        self._set_loss_kernels(functions.loss)
        self.compiled = "rotary positions, activation, dropout, softmax by torch.compile"
        self.compiled += f"; layers eager ({reason})" if reason else ""

    def use_eager(self) -> None:
        """Undo `compile_layers`."""
        for block in self.blocks():
            block.use_eager()
        self._set_loss_kernels(EAGER_LOSS)
        self.compiled, self.has_compiled_layers = EAGER_TEXT, False

    def _set_loss_kernels(self, kernels: LossKernels) -> None:
        if self._has_head:
            self.head.kernels = kernels

    def blocks(self, stage: int | None = None) -> list[Block]:
        """The transformer layers of a stage, or all, those of multi-token prediction last."""
        names = [f"layers.{layer}" for layer in self.layers]
        kept = names if stage is None else [name for name in names if name in self._stages[stage]]
        return [self.get_submodule(name) for name in kept]  # type: ignore[misc]

    def _run_blocks(
        self,
        blocks: list[Block],
        x_SBH: Tensor,
        contexts: Mapping[AttentionRule, AttentionContext],
        cache: KeyValueCache | None,
        dropout: MicroBatchSeed | None,
    ) -> Tensor:
        def run(blocks: list[Block], x_SBH: Tensor) -> Tensor:
            for block in blocks:
                self._rng.begin_layer(dropout, block.layer)
                x_SBH = block(x_SBH, contexts[block.rule], cache)
            return x_SBH

        if self.checkpointing is None or cache is not None:
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
