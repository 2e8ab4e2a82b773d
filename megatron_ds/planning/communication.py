"""Computes the communication volume of a rank in a training step, from the configuration alone.

Counts the collectives and sends of parameters, gradients and hidden states, with the sizes that
torch.distributed sees. Omits the few bytes of a step's norms and flags.
`tests/dist/test_planned_communication.py` compares them with the communication of training steps.

Shapes: T tokens of a micro-batch on this rank, H hidden.
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron_ds.config.fields import in_effect
from megatron_ds.config.options.parallel import ALL_GATHER, LayerExchange
from megatron_ds.dataclass import dataclass
from megatron_ds.model.declaration.architecture import is_expert
from megatron_ds.model.declaration.forward_pass import FP32
from megatron_ds.model.declaration.parts import AttentionSpec
from megatron_ds.parallel.context.layout import CHUNKS, ContextLayout, VisibleKeys
from megatron_ds.parallel.weights import Partial, Weight
from megatron_ds.planning.memory_inputs import PlannedRun

RING = {"all-reduce": 2, "all-gather": 1, "reduce-scatter": 1, "all-to-all": 1}
"""Sends of a message by each rank of a long ring; (n - 1) / n times as many on n ranks."""

ALLREDUCE_BUCKET = 500_000_000
"""Elements that DeepSpeed reduces in one all-reduce if no bucket size is configured."""
LOSS_STATISTICS = 2
"""Values per token that the ranks with shards of the vocabulary exchange for the loss."""


@dataclass(frozen=True)
class Traffic:
    """Communication of one kind in a step of one rank."""

    operation: str
    """all-reduce, all-gather, reduce-scatter, all-to-all, or send (to one rank)."""
    axis: str
    """Parallel axis whose ranks take part: one of `AXES`, or another one of `axis_groups`."""
    what: str
    """Kind of tensors that are communicated, for reports."""
    size: int
    """Total bytes of the communicated tensors in a step, each counted once as the full tensor of
    all ranks."""
    ranks: int
    """Number of ranks that take part."""
    messages: int = 1
    overlaps: float = 0.0
    """Fraction of the step's backward passes during which the communication takes place."""
    behind_scores: float | None = None
    """Fraction of the step's scores of attention that are computed while the messages are under
    way. None: the layers wait for them."""

    @property
    def sent(self) -> float:
        """Bytes that this rank sends on a ring."""
        if self.operation == "send":
            return float(self.size)
        return self.size * RING[self.operation] * (self.ranks - 1) / self.ranks


def step_traffic(run: PlannedRun, pp_rank: int = 0, cp_rank: int | None = None) -> list[Traffic]:
    """Communication of a rank in a step, at the run's final batch size.

    Args:
        run: The run.
        pp_rank: Pipeline rank.
        cp_rank: Context-parallel rank. None: the last one, which sends most.
    """
    messages = _Messages(
        run, pp_rank, run.config.parallel.cp_size - 1 if cp_rank is None else cp_rank
    )
    parts = (
        messages.gradients_and_parameters(),
        messages.of_tensor_parallelism(),
        messages.of_partial_gradients(),
        messages.of_ulysses(),
        messages.of_context(),
        messages.of_experts(),
        messages.of_stages(),
    )
    return [traffic for part in parts for traffic in part if traffic.size and traffic.ranks > 1]


