"""Configuration of a run: frozen dataclasses of options, one per group.

Each field declares one option: type, default, help, valid range and flag. The command line is
derived from the fields, and no flag is declared elsewhere. `Config.problems` returns all invalid
options at once. Knows no torch, no argparse and no environment variable.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from megatron_ds.config.checkpoint import CheckpointConfig
from megatron_ds.config.data import PER_SPLIT_DATA_FIELDS, SPLIT_DATA_FIELDS, DataConfig
from megatron_ds.config.deepspeed import DeepSpeedConfig
from megatron_ds.config.fields import field_problems, ineffective, option_field
from megatron_ds.config.logging import LoggingConfig
from megatron_ds.config.model import ACTIVATIONS, GLU_ACTIVATIONS, ModelConfig
from megatron_ds.config.optimizer import OptimizerConfig
from megatron_ds.config.parallel import ParallelConfig
from megatron_ds.config.path_checks import file_problems, folder_problems
from megatron_ds.config.precision import PrecisionConfig
from megatron_ds.config.problems import Problem
from megatron_ds.config.recompute import RecomputeConfig
from megatron_ds.config.runtime import RuntimeConfig
from megatron_ds.config.schedule import SCHEDULE_LENGTHS, SCHEDULE_UNITS, ScheduleConfig
from megatron_ds.config.schedule_checks import schedule_problems
from megatron_ds.config.tokenizer import TOKENIZERS, TokenizerConfig

__all__ = [
    "ACTIVATIONS",
    "GLU_ACTIVATIONS",
    "GROUPS",
    "PER_SPLIT_DATA_FIELDS",
    "SCHEDULE_LENGTHS",
    "SCHEDULE_UNITS",
    "SPLIT_DATA_FIELDS",
    "TOKENIZERS",
    "CheckpointConfig",
    "Config",
    "DataConfig",
    "DeepSpeedConfig",
    "LoggingConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "PrecisionConfig",
    "RecomputeConfig",
    "RuntimeConfig",
    "ScheduleConfig",
    "TokenizerConfig",
    "field_problems",
    "file_problems",
    "flag_of",
    "folder_problems",
    "option_field",
]

GROUPS: dict[str, type] = {
    "model": ModelConfig,
    "parallel": ParallelConfig,
    "recompute": RecomputeConfig,
    "data": DataConfig,
    "tokenizer": TokenizerConfig,
    "optimizer": OptimizerConfig,
    "schedule": ScheduleConfig,
    "precision": PrecisionConfig,
    "deepspeed": DeepSpeedConfig,
    "checkpoint": CheckpointConfig,
    "logging": LoggingConfig,
    "runtime": RuntimeConfig,
}
"""The groups of `Config` in the order of --help."""


@dataclass(frozen=True)
class Config:
    """All options of a run. What changes during a run is in `TrainState`."""

    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    recompute: RecomputeConfig = field(default_factory=RecomputeConfig)
    data: DataConfig = field(default_factory=DataConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    deepspeed: DeepSpeedConfig = field(default_factory=DeepSpeedConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)
    given: frozenset[str] = frozenset()
    """Names of the fields set by the user."""
    origins: Mapping[str, str] = field(default_factory=dict, compare=False)
    """Where values come from that no flag set: by field, key and line of the DeepSpeed file."""
    deepspeed_file: Any = field(default=None, compare=False)
    """The parsed file of --deepspeed_config, so that it is read once."""

    def problems(self, world_size: int) -> list[Problem]:
        """Check all options.

        Args:
            world_size: Number of processes.

        Returns:
            Every problem; empty if the run can start.
        """
        found = {name: list(field_problems(getattr(self, name), self.given)) for name in GROUPS}
        infinite = [
            problem
            for problems in found.values()
            for problem in problems
            if problem.code == "not-finite"
        ]
        if infinite:
            return infinite  # comparisons with them mean nothing
        tp_size = self.parallel.tensor_model_parallel_size
        dp_size = self.parallel.data_parallel_size(world_size)
        related: dict[str, Iterator[Problem]] = {
            "model": self.model.problems(tp_size),
            "parallel": self.parallel.problems(world_size),
            "recompute": self.recompute.problems(self.model.num_layers),
            "data": self.data.problems(),
            "tokenizer": self.tokenizer.problems(
                self.model.vocab_size
                if self.model.vocab_size or "vocab_size" in self.given
                else None
            ),
            "optimizer": self.optimizer.problems(),
            "schedule": schedule_problems(
                self.schedule, dp_size, self.parallel.describe_data_parallel_size(world_size)
            ),
            "precision": self.precision.problems(),
            "deepspeed": self.deepspeed.problems(),
            "checkpoint": self.checkpoint.problems(),
            "logging": self.logging.problems(),
        }
        return [problem for name in GROUPS for problem in (*found[name], *related.get(name, ()))]

    def warnings(self) -> Iterator[Problem]:
        """Warn of flags that have no effect next to the others."""
        values = SimpleNamespace(
            **{
                name: value
                for group in GROUPS
                for name, value in vars(getattr(self, group)).items()
            }
        )
        for group in GROUPS:
            yield from ineffective(getattr(self, group), self.given, values)

    def with_origin(self, problem: str) -> str:
        """Add to a problem where the values of its fields come from, if no flag set them."""
        named = "; ".join(
            f"{flag_of(name)} is {origin}"
            for name, origin in self.origins.items()
            if name in getattr(problem, "fields", ())
            or re.search(re.escape(flag_of(name)) + r"(?![\w-])", problem)
        )
        if not named:
            return problem
        if isinstance(problem, Problem):
            return problem.extended(f" ({named})")
        return f"{problem} ({named})"

    def with_vocab(self, vocab_size: int) -> Config:
        """A copy with the vocabulary size of the tokenizer."""
        return dataclasses.replace(
            self, model=dataclasses.replace(self.model, vocab_size=vocab_size)
        )

    def final_global_batch_size(self, dp_size: int) -> int:
        """Samples per optimizer step at the end of the run."""
        steps = self.schedule.batch_size_steps
        if steps:
            return steps[-1][1]
        return self.schedule.global_batch_size or self.schedule.micro_batch_size * dp_size

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Plain values by group, for JSON."""
        return {name: dataclasses.asdict(getattr(self, name)) for name in GROUPS}


def flag_of(name: str) -> str:
    """The main flag of a field of `Config`.

    Raises:
        KeyError: If no group has the field.
    """
    for group in GROUPS.values():
        for item in dataclasses.fields(group):
            if item.name == name:
                if item.metadata["flag"]:
                    return f"--{item.metadata['flag']}"
                negative = "no-" if item.default is True else ""
                return f"--{negative}{name.replace('_', '-')}"
    raise KeyError(name)
