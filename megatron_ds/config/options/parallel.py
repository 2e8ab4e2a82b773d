"""Options of parallelism and of activation checkpointing."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence

from megatron_ds.config.checks import divisors, list_numbers, nearest_multiples
from megatron_ds.config.fields import ABOVE_ONE, Decides, in_effect, option_field, when
from megatron_ds.config.parallel_axes import REPLICA_OPTIONS, SEQUENCE_AXES, ParallelAxis
from megatron_ds.config.problems import Problem, counted, with_value
from megatron_ds.dataclass import dataclass

DUALPIPEV = "dualpipev"
P2P = "p2p"
ALL_GATHER = "all_gather"
ALL_TO_ALL = "a2a"
HIERARCHICAL = "a2a+p2p"
SHARES_SEQUENCES = when(context_parallel_size=ABOVE_ONE)
BY_TYPE = "type:"
"""Beginning of a partition method that counts layers of some kinds."""


LAYER_KINDS = {
    "embedding": "EmbeddingPipe",
    "layers": "ParallelTransformerLayerPipe",
    "final_norm": "NormPipe",
    "predictions": "MTPPipe",
    "head": "LMHeadPipe",
}
"""Other frameworks' names of our layers, without their numbers."""


@dataclass(frozen=True)
class LayerExchange:
    """How the ranks of a sequence share the attention of a layer.

    Attributes:
        keys: Kind of exchange of keys and values, P2P or ALL_GATHER.
        inner: Context-parallel ranks that exchange slices for heads, besides those of Ulysses.
        outer: Groups of them that exchange keys and values.
    """

    keys: str
    inner: int
    outer: int