class _Messages:
    def __init__(self, run: PlannedRun, pp_rank: int, cp_rank: int) -> None:
        config = run.config
        self.config = config
        self.model = config.model
        self.parallel = in_effect(config.parallel)
        self.inputs = run.inputs
        self.pp_rank = pp_rank
        self.cp_rank = cp_rank
        self.replicas = self.inputs.dp_size
        self.tp_size = self.inputs.tp_size
        self.count = run.micro_batches
        self.spec = run.spec
        self.rank_layers = run.rank_layers[pp_rank]
        self.own = self.parallel.stages_of_ranks[pp_rank]
        self.stages = len(run.stages)
        self.has_end = self.stages - 1 in self.own
        depths = config.model.mtp_num_layers * self.has_end
        self.layers = sum(run.stages[stage] for stage in self.own) + depths
        self.losses = depths + self.has_end
        """Losses, each with an output layer."""
        self.embeddings = depths + (0 in self.own)
        experts = [part for layer in self.rank_layers for part in layer.experts]
        self.sparse = len(experts)
        """Layers with experts."""
        self.shared = sum(part.shared is not None for part in experts)
        """Layers with shared experts."""
        hidden = config.model.hidden_size
        moe = config.moe
        self.share = moe.moe_router_topk * (moe.moe_latent_size or hidden) / hidden
        """Elements of a token's rows for its experts, relative to the hidden size."""
        self.tokens = run.tokens
        self.stream = self.tokens * config.model.hidden_size * self.inputs.param_bytes
        """Bytes of the hidden states of a micro-batch, [T, H]."""
        self.is_wide = config.model.fp32_residual_connection
        self.is_recomputed = config.recompute.recompute_granularity == "full"

    def gradients_and_parameters(self) -> Iterator[Traffic]:
        """Yields the traffic of data parallelism, by ZeRO stage. Experts have fewer replicas."""
        layers = self.rank_layers
        ep_size = self.config.expert_parallel_size
        size = self.spec.elements(layers)
        experts = self.spec.elements(layers, is_expert) if ep_size > 1 else 0
        again = self._gathered_again()
        yield from self._of_replicas(size - experts, "replicas", self.replicas, again)
        yield from self._of_replicas(experts, "expert_dp", self.replicas // ep_size)

    def _of_replicas(
        self, elements: int, axis: str, ranks: int, again: int = 0
    ) -> Iterator[Traffic]:
        stage = self.inputs.zero_stage
        zero = self.inputs.zero
        gradients = elements * self.inputs.reduction_bytes
        parameters = elements * self.inputs.param_bytes
        times = self.count if stage > 1 else 1
        buckets = times * -(-elements // int(zero.get("reduce_bucket_size", ALLREDUCE_BUCKET)))
        total = times * gradients
        if stage == 3:  # the parameters of each layer, for the forward and the backward pass
            gathers = self.count * 2
            size = gathers * parameters
            messages = gathers * (self.layers + 2)
            size += self.count * again * self.inputs.param_bytes
            yield Traffic("reduce-scatter", axis, "gradients", total, ranks, buckets, 1.0)
            yield Traffic("all-gather", axis, "parameters", size, ranks, messages, 1.0)
            return
        overlaps = float(bool(zero.get("overlap_comm")) and stage == 2)
        if self.inputs.sums_in_place:
            # Stages send hidden states meanwhile: the plan does not count on the overlap there.
            overlaps = self.inputs.immediate_grad_update * (self.stages == 1) / self.count
        yield Traffic("all-reduce", axis, "gradients", total, ranks, buckets, overlaps)
        if stage > 0:
            messages = -(-elements // int(zero.get("allgather_bucket_size", ALLREDUCE_BUCKET)))
            yield Traffic("all-gather", axis, "parameters", parameters, ranks, messages)

    def _gathered_again(self) -> int:
        """Elements that ZeRO-3 gathers again for multi-token prediction: the embedding at each
        depth, and an output layer for each loss. A tied embedding stays gathered."""
        depths = self.losses - 1
        ends = self.spec.after[-1:]
        if depths == 0 or not self.model.untie_embeddings_and_output_weights:
            return 0
        embedding = self.spec.elements(self.spec.before)
        return depths * embedding + self.losses * (self.spec.elements(ends) - embedding)

    def of_tensor_parallelism(self) -> Iterator[Traffic]:
        """Yields the all-reduces that the layers declare, one of the embedding and one of the
        output layer.

        The all-reduces of experts cover all rows that they compute.
        """
        size = self.tp_size
        hidden = "hidden states"
        ends = self.embeddings + self.losses
        passes = 3 if self.is_recomputed else 2
        is_whole = self.config.has_whole_experts
        expert_sums = 0 if is_whole else self.share * passes
        messages = self.count * self.losses
        statistics = messages * LOSS_STATISTICS * FP32 * self.tokens * size
        yield Traffic("all-gather", "tp", "loss statistics", statistics, size, messages)
        parts = [part for layer in self.rank_layers for part in layer.parts.values()]
        regions = sum(part.regions for part in parts)
        sums = self.count * passes * sum(part.statistics for part in parts)
        norm_bytes = sums * FP32 * self.tokens
        yield Traffic("all-reduce", "tp", "statistics of norms", norm_bytes, size, sums)
        latents = self.count * sum(part.latents > 0 for part in parts)
        features = "latent vectors"
        size_of_latents = sum(part.latents for part in parts) * self.tokens * self.count
        size_of_latents *= self.inputs.param_bytes
        # Their gradients are summed instead of those of the hidden states.
        replaced = sum(part.regions > 0 and not part.sums_inputs for part in parts)
        if not self.parallel.sequence_parallel:
            yield Traffic("all-reduce", "tp", features, size_of_latents, size, latents)
            # Recomputation ends before the last sum of a layer, which no gradient needs.
            sums = regions * passes - replaced - self.layers * self.is_recomputed + ends
            if self.is_recomputed and not self.config.moe.moe_shared_expert_gate:
                sums -= self.shared
            sums = self.count * (sums + round(self.sparse * (expert_sums - 2)))
            yield Traffic("all-reduce", "tp", hidden, sums * self.stream, size, sums)
            return
        enters = passes - 1
        yield Traffic(
            "all-gather", "tp", features, enters * size_of_latents, size, enters * latents
        )
        yield Traffic("reduce-scatter", "tp", features, size_of_latents, size, latents)
        # What a projection has gathered is gathered again for the gradient of its weight.
        # The gradients of tokens that are sent to whole experts are not gathered.
        gathers = regions * (passes + 1) + ends - self.sparse * (1 + is_whole) - passes * replaced
        scatters = (regions - self.sparse) * passes + ends - replaced
        for operation, what, messages in (
            ("all-reduce", "rows of experts", round(self.count * self.sparse * expert_sums)),
            ("all-gather", hidden, self.count * gathers),
            ("reduce-scatter", hidden, self.count * scatters),
        ):
            yield Traffic(operation, "tp", what, messages * self.stream, size, messages)

    def of_partial_gradients(self) -> Iterator[Traffic]:
        """Yields the traffic of replicated weights that act on this rank's tokens or heads."""
        kinds = {Partial.ALWAYS, *([Partial.SEQUENCE] if self.parallel.sequence_parallel else [])}
        parts = (".mlp.latent_",) if self.config.has_whole_experts else ()

        def is_partial(weight: Weight) -> bool:
            return weight.partial_over in kinds or any(part in weight.name for part in parts)

        elements = self.spec.elements(self.rank_layers, is_partial)
        size = self.count * elements * self.inputs.param_bytes
        what = "replicated parameters"
        yield Traffic("all-reduce", "tp", f"gradients of {what}", size, self.tp_size)

    def of_ulysses(self) -> Iterator[Traffic]:
        """Queries, keys and values before attention, its output after it, and their gradients."""
        passes = 3 if self.is_recomputed else 2
        messages = self.count * passes
        for exchange, layers in self._attention_by_exchange().items():
            ranks = self.parallel.ds_sequence_parallel_size * exchange.inner
            sizes = (sum(attention.exchanged(self.tp_size, ranks)) for attention in layers)
            size = messages * self.tokens * self.inputs.param_bytes * 2 * sum(sizes)
            axis = self._axes(exchange)[0]
            yield Traffic("all-to-all", axis, "heads", size, ranks, 4 * messages * len(layers))

    def of_context(self) -> Iterator[Traffic]:
        """Keys and values of context-parallel ranks, in each pass, and their gradients."""
        has_two_forward_passes = self.config.recompute.recompute_granularity is not None
        passes = 3 if has_two_forward_passes else 2
        what = "keys and values"
        by_exchange = self._attention_by_exchange()
        num_layers = sum(map(len, by_exchange.values()))
        for exchange, layers in by_exchange.items():
            ranks = exchange.outer
            if ranks == 1:
                continue
            share = len(layers) / num_layers
            axis = self._axes(exchange)[1]
            sharing = self.parallel.ds_sequence_parallel_size * exchange.inner
            sizes = [
                self.count
                * self.tokens
                * self.inputs.param_bytes
                * attention.exchanged_in_context(self.tp_size, sharing)
                for attention in layers
            ]
            if exchange.keys == ALL_GATHER:
                size = ranks * sum(sizes)
                messages = self.count * len(layers)
                yield Traffic(
                    "all-gather",
                    axis,
                    what,
                    passes * size,
                    ranks,
                    passes * messages,
                    behind_scores=share / ranks,  # of a rank's own keys
                )
                yield Traffic("all-to-all", axis, f"gradients of {what}", size, ranks, messages)
                continue
            total = 0
            messages = 0
            for attention, size in zip(layers, sizes, strict=True):
                sent, returned = self._sent_chunks(attention, exchange)
                total += (passes * sum(sent) + sum(returned)) * size // CHUNKS
                messages += passes * sum(map(bool, sent)) + sum(map(bool, returned))
            # The last step's keys are computed with when nothing more is sent.
            behind = share * (ranks - 1) / ranks
            yield Traffic(
                "send", axis, what, total, ranks, self.count * messages, behind_scores=behind
            )

    def _attention_by_exchange(self) -> dict[LayerExchange, list[AttentionSpec]]:
        """The attention layers of this rank by their exchange."""
        by_exchange: dict[LayerExchange, list[AttentionSpec]] = {}
        for layer in self.rank_layers:
            attention = layer.parts.get("attention")
            if isinstance(attention, AttentionSpec):
                exchange = self.parallel.exchange_of(int(layer.name.split(".")[1]))
                by_exchange.setdefault(exchange, []).append(attention)
        return by_exchange

    def _axes(self, exchange: LayerExchange) -> tuple[str, str]:
        """The groups of `axis_groups` whose ranks exchange slices for heads, and keys."""
        if not self.parallel.has_mixed_kinds or exchange.inner == 1:
            return "ulysses", "cp"
        return ("sequence", "cp") if exchange.outer == 1 else ("heads", "chunks")

    def _sent_chunks(
        self, attention: AttentionSpec, exchange: LayerExchange
    ) -> tuple[list[int], list[int]]:
        """Chunks that this rank sends to each other one with p2p, and whose gradients it returns to
        each."""
        ranks = exchange.outer
        cp_rank = self.cp_rank * ranks // self.parallel.cp_size
        width = self.model.seq_length // (CHUNKS * ranks)
        layout = ContextLayout(cp_rank, ranks, width, VisibleKeys(attention.rule.window))
        others = [rank for rank in range(ranks) if rank != cp_rank]
        sent = [len(layout.needs(rank, cp_rank)) for rank in others]
        returned = [len(layout.needs(cp_rank, rank)) for rank in others]
        return sent, returned

    def of_experts(self) -> Iterator[Traffic]:
        """Tokens to their experts and back, in both directions, if all experts get as many."""
        passes = 3 if self.is_recomputed else 2
        messages = self.count * self.sparse * 2 * passes
        size = self.stream * self.share
        ranks = self.config.expert_parallel_size
        axis = "ep"
        if self.config.has_whole_experts:
            weights = (
                self.count * self.sparse * self.tokens * self.config.moe.moe_router_topk * FP32
            )
            yield Traffic("all-gather", "tp", "gradients of routing", weights, self.tp_size)
            size = size / self.tp_size
            ranks *= self.tp_size
            axis = "ep_tp"
        yield Traffic("all-to-all", axis, "routed tokens", round(messages * size), ranks, messages)

    def of_stages(self) -> Iterator[Traffic]:
        """Hidden states to the next stage, their gradients to the one before."""
        stages = self.stages
        ranks = len(self.parallel.stages_of_ranks)
        if ranks == 1:
            return
        local = set(self.own)
        edges = [(stage, stage + 1) for stage in range(stages - 1)]
        # Both ends of an edge may be on one rank, as the middle ones of dualpipev.
        sends = sum((a in local) != (b in local) for a, b in edges)
        # With sequence parallelism, a slice from each tensor-parallel rank.
        part = self.stream // (self.tp_size if self.parallel.sequence_parallel else 1)
        part = part // self.inputs.param_bytes * FP32 if self.is_wide else part
        messages = self.count * sends
        yield Traffic("send", "pp", "hidden states", messages * part, ranks, messages)
        copied = {weight.name for weight in self.spec.after[-1].tied}
        if len({0, stages - 1} & local) == 1:
            size = FP32 * self.spec.elements(self.spec.before, lambda one: one.name in copied)
            what = "gradient of the tied embedding"
            yield Traffic("all-reduce", "embedding", what, size, 2, len(copied))
