"""Completes the settings of a plan, which needs neither data nor a tokenizer. Imports no torch."""

from __future__ import annotations

import dataclasses
import math
import os
from typing import Any

from megatron_ds.config import Config
from megatron_ds.config.options.data import PER_SPLIT_DATA_FIELDS, TRAINING_DATA
from megatron_ds.config.problems import Problem, with_flags
from megatron_ds.dataclass import dataclass
from megatron_ds.engine.ds_config.fields import as_flag
from megatron_ds.model.declaration.architecture import run_spec

PLANNED_RATE = 1e-4
"""Learning rate of a plan, on which nothing depends."""
TOKENS = ((1e9, 2**19), (5e9, 2**20), (math.inf, 2**22))
"""Largest number of parameters, and tokens per step if nothing is known: about those of GPT-3's
sizes (Brown et al. 2020, table 2.1), and from seven billion on those of Llama 2 and 3."""
OTHER_DATA = {*PER_SPLIT_DATA_FIELDS["valid"], *PER_SPLIT_DATA_FIELDS["test"]}


def without_tokenizer(config: Config) -> Config:
    """Replaces a tokenizer whose files are missing here by one with --vocab-size ids."""
    options = config.tokenizer
    size = config.model.vocab_size
    is_remote = options.tokenizer_type == "HFTokenizer" and not os.path.exists(
        options.tokenizer_model or ""
    )
    if "vocab_size" in config.given and (is_remote or any(options.problems(size))):
        return config.with_values({"tokenizer_type": "NullTokenizer", "vocab_size": size - 1})
    return config


@dataclass(frozen=True)
class Completed:
    """The settings of a plan."""

    config: Config
    assumed: tuple[str, ...]
    """Flags that were not given."""
    samples: int | None
    """Samples of a step, if the layout is to be suggested. The configuration then has one
    micro-batch."""
    problems: list[Problem]


def completed(config: Config, world_size: int, *, is_host: bool) -> Completed:
    """Fills in what a plan does not depend on, and assumes what a command line leaves open.

    Args:
        config: Configuration of the flags and of the DeepSpeed file.
        world_size: Number of processes.
        is_host: Whether the devices are CPUs.
    """
    schedule = config.schedule
    problems = list[Problem]()
    samples = None
    filled = dict[str, Any]()
    assumed = dict[str, Any]()
    lengths = (schedule.train_iters, schedule.train_samples, schedule.train_tokens)
    if not any(lengths) and not schedule.stages:
        filled["train_iters"] = 1
    if config.given.isdisjoint({*TRAINING_DATA, "mock_data"}):
        field = "data_path" if config.given.isdisjoint(OTHER_DATA) else "train_data_path"
        filled[field] = ("planned",)
    if config.given.isdisjoint({"vocab_size", *vars(config.tokenizer)}):
        rows = config.model.pad_vocab_size_to
        if rows is None:
            problems.append(Problem("plan-needs-a-vocabulary"))
        # It has one more id.
        filled |= {"tokenizer_type": "NullTokenizer", "vocab_size": (rows or 2) - 1}
    if "lr" not in config.given | config.origins.keys():  # not the flags of a complete run
        filled["lr"] = PLANNED_RATE
        if config.precision.name == "fp32" and not is_host:
            assumed["bf16"] = True
    if not schedule.micro_batch_size:
        filled["micro_batch_size"] = 1
        if not (samples := schedule.global_batch_size):
            length = max(1, config.model.seq_length)
            tokens = _tokens_of_step(with_values(config, **filled), world_size)
            samples = max(1, round(tokens / length / world_size)) * world_size
            assumed["global_batch_size"] = samples
    config = with_values(config, **filled, **assumed)
    if samples is not None:
        config = config.with_values({"global_batch_size": None})
    flags = tuple(with_flags(as_flag(*item)) for item in assumed.items())
    return Completed(config, flags, samples, problems)


def _tokens_of_step(config: Config, world_size: int) -> int:
    """Tokens of a step of a model of this size; of invalid settings, which have none, the most."""
    is_valid = not config.problems(world_size)
    parameters = run_spec(config).elements() if is_valid else math.inf
    return next((tokens for most, tokens in TOKENS if parameters < most), TOKENS[-1][1])


def with_values(config: Config, **values: Any) -> Config:
    """A copy with other values, as if flags had set them."""
    changed = config.with_values(values)
    return dataclasses.replace(changed, given=config.given | values.keys())


def planned_tokens(config: Config, samples: int) -> float | None:
    """Tokens of a run with `samples` samples per step; None if its length is not given."""
    schedule = config.schedule
    if schedule.train_tokens is not None:
        return schedule.train_tokens
    total = schedule.train_samples or (schedule.train_iters or 0) * samples
    return total * config.model.seq_length if total > samples else None  # one step of `completed`
