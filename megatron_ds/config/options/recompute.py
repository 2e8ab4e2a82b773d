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

    recompute_granularity: str | None = option_field(None, choices=("full", "selective"))
    checkpoint_num_layers: int = option_field(
        1,
        aliases=("recompute-num-layers", "activations-checkpoint-num-layers"),
        minimum=1,
        only_with=FULL,
    )
    deepspeed_activation_checkpointing: bool = option_field(False, only_with=FULL)
    partition_activations: bool = option_field(
        False,
        aliases=("distribute-checkpointed-activations", "distribute-saved-activations"),
        only_with=FULL,
    )
    checkpoint_in_cpu: bool = option_field(False, only_with=PARTITIONED)
    contiguous_checkpointing: bool = option_field(
        False, aliases=("contigious-checkpointing",), only_with=PARTITIONED
    )
    synchronize_each_layer: bool = option_field(False, only_with=BY_DEEPSPEED)
    profile_backward: bool = option_field(False, only_with=BY_DEEPSPEED)

    tiled_mlp: bool = option_field(False)

    @property
    def is_by_deepspeed(self) -> bool:
        return all(condition.holds(self) for condition in BY_DEEPSPEED)

    def problems(self, num_layers: int) -> Iterator[Problem]:
        if 0 < num_layers < in_effect(self).checkpoint_num_layers:
            yield Problem("recompute-layers-exceed-model", settings=self, num_layers=num_layers)
