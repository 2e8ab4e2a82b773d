"""Options of activation checkpointing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron_ds.config.fields import in_effect, option_field, when
from megatron_ds.config.problems import Problem

FULL = when(recompute_granularity="full")
PARTITIONED = (FULL, when(partition_activations=True))
BY_DEEPSPEED = (FULL, when(deepspeed_activation_checkpointing=True, partition_activations=True))


@dataclass(frozen=True)
class RecomputeConfig:
    """Activation checkpointing: recompute activations in the backward pass to save memory."""

    recompute_granularity: str | None = option_field(
        None,
        "full: recompute entire layers; selective: recompute the attention core only",
        choices=("full", "selective"),
    )
    checkpoint_num_layers: int = option_field(
        1,
        "number of layers between stored activations",
        aliases=("recompute-num-layers", "activations-checkpoint-num-layers"),
        minimum=1,
        only_with=FULL,
    )
    deepspeed_activation_checkpointing: bool = option_field(
        False, "use DeepSpeed's activation checkpointing", only_with=FULL
    )
    partition_activations: bool = option_field(
        False,
        "partition stored activations across tensor-parallel ranks, by DeepSpeed",
        aliases=("distribute-checkpointed-activations", "distribute-saved-activations"),
        only_with=FULL,
    )
    checkpoint_in_cpu: bool = option_field(
        False, "offload partitioned activations to host memory", only_with=PARTITIONED
    )
    contiguous_checkpointing: bool = option_field(
        False,
        "keep partitioned activations in one contiguous buffer",
        aliases=("contigious-checkpointing",),
        only_with=PARTITIONED,
    )
    synchronize_each_layer: bool = option_field(
        False, "synchronize the device at each checkpointed layer", only_with=BY_DEEPSPEED
    )
    profile_backward: bool = option_field(
        False, "time the recomputation in the backward pass", only_with=BY_DEEPSPEED
    )

    tiled_mlp: bool = option_field(
        False,
        "compute the MLP in slices of the sequence, of which the backward pass recomputes one at a "
        "time, for long sequences",
    )

    @property
    def is_by_deepspeed(self) -> bool:
        return all(condition.holds(self) for condition in BY_DEEPSPEED)

    def problems(self, num_layers: int) -> Iterator[Problem]:
        if 0 < num_layers < in_effect(self).checkpoint_num_layers:
            yield Problem("recompute-layers-exceed-model", settings=self, num_layers=num_layers)
