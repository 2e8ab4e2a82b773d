"""The GPT: embedding, layers, final norm, head.

Shapes: S sequence, B micro-batch, H hidden, V padded vocabulary. Activations are [S, B, H], so that
a cut of the sequence is a cut of dimension 0. Parameter names are the canonical ones of the
checkpoints.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from megatron_ds.config import ModelConfig
from megatron_ds.model.attention import KeyValueCache
from megatron_ds.model.block import Block
from megatron_ds.model.norm import build_norm
from megatron_ds.model.output_layer import OutputLayer, TokenLoss
from megatron_ds.model.packed_attention import PackingOptions
from megatron_ds.model.position_embedding import AttentionContext, PositionEncoder
from megatron_ds.model.weight_init import Initializer
from megatron_ds.parallel.activation_checkpointing import ActivationCheckpointing
from megatron_ds.parallel.embedding import VocabParallelEmbedding
from megatron_ds.parallel.mesh import Group, Mesh
from megatron_ds.parallel.rng import RngStreams


class LearnedPositionEmbedding(nn.Module):
    """Learned positions: [S, 1, H] for the tokens from `offset` on, or [S, B, H] for the places
    [B, S] that are given.
    """

    def __init__(self, positions: int, hidden: int, init: Initializer, std: float) -> None:
        super().__init__()
        full = init.normal("embedding.position.weight", std)((positions, hidden))
        self.weight = nn.Parameter(torch.empty(positions, hidden))
        with torch.no_grad():
            self.weight.copy_(full)

    def forward(
        self, queries: int, offset: int, places_BS: torch.Tensor | None = None
    ) -> torch.Tensor:
        """places_BS: of the tokens in their documents. Raises ValueError where the table ends."""
        end = offset + queries
        if end > self.weight.shape[0]:
            raise ValueError(
                f"a sequence of {end} tokens does not fit into the {self.weight.shape[0]} learned "
                "positions (--max-position-embeddings)"
            )
        if places_BS is not None:
            return F.embedding(places_BS.t(), self.weight)
        return self.weight[offset:end].unsqueeze(1)


class Embedding(nn.Module):
    """Token ids [B, S] to [S, B, H]: word, norm (--embed-layernorm), position, dropout."""

    def __init__(
        self, config: ModelConfig, padded_vocab: int, *, group: Group, init: Initializer
    ) -> None:
        super().__init__()
        std = config.init_method_std
        self.dropout = config.hidden_dropout
        self.word = VocabParallelEmbedding(
            config.vocab_size,
            padded_vocab,
            config.hidden_size,
            group=group,
            init=init.normal("embedding.word.weight", std),
        )
        self.norm = build_norm(config) if config.embed_layernorm else None
        self.position: LearnedPositionEmbedding | None = None
        if config.position_embedding_type == "learned_absolute":
            self.position = LearnedPositionEmbedding(
                config.num_positions, config.hidden_size, init, std
            )

    def forward(
        self, tokens_BS: torch.Tensor, offset: int, places_BS: torch.Tensor | None = None
    ) -> torch.Tensor:
        """places_BS: where positions are not offset, offset + 1, ..."""
        x_SBH: torch.Tensor = self.word(tokens_BS.t())
        if self.norm is not None:
            x_SBH = self.norm(x_SBH)
        if self.position is not None:
            x_SBH = x_SBH + self.position(tokens_BS.shape[1], offset, places_BS)
        if self.dropout > 0.0:
            x_SBH = F.dropout(x_SBH, self.dropout, training=self.training)
        return x_SBH


class GPTModel(nn.Module):
    """A decoder-only language model, cut over a tensor-parallel group."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        mesh: Mesh,
        rng: RngStreams,
        seed: int | None,
        recompute: ActivationCheckpointing | None = None,
        documents: PackingOptions | None = None,
    ) -> None:
        """seed: of the initial weights, which it determines for every mesh. None: the weights are
        left as they are in memory, for a checkpoint that fills them. documents: what happens at
        their bounds where no cache is given; None: nothing.
        """
        super().__init__()
        self.config = config
        self.documents = documents
        self._rng = rng
        group, init = mesh.tp, Initializer(seed)
        padded_vocab = config.padded_vocab(group.size)
        granularity = recompute.granularity if recompute is not None else None
        self.recompute = recompute if granularity == "full" else None
        core = recompute if granularity == "selective" else None
        self.positions = PositionEncoder(config, group)
        self.embedding = Embedding(config, padded_vocab, group=group, init=init)
        self.layers = nn.ModuleList(
            Block(config, layer, group=group, rng=rng, init=init, recompute_core=core)
            for layer in range(config.num_layers)
        )
        self.final_norm = build_norm(config)
        self.head = OutputLayer(
            config.vocab_size,
            padded_vocab,
            config.hidden_size,
            group=group,
            init=init.normal("head.weight", config.init_method_std)
            if config.untie_embeddings_and_output_weights
            else None,
        )

    def forward(
        self,
        tokens_BS: torch.Tensor,
        labels_BS: torch.Tensor | None = None,
        loss_mask_BS: torch.Tensor | None = None,
        cache: KeyValueCache | None = None,
        *,
        last_only: bool = False,
    ) -> torch.Tensor | TokenLoss:
        """The loss or, without labels, the logits.

        Loss: sum over and number of the tokens that loss_mask counts (None: all). Logits:
        [B, S, V] in fp32, whole on every tensor-parallel rank, -inf for padding.
        cache: keys and values of earlier tokens; positions go on where it ends. last_only: logits
        of the last position alone, [B, 1, V], without the cost of the others. Raises ValueError
        for an id outside the vocabulary and for a sequence longer than learned positions.
        """
        if self.training:
            self._rng.begin_micro_batch()
        offset = 0 if cache is None else cache.length
        documents = None
        if self.documents is not None and cache is None:
            documents = self.documents.of(tokens_BS)
        places_BS = None if documents is None else documents.positions_BS
        x_SBH = self.embedding(tokens_BS, offset, places_BS)
        context = self.positions.context(
            tokens_BS.shape[1], offset, x_SBH.dtype, x_SBH.device, documents
        )
        x_SBH = self._run_layers(x_SBH, context, cache)
        if last_only:
            x_SBH = x_SBH[-1:]
        x_SBH = self.final_norm(x_SBH)
        tied = (
            None if self.config.untie_embeddings_and_output_weights else self.embedding.word.weight
        )
        output: torch.Tensor | TokenLoss = self.head(x_SBH, labels_BS, loss_mask_BS, tied)
        return output

    def compile_layers(self, *, lengths_vary: bool = False) -> None:
        """Compile each layer with torch.compile (on its first call).

        lengths_vary: the second length that comes is compiled as any length, so that no further one
        is compiled again; otherwise each has code of its own.

        Head and loss are matrix products and a softmax kernel already; compiling them was measured
        and made the step slower.
        """
        for block in self.layers:
            block.compile(dynamic=None if lengths_vary else False)

    def _run_layers(
        self, x_SBH: torch.Tensor, context: AttentionContext, cache: KeyValueCache | None
    ) -> torch.Tensor:
        if self.recompute is None or cache is not None:
            for block in self.layers:
                x_SBH = block(x_SBH, context, cache)
            return x_SBH
        blocks, size = list(self.layers), self.recompute.layers_per_chunk
        for start in range(0, len(blocks), size):
            unit = LayerChunk(blocks[start : start + size], context)
            x_SBH = self.recompute.run(unit, x_SBH)
        return x_SBH


class LayerChunk:
    """Some consecutive layers as one function of the hidden states, for recomputation."""

    def __init__(self, blocks: list[nn.Module], context: AttentionContext) -> None:
        self.blocks = blocks
        self.context = context

    def __call__(self, x_SBH: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x_SBH = block(x_SBH, self.context)
        return x_SBH
