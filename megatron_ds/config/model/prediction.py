"""Options of multi-token prediction."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_ds.config.fields import NON_ZERO, option_field, when


@dataclass(frozen=True)
class PredictionConfig:
    """Multi-token prediction."""

    mtp_num_layers: int = option_field(
        0,
        "further tokens that training predicts at each position as DeepSeek-V3 does, each by a "
        "transformer layer of its own",
        minimum=0,
    )
    mtp_loss_scaling_factor: float = option_field(
        0.1,
        "factor of the mean of the losses of --mtp-num-layers; the logged loss is without them",
        minimum=0,
        only_with=when(mtp_num_layers=NON_ZERO),
    )
