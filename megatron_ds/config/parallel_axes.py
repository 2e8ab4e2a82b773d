"""The parallel axes of a run. Code that means every axis loops over them."""

from __future__ import annotations

from megatron_ds.dataclass import dataclass


@dataclass(frozen=True)
class ParallelAxis:
    """A parallel axis.

    Attributes:
        name: Its name in the mesh and in plans.
        title: Its name in texts, as in "tensor parallel".
        option: Field of `ParallelConfig` with its size; "" for data parallelism, whose size follows
            from the number of processes.
        size: Property of `ParallelConfig` with its size in effect, if other options change it; ""
            for the option's value. The options of the axes that split sequences, and their sizes in
            effect, have the same product.
        adds_processes: Its size is a factor of the number of processes. Experts subdivide the
            data-parallel ranks instead.
        splits_sequences: Its ranks have slices of the same sequences.
    """

    name: str
    title: str
    option: str
    size: str = ""
    adds_processes: bool = True
    splits_sequences: bool = False


AXES = (
    ParallelAxis("tp", "tensor", "tensor_model_parallel_size"),
    ParallelAxis("pp", "pipeline", "pipeline_model_parallel_size"),
    ParallelAxis("cp", "context", "context_parallel_size", "cp_size", splits_sequences=True),
    ParallelAxis(
        "ulysses",
        "sequence",
        "ds_sequence_parallel_size",
        "ulysses_size",
        splits_sequences=True,
    ),
    ParallelAxis("dp", "data", ""),
    ParallelAxis("ep", "expert", "expert_model_parallel_size", adds_processes=False),
)
RANK_ORDER = ("pp", "dp", "ep", "cp", "ulysses", "tp")
"""Axes along which ranks are numbered, the fastest one last. Along "dp", only data-parallel ranks
with the same experts."""
SEQUENCE_AXES = tuple(axis for axis in AXES if axis.splits_sequences)
REPLICA_OPTIONS = tuple(axis.option for axis in AXES if axis.option and axis.adds_processes)
"""Options whose product is the number of processes that compute a sample together."""