@dataclass(frozen=True)
class ParallelConfig:
    """Model parallelism. The data-parallel size follows from the number of processes."""

    DECIDES = Decides.LAYOUT

    tensor_model_parallel_size: int = option_field(
        1, aliases=("model-parallel-size",), minimum=1, common=True
    )
    """Degree of tensor parallelism."""
    pipeline_model_parallel_size: int = option_field(1, minimum=1, common=True)
    """Number of pipeline stages, at most one per transformer layer."""
    pp_partition_method: str = option_field(
        "type:transformer", metavar="METHOD", only_with=when(pipeline_model_parallel_size=ABOVE_ONE)
    )
    """What pipeline stages have about the same number of: parameters, uniform (layers of any kind),
    type:REGEX (layers of matching kinds: EmbeddingPipe, ParallelTransformerLayerPipe, NormPipe,
    LMHeadPipe); or the transformer layers of each stage, such as 5,6,5."""
    pipeline_schedule: str = option_field(
        "1f1b", choices=("1f1b", DUALPIPEV), only_with=when(pipeline_model_parallel_size=ABOVE_ONE)
    )
    """Order of a step's passes: 1f1b with one stage on each pipeline rank, or dualpipev with two,
    which idles less and needs at least two micro-batches per rank in every step."""
    sequence_parallel: bool = option_field(
        False, only_with=when(tensor_model_parallel_size=ABOVE_ONE)
    )
    """Shard norms, dropout and residuals along the sequence over the tensor-parallel ranks."""
    context_parallel_size: int = option_field(1, minimum=1, common=True)
    """Degree of context parallelism: ranks that share every sequence, for any number of heads. Each
    has two chunks of it, so that all multiply as much."""
    cp_comm_type: tuple[str, ...] = option_field(
        (P2P,),
        nargs="*",
        choices=(P2P, ALL_GATHER, ALL_TO_ALL, HIERARCHICAL),
        synonyms={"allgather": "all_gather"},
        metavar="KIND",
        only_with=SHARES_SEQUENCES,
    )
    """How context-parallel ranks exchange what attention needs, one value or one per layer: p2p
    passes keys and values around a ring, all_gather collects them, a2a exchanges slices for heads,
    as --ds-sequence-parallel-size, and a2a+p2p does so in groups between which keys and values are
    passed around."""
    hierarchical_context_parallel_sizes: tuple[int, ...] | None = option_field(
        None, nargs="*", metavar="SIZE", minimum=1, only_with=SHARES_SEQUENCES
    )
    """Sizes of a2a+p2p: of the groups that exchange slices for heads, and their number; the product
    is --context-parallel-size."""
    ds_sequence_parallel_size: int = option_field(1, minimum=1)
    """Degree of DeepSpeed-Ulysses sequence parallelism: ranks that share every sequence, and inside
    attention the heads. With --context-parallel-size, each of its ranks is such a group."""
    expert_model_parallel_size: int = option_field(
        1, aliases=("moe-expert-parallel-size",), minimum=1
    )
    """Degree of expert parallelism: the experts are distributed over this many data-parallel ranks,
    with --expert-tensor-parallel-size 1 over data- and tensor-parallel ranks."""
    expert_tensor_parallel_size: int | None = option_field(None, minimum=1)
    """Degree of tensor parallelism of the experts: --tensor-model-parallel-size (the default), by
    which their width is sharded, or 1, with which tensor-parallel ranks have different experts."""

    @property
    def has_whole_experts(self) -> bool:
        """Whether tensor-parallel ranks have different experts, instead of parts of each."""
        return self.expert_tensor_parallel_size == 1 < self.tensor_model_parallel_size

    @property
    def expert_data_ranks(self) -> int:
        """Data-parallel ranks over which the experts are distributed."""
        size = self.expert_model_parallel_size
        return size // self.tensor_model_parallel_size if self.has_whole_experts else size

    def size_of(self, axis: ParallelAxis) -> int:
        """The size in effect of an axis with an option."""
        size: int = getattr(self, axis.size or axis.option)
        return size

    @property
    def has_mixed_kinds(self) -> bool:
        """Whether some layers exchange slices for heads in other groups than others do.

        Ranks then have chunks of the sequences, whatever the kind of a layer.
        """
        kinds = {*self.cp_comm_type}
        return len(kinds) > 1 and not kinds.isdisjoint((ALL_TO_ALL, HIERARCHICAL))

    @property
    def _hierarchical_sizes(self) -> tuple[int, int]:
        """Ranks of a group of a2a+p2p, and the number of groups; of sizes with an error, as p2p."""
        sizes = self.hierarchical_context_parallel_sizes or ()
        size = self.context_parallel_size
        return (sizes[0], sizes[1]) if len(sizes) == 2 and math.prod(sizes) == size else (1, size)

    def _exchange(self, name: str) -> LayerExchange:
        if name == ALL_TO_ALL:
            return LayerExchange(P2P, self.context_parallel_size, 1)
        if name == HIERARCHICAL:
            return LayerExchange(P2P, *self._hierarchical_sizes)
        return LayerExchange(name, 1, self.context_parallel_size)

    def exchange_of(self, layer: int) -> LayerExchange:
        """The exchange of a layer."""
        return self._exchange(kind_of_layer(self.cp_comm_type, layer))

    @property
    def ulysses_size(self) -> int:
        """Ranks with consecutive slices of the same sequences, which share the heads inside
        attention; in layers with a2a of a mixture, with other context-parallel ranks."""
        inner = 1 if self.has_mixed_kinds else self.exchange_of(0).inner
        return self.ds_sequence_parallel_size * inner

    @property
    def cp_size(self) -> int:
        """Ranks, or groups of `ulysses_size` ranks, with chunks of the same sequences."""
        return self.context_parallel_size if self.has_mixed_kinds else self.exchange_of(0).outer

    @property
    def cp_inner_size(self) -> int:
        """Of the `cp_size` ranks, those that exchange slices for heads in layers with a2a+p2p."""
        is_used = self.has_mixed_kinds and HIERARCHICAL in self.cp_comm_type
        return self._hierarchical_sizes[0] if is_used else 1

    @property
    def head_sharing_sizes(self) -> list[int]:
        """Ranks with slices of the same sequences that share the heads, of the different layers."""
        inner = {self._exchange(name).inner for name in self.cp_comm_type or (P2P,)}
        return sorted(self.ds_sequence_parallel_size * size for size in inner)

    @property
    def head_ranks(self) -> int:
        """Ranks that share the heads inside attention, in the layers with the most."""
        return self.tensor_model_parallel_size * self.head_sharing_sizes[-1]

    @property
    def sequence_ranks(self) -> int:
        """Ranks that have slices of the same sequences."""
        return math.prod(getattr(self, axis.option) for axis in SEQUENCE_AXES)

    def data_parallel_size(self, world_size: int) -> int:
        """Number of ranks with different samples; 0 if the number of processes does not fit."""
        sizes = [getattr(self, option) for option in REPLICA_OPTIONS]
        product = math.prod(sizes)
        return world_size // product if min(sizes) > 0 and world_size % product == 0 else 0

    def describe_data_parallel_size(self, world_size: int) -> str:
        """Describes the computation of the data-parallel size, for messages."""
        first, *others = REPLICA_OPTIONS
        terms = [counted(world_size, "process"), with_value(self, first)]
        terms += [with_value(self, name) for name in others if getattr(self, name) != 1]
        return f"{' / '.join(terms)} = {self.data_parallel_size(world_size)}"

    @property
    def stages_of_ranks(self) -> tuple[tuple[int, ...], ...]:
        """The stages of each pipeline rank, in the order of a forward pass."""
        ranks = range(self.pipeline_model_parallel_size)
        if self.pipeline_schedule != DUALPIPEV or len(ranks) == 1:
            return tuple((rank,) for rank in ranks)
        return tuple((rank, 2 * len(ranks) - 1 - rank) for rank in ranks)

    @property
    def num_stages(self) -> int:
        """Parts of the model, each a sequence of layers."""
        return sum(map(len, self.stages_of_ranks))

    @property
    def given_layers_per_stage(self) -> tuple[int, ...] | None:
        """Transformer layers of each stage, if the partition method lists them."""
        if re.fullmatch(r"\d+(,\d+)*", self.pp_partition_method) is None:
            return None
        return tuple(map(int, self.pp_partition_method.split(",")))

    @property
    def partition_pattern(self) -> re.Pattern[str] | None:
        """Kinds of layers that the partition method counts; None for all.

        Raises:
            re.error: If it is not a regular expression.
        """
        if not self.pp_partition_method.startswith(BY_TYPE):
            return None
        return re.compile(self.pp_partition_method.removeprefix(BY_TYPE), re.IGNORECASE)

    def problems(
        self, world_size: int, num_layers: int, *, has_experts: bool = False
    ) -> Iterator[Problem]:
        """Check the sizes against the number of processes.

        Args:
            world_size: Number of processes.
            num_layers: Transformer layers of the model.
            has_experts: Whether the model is a mixture of experts.
        """
        tp = self.tensor_model_parallel_size
        pp = self.pipeline_model_parallel_size
        yield from self._context_problems(num_layers)
        if tp > 0 and world_size % tp:
            yield Problem(
                "world-size-not-divisible",
                settings=self,
                count_processes=counted(world_size, "process"),
                valid=list_numbers(divisors(world_size)),
                nearest_multiples=nearest_multiples(world_size, tp),
            )
        elif min(tp, *(getattr(self, axis.option) for axis in SEQUENCE_AXES)) > 0:
            yield from self._replica_problems(world_size)
        ep_size = self.expert_model_parallel_size
        dp_size = self.data_parallel_size(world_size)
        ranks = self.expert_data_ranks
        if self.expert_tensor_parallel_size not in (None, 1, tp):
            yield Problem("expert-tensor-parallel-size-differs", settings=self)
        elif (
            has_experts and self.has_whole_experts and (ep_size % tp or not self.sequence_parallel)
        ):
            yield Problem("whole-experts-misfit", settings=self)
        elif ep_size > 1 and not has_experts:
            yield Problem("expert-parallel-size-without-experts", settings=self)
        elif ranks > 0 and dp_size % ranks:
            yield Problem(
                "data-parallel-size-not-divisible-by-expert-parallel-size",
                settings=self,
                described=self.describe_data_parallel_size(world_size),
                valid=list_numbers(divisors(dp_size)),
            )
        if pp > 0 and self.num_stages > max(num_layers, 1):
            yield Problem("more-stages-than-layers", settings=self, num_layers=num_layers)
        elif pp > 1:
            yield from self._partition_problems(num_layers)

    def _replica_problems(self, world_size: int) -> Iterator[Problem]:
        """Problems of the sizes that multiply the tensor-parallel one, which divides the ranks."""
        tp = self.tensor_model_parallel_size
        pp = self.pipeline_model_parallel_size
        ranks = tp * self.sequence_ranks
        if world_size % ranks:
            stages = pp if pp > 0 and world_size % (tp * pp) == 0 else 1
            options = (axis.option for axis in SEQUENCE_AXES)
            names = [name for name in options if getattr(self, name) > 1]
            yield Problem(
                "world-size-not-divisible-by-sequence-parallel-size",
                *names,
                "tensor_model_parallel_size",
                sizes=" x ".join(
                    with_value(self, name) for name in ("tensor_model_parallel_size", *names)
                ),
                count_processes=counted(world_size, "process"),
                product=ranks,
                valid=list_numbers(divisors(world_size // (tp * stages))),
            )
            ranks = tp
        if pp > 0 and world_size % (ranks * pp):
            yield Problem(
                "world-size-not-divisible-by-stages",
                settings=self,
                ranks=ranks,
                count_processes=counted(world_size, "process"),
                valid=list_numbers(divisors(world_size // ranks)),
                nearest_multiples=nearest_multiples(world_size, ranks * pp),
            )

    def _context_problems(self, num_layers: int) -> Iterator[Problem]:
        """Problems of --cp-comm-type."""
        size = self.context_parallel_size
        kinds = self.cp_comm_type
        sizes = self.hierarchical_context_parallel_sizes
        if size <= 1:
            return
        if len(kinds) not in (1, num_layers):
            yield Problem("context-parallel-kinds-per-layer", settings=self, num_layers=num_layers)
        if HIERARCHICAL in kinds and (sizes is None or len(sizes) != 2 or math.prod(sizes) != size):
            yield Problem("hierarchical-sizes-misfit", settings=self)

    def _partition_problems(self, num_layers: int) -> Iterator[Problem]:
        """Problems of --pp-partition-method."""
        layers = self.given_layers_per_stage
        if layers is not None:
            if len(layers) != self.num_stages or sum(layers) != num_layers or 0 in layers:
                yield Problem("pp-partition-list", settings=self, num_layers=num_layers)
            return
        try:
            pattern = self.partition_pattern
        except re.error as error:
            yield Problem("pp-partition-pattern", settings=self, error=error)
            return
        kinds = LAYER_KINDS.values()
        if pattern is None and self.pp_partition_method not in ("parameters", "uniform"):
            yield Problem("pp-partition-method", settings=self)
        elif pattern is not None and not any(map(pattern.search, kinds)):
            yield Problem("pp-partition-type", settings=self, kinds=", ".join(kinds))


def kind_of_layer(kinds: Sequence[str], layer: int) -> str:
    """The kind of exchange of a layer, of one for all or one per transformer layer.

    Layers of multi-token prediction have the last layer's. Without any, which is an error, p2p.
    """
    return kinds[min(layer, len(kinds) - 1)] if kinds else P2P


FULL = when(recompute_granularity="full")
PARTITIONED = (FULL, when(partition_activations=True))
BY_DEEPSPEED = (FULL, when(deepspeed_activation_checkpointing=True, partition_activations=True))


@dataclass(frozen=True)
class RecomputeConfig:
    """Activation checkpointing: recompute activations in the backward pass to save memory."""

    DECIDES = Decides.LAYOUT

    recompute_granularity: str | None = option_field(
        None, choices=("full", "selective"), common=True
    )
    """full: recompute entire layers; selective: recompute the attention core only."""
    checkpoint_num_layers: int = option_field(
        1,
        aliases=("recompute-num-layers", "activations-checkpoint-num-layers"),
        minimum=1,
        only_with=FULL,
    )
    """Number of layers between stored activations."""
    deepspeed_activation_checkpointing: bool = option_field(False, only_with=FULL)
    """Use DeepSpeed's activation checkpointing."""
    partition_activations: bool = option_field(
        False,
        aliases=("distribute-checkpointed-activations", "distribute-saved-activations"),
        only_with=FULL,
    )
    """Partition stored activations across tensor-parallel ranks, by DeepSpeed."""
    checkpoint_in_cpu: bool = option_field(False, only_with=PARTITIONED)
    """Offload partitioned activations to host memory."""
    contiguous_checkpointing: bool = option_field(
        False, aliases=("contigious-checkpointing",), only_with=PARTITIONED
    )
    """Keep partitioned activations in one contiguous buffer."""
    synchronize_each_layer: bool = option_field(False, only_with=BY_DEEPSPEED)
    """Synchronize the device at each checkpointed layer."""
    profile_backward: bool = option_field(False, only_with=BY_DEEPSPEED)
    """Time the recomputation in the backward pass."""

    tiled_mlp: bool = option_field(False)
    """Compute the MLP in slices of the sequence, of which the backward pass recomputes one at a
    time, for long sequences."""

    @property
    def is_by_deepspeed(self) -> bool:
        return all(condition.holds(self) for condition in BY_DEEPSPEED)

    def problems(self, num_layers: int) -> Iterator[Problem]:
        if 0 < num_layers < in_effect(self).checkpoint_num_layers:
            yield Problem("recompute-layers-exceed-model", settings=self, num_layers=num_layers)
