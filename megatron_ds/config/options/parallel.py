"""Options of model parallelism."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from megatron_ds.config.checks import divisors, list_numbers, nearest_multiples
from megatron_ds.config.fields import ABOVE_ONE, option_field, when
from megatron_ds.config.problems import Problem, counted, with_value

DUALPIPEV = "dualpipev"
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
class ParallelConfig:
    """Model parallelism. The data-parallel size follows from the number of processes."""

    tensor_model_parallel_size: int = option_field(1, aliases=("model-parallel-size",), minimum=1)
    pipeline_model_parallel_size: int = option_field(1, minimum=1)
    pp_partition_method: str = option_field(
        "type:transformer", metavar="METHOD", only_with=when(pipeline_model_parallel_size=ABOVE_ONE)
    )
    pipeline_schedule: str = option_field(
        "1f1b", choices=("1f1b", DUALPIPEV), only_with=when(pipeline_model_parallel_size=ABOVE_ONE)
    )
    sequence_parallel: bool = option_field(
        False, only_with=when(tensor_model_parallel_size=ABOVE_ONE)
    )
    ds_sequence_parallel_size: int = option_field(1, aliases=("context-parallel-size",), minimum=1)
    cp_comm_type: str = option_field(
        "a2a",
        choices=("a2a",),
        synonyms={"p2p": "a2a", "all_gather": "a2a", "allgather": "a2a", "a2a+p2p": "a2a"},
    )
    expert_model_parallel_size: int = option_field(
        1, aliases=("moe-expert-parallel-size",), minimum=1
    )
    expert_tensor_parallel_size: int | None = option_field(None, minimum=1)

    @property
    def has_whole_experts(self) -> bool:
        """Whether tensor-parallel ranks have different experts, instead of parts of each."""
        return self.expert_tensor_parallel_size == 1 < self.tensor_model_parallel_size

    @property
    def expert_data_ranks(self) -> int:
        """Data-parallel ranks over which the experts are distributed."""
        size = self.expert_model_parallel_size
        return size // self.tensor_model_parallel_size if self.has_whole_experts else size

    def data_parallel_size(self, world_size: int) -> int:
        """Number of ranks with different samples; 0 if the number of processes does not fit."""
        sizes = (
            self.tensor_model_parallel_size,
            self.pipeline_model_parallel_size,
            self.ds_sequence_parallel_size,
        )
        product = math.prod(sizes)
        return world_size // product if min(sizes) > 0 and world_size % product == 0 else 0

    def describe_data_parallel_size(self, world_size: int) -> str:
        """Describes the computation of the data-parallel size, for messages."""
        terms = [counted(world_size, "process"), with_value(self, "tensor_model_parallel_size")]
        terms += [
            with_value(self, name)
            for name in ("pipeline_model_parallel_size", "ds_sequence_parallel_size")
            if getattr(self, name) != 1
        ]
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
        tp, sp = self.tensor_model_parallel_size, self.ds_sequence_parallel_size
        pp = self.pipeline_model_parallel_size
        if tp > 0 and world_size % tp:
            yield Problem(
                "world-size-not-divisible",
                settings=self,
                count_processes=counted(world_size, "process"),
                valid=list_numbers(divisors(world_size)),
                nearest_multiples=nearest_multiples(world_size, tp),
            )
        elif min(tp, sp) > 0:
            yield from self._replica_problems(world_size)
        ep_size, dp_size = self.expert_model_parallel_size, self.data_parallel_size(world_size)
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
        tp, sp = self.tensor_model_parallel_size, self.ds_sequence_parallel_size
        pp, ranks = self.pipeline_model_parallel_size, tp * sp
        if world_size % ranks:
            stages = pp if pp > 0 and world_size % (tp * pp) == 0 else 1
            yield Problem(
                "world-size-not-divisible-by-sequence-parallel-size",
                settings=self,
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
