"""Builds the datasets of a run, with their indexes cached on disk.

Shared by runs and the program that builds the indexes before a run. Knows no ranks and no torch.
"""

from __future__ import annotations

import dataclasses

from megatron_ds.config import Config
from megatron_ds.config.stages import stage_names
from megatron_ds.data.blend.blend_history import BlendHistory
from megatron_ds.data.build_datasets import Datasets, build_datasets
from megatron_ds.data.dataset_request import BuildDataset
from megatron_ds.data.fill_in_middle import FillInMiddle
from megatron_ds.data.gpt_dataset import TokenDataset, TransformedDataset
from megatron_ds.data.map_dataset import MockDataset, build_own_datasets
from megatron_ds.run_stages import RunStages
from megatron_ds.tokenizer import Tokenizer
from megatron_ds.train_state import TrainState
from megatron_ds.training.start.preflight import RunInputs


def build_stage_data(
    config: Config,
    inputs: RunInputs,
    dp_size: int,
    state: TrainState,
    history: BlendHistory | None,
    own_data: BuildDataset | None = None,
) -> Datasets:
    """Builds the datasets of the stage of a state.

    Args:
        config: Configuration of the run.
        inputs: Its tokenizer and files.
        dp_size: Data-parallel size.
        state: State before the first step.
        history: What was read before it.
        own_data: Builds the datasets of a program that brings its own.
    """
    stages, save = RunStages(config, dp_size), inputs.plan.folders.local_save
    config, num_samples = stages.at(state), stages.planned_samples(state)
    names = stage_names(stages.config)
    own_data = own_data or (MockDataset if config.data.mock_data else None)
    if own_data is not None:
        return build_own_datasets(
            own_data,
            seq_length=config.model.seq_length,
            seed=config.runtime.seed,
            num_samples=num_samples,
            tokenizer=inputs.tokenizer,
            history=history,
            consumed=state.consumed_samples,
        )
    data = build_datasets(
        inputs.data[state.stage if names else 0],
        seq_length=config.model.seq_length,
        seed=config.runtime.seed,
        num_samples=num_samples,
        tokenizer_fingerprint=inputs.tokenizer.fingerprint.digest,
        vocab_size=inputs.tokenizer.vocab_size,
        fallback_cache=None if save is None else str(save / "index-cache"),
        history=history,
        consumed=state.consumed_samples,
        stage=names[state.stage] if names else "",
    )
    return _with_fim(config, inputs.tokenizer, data) if config.data.fim_data else data


def _with_fim(config: Config, tokenizer: Tokenizer, data: Datasets) -> Datasets:
    """The datasets, transformed by --fim-data."""

    def transformed(dataset: TokenDataset, split: int) -> TokenDataset:
        seed = config.runtime.seed, split
        return TransformedDataset(dataset, FillInMiddle(config.data, tokenizer, seed))

    valid, test = (
        {name: transformed(dataset, split) for name, dataset in datasets.items()}
        for split, datasets in enumerate((data.valid, data.test), 1)
    )
    train = None if data.train is None else transformed(data.train, 0)
    return dataclasses.replace(data, train=train, valid=valid, test=test, has_masks=True)
