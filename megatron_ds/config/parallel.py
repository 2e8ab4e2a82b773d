"""Options of model parallelism."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron_ds.config.checks import divisors, list_numbers, nearest_multiples
from megatron_ds.config.fields import ABOVE_ONE, option_field, when
from megatron_ds.config.problems import Problem, counted, with_value


@dataclass(frozen=True)
class ParallelConfig:
    """Model parallelism. The data-parallel size follows from the number of processes."""

    tensor_model_parallel_size: int = option_field(
        1, "degree of tensor parallelism", aliases=("model-parallel-size",), minimum=1
    )
    pipeline_model_parallel_size: int = option_field(
        1, "degree of pipeline parallelism; only 1 is supported", minimum=1
    )
    sequence_parallel: bool = option_field(
        False,
        "shard norms, dropout and residuals along the sequence over the tensor-parallel ranks",
        only_with=when(tensor_model_parallel_size=ABOVE_ONE),
    )

    def data_parallel_size(self, world_size: int) -> int:
        """Number of model replicas; 0 if the number of processes does not fit."""
        tp, pp = self.tensor_model_parallel_size, self.pipeline_model_parallel_size
        return world_size // (tp * pp) if tp > 0 and pp > 0 and world_size % (tp * pp) == 0 else 0

    def describe_data_parallel_size(self, world_size: int) -> str:
        """How the data-parallel size is computed, for messages."""
        terms = [counted(world_size, "process"), with_value(self, "tensor_model_parallel_size")]
        if self.pipeline_model_parallel_size != 1:
            terms.append(with_value(self, "pipeline_model_parallel_size"))
        return f"{' / '.join(terms)} = {self.data_parallel_size(world_size)}"

    def problems(self, world_size: int) -> Iterator[Problem]:
        tp = self.tensor_model_parallel_size
        if tp > 0 and world_size % tp:
            yield Problem(
                "world-size-not-divisible",
                settings=self,
                count_processes=counted(world_size, "process"),
                valid=list_numbers(divisors(world_size)),
                nearest_multiples=nearest_multiples(world_size, tp),
            )
