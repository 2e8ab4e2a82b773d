"""Options of multi-token prediction."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_ds.config.fields import NON_ZERO, option_field, when


@dataclass(frozen=True)
class PredictionConfig:
    """Multi-token prediction."""

    mtp_num_layers: int = option_field(0, minimum=0)
    mtp_loss_scaling_factor: float = option_field(
        0.1, minimum=0, only_with=when(mtp_num_layers=NON_ZERO)
    )
