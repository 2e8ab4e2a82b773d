"""The public names of the package: a run with parts of its own, see docs/training/extending.md.

Imports no torch; `megatron_ds.extend.layers` has the names that need it.
"""

from megatron_ds.config import Config
from megatron_ds.data.own.dataset_request import DatasetRequest
from megatron_ds.train_state import StepResult, TrainState
from megatron_ds.training.extensions import Callback, Extensions, RunControl
from megatron_ds.training.records import EvalRecord, IntervalRecord, Logger, StepRecord, TaskRecord
from megatron_ds.training.run import pretrain
from megatron_ds.training.run_record import RunRecord

__all__ = [
    "Callback",
    "Config",
    "DatasetRequest",
    "EvalRecord",
    "Extensions",
    "IntervalRecord",
    "Logger",
    "RunControl",
    "RunRecord",
    "StepRecord",
    "StepResult",
    "TaskRecord",
    "TrainState",
    "pretrain",
]
