"""Configuration of a run: frozen dataclasses of options, one per group.

Each field declares one option: type, default, help, valid range, flag, and what it decides. The
command line is derived from the fields, and no flag is declared elsewhere. `Config.problems`
returns all invalid options at once. Knows no torch, no argparse and no environment variable.
"""

from __future__ import annotations

from megatron_ds.config.config import (
    GROUP_OF_FIELD,
    GROUPS,
    MODEL_SIZE_FIELDS,
    Config,
    fields_in_phase,
    fields_that_decide,
    fields_that_only_decide,
    flag_of,
)
from megatron_ds.config.model.experts import MoEConfig
from megatron_ds.config.model.model import ModelConfig
from megatron_ds.config.options.checkpoint import CheckpointConfig
from megatron_ds.config.options.data import DataConfig
from megatron_ds.config.options.deepspeed import DeepSpeedConfig
from megatron_ds.config.options.evaluation import EvaluationConfig
from megatron_ds.config.options.logging import (
    LoggingConfig,
    ProfilingConfig,
    RerunConfig,
    StoppingConfig,
)
from megatron_ds.config.options.optimizer import OptimizerConfig
from megatron_ds.config.options.parallel import ParallelConfig, RecomputeConfig
from megatron_ds.config.options.precision import PrecisionConfig
from megatron_ds.config.options.runtime import RuntimeConfig
from megatron_ds.config.options.schedule import ScheduleConfig
from megatron_ds.config.options.tokenizer import TokenizerConfig

__all__ = [
    "GROUPS",
    "GROUP_OF_FIELD",
    "MODEL_SIZE_FIELDS",
    "CheckpointConfig",
    "Config",
    "DataConfig",
    "DeepSpeedConfig",
    "EvaluationConfig",
    "LoggingConfig",
    "MoEConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "PrecisionConfig",
    "ProfilingConfig",
    "RecomputeConfig",
    "RerunConfig",
    "RuntimeConfig",
    "ScheduleConfig",
    "StoppingConfig",
    "TokenizerConfig",
    "fields_in_phase",
    "fields_that_decide",
    "fields_that_only_decide",
    "flag_of",
]
