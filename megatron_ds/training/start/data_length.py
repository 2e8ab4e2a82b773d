"""The length of a run that follows from its data: --train-data-exact-num-epochs."""

from __future__ import annotations

import dataclasses

from megatron_ds.config import Config, DataConfig
from megatron_ds.config.fields import exclusive_problem
from megatron_ds.config.options.data import EPOCHS
from megatron_ds.config.problems import Problem, UserError
from megatron_ds.data.build_datasets import exact_train_samples
from megatron_ds.data.remote.token_cache import TokenCache
from megatron_ds.data.validation import DataFiles
from megatron_ds.launch import environment

UNKNOWN = 1 << 30
"""Samples of a run whose data has problems, which are reported with all others."""


def open_data(options: DataConfig) -> DataFiles:
    """The data files of a run. Files at URLs have a cache on this node."""
    folder = options.object_storage_cache_path
    folder = folder and environment.expand_variables(folder)
    return DataFiles(options, TokenCache(folder, options.object_storage_cache_gb))


def with_exact_epochs(config: Config) -> tuple[Config, list[Problem]]:
    """The configuration with --train-samples by --train-data-exact-num-epochs, and its problems."""
    epochs = config.data.train_data_exact_num_epochs
    schedule = config.schedule
    is_named = not (config.data.mock_data or "dataset" in config.custom_parts)
    if epochs is None or not is_named or schedule.stages:
        return config, []
    lengths = ("train_iters", "train_samples", "train_tokens")
    reason = "the data determines the length of the run"
    problems = [
        exclusive_problem(EPOCHS, name, reason=reason)
        for name in lengths
        if getattr(schedule, name)
    ]
    if problems or config.model.seq_length < 1 or epochs < 1:
        return config, problems
    try:
        samples = exact_train_samples(open_data(config.data), config.model.seq_length, epochs)
    except UserError:
        samples = UNKNOWN
    filled = dataclasses.replace(schedule, train_samples=samples)
    return dataclasses.replace(config, schedule=filled), []
