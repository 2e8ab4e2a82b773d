"""Options of model parallelism."""

from __future__ import annotations

import math
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
    ds_sequence_parallel_size: int = option_field(
        1,
        "degree of DeepSpeed-Ulysses sequence parallelism: ranks that share every sequence, and "
        "inside attention the heads",
        aliases=("context-parallel-size",),
        minimum=1,
    )
    cp_comm_type: str = option_field(
        "a2a",
        "how sequence-parallel ranks exchange what attention needs; all-to-all is the only way",
        choices=("a2a",),
    )
    expert_model_parallel_size: int = option_field(
        1,
        "degree of expert parallelism: the experts are distributed over this many data-parallel "
        "ranks",
        aliases=("moe-expert-parallel-size",),
        minimum=1,
    )

    def data_parallel_size(self, world_size: int) -> int:
        """Number of ranks with different samples; 0 if the number of processes does not fit."""
        sizes = self._sizes
        product = math.prod(sizes)
        return world_size // product if min(sizes) > 0 and world_size % product == 0 else 0

    def describe_data_parallel_size(self, world_size: int) -> str:
        """How the data-parallel size is computed, for messages."""
        terms = [counted(world_size, "process"), with_value(self, "tensor_model_parallel_size")]
        terms += [
            with_value(self, name)
            for name in ("pipeline_model_parallel_size", "ds_sequence_parallel_size")
            if getattr(self, name) != 1
        ]
        return f"{' / '.join(terms)} = {self.data_parallel_size(world_size)}"

    def problems(self, world_size: int, *, has_experts: bool = False) -> Iterator[Problem]:
        """Check the sizes against the number of processes.

        Args:
            world_size: Number of processes.
            has_experts: Whether the model is a mixture of experts.
        """
        tp, sp = self.tensor_model_parallel_size, self.ds_sequence_parallel_size
        if tp > 0 and world_size % tp:
            yield Problem(
                "world-size-not-divisible",
                settings=self,
                count_processes=counted(world_size, "process"),
                valid=list_numbers(divisors(world_size)),
                nearest_multiples=nearest_multiples(world_size, tp),
            )
        elif tp > 0 and sp > 0 and world_size % (tp * sp):
            yield Problem(
                "world-size-not-divisible-by-sequence-parallel-size",
                settings=self,
                count_processes=counted(world_size, "process"),
                product=tp * sp,
                valid=list_numbers(divisors(world_size // tp)),
            )
        ep_size, dp_size = self.expert_model_parallel_size, self.data_parallel_size(world_size)
        if ep_size > 1 and not has_experts:
            yield Problem("expert-parallel-size-without-experts", settings=self)
        elif ep_size > 0 and dp_size % ep_size:
            yield Problem(
                "data-parallel-size-not-divisible-by-expert-parallel-size",
                settings=self,
                described=self.describe_data_parallel_size(world_size),
                valid=list_numbers(divisors(dp_size)),
            )

    @property
    def _sizes(self) -> tuple[int, ...]:
        """Degrees of the kinds of parallelism whose ranks share samples."""
        return (
            self.tensor_model_parallel_size,
            self.pipeline_model_parallel_size,
            self.ds_sequence_parallel_size,
        )
