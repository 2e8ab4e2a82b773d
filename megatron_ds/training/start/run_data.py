"""Builds the datasets of a run, with their indexes cached on disk.

Shared by runs and the program that builds the indexes before a run. Knows no ranks and no torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from megatron_ds.config import Config
from megatron_ds.config.phases import phase_names
from megatron_ds.data.blend.blend_history import BlendHistory
from megatron_ds.data.build_datasets import Datasets, build_datasets
from megatron_ds.data.fill_in_middle import FillInMiddle
from megatron_ds.data.own.dataset_request import BuildDataset
from megatron_ds.data.own.map_dataset import MockDataset, build_own_datasets
from megatron_ds.data.sample import DocumentEnds, Transform
from megatron_ds.data.token_dataset import TokenDataset, TransformedDataset
from megatron_ds.run_phases import RunPhases
from megatron_ds.tokenizer import Tokenizer
from megatron_ds.train_state import TrainState
from megatron_ds.training.start.preflight import RunInputs


def build_phase_data(
    config: Config,
    inputs: RunInputs,
    dp_size: int,
    state: TrainState,
    history: BlendHistory | None,
    own_data: BuildDataset | None = None,
) -> Datasets:
    """Builds the datasets of the phase of a state.

    Args:
        config: Configuration of the run.
        inputs: Its tokenizer and files.
        dp_size: Data-parallel size.
        state: State before the first step.
        history: Data that was read before the state.
        own_data: Builds the datasets of a program that brings its own.
    """
    phases = RunPhases(config, dp_size)
    save = inputs.plan.folders.local_save
    config = phases.at(state)
    num_samples = phases.planned_samples(state)
    names = phase_names(phases.config)
    own_data = own_data or (MockDataset if config.data.mock_data else None)
    if own_data is not None:
        data = build_own_datasets(
            own_data,
            seq_length=config.model.seq_length,
            seed=config.runtime.seed,
            num_samples=num_samples,
            tokenizer=inputs.tokenizer,
            history=history,
            consumed=state.consumed_samples,
        )
    else:
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
    return _transformed(config, inputs.tokenizer, data)


def _transformed(config: Config, tokenizer: Tokenizer, data: Datasets) -> Datasets:
    """The datasets, whose samples the flags change or mark."""

    def transformed(dataset: TokenDataset, split: int) -> TokenDataset:
        transforms = _transforms(config, tokenizer, split)
        return TransformedDataset(dataset, transforms) if transforms else dataset

    valid, test = (
        {name: transformed(dataset, split) for name, dataset in datasets.items()}
        for split, datasets in enumerate((data.valid, data.test), 1)
    )
    train = None if data.train is None else transformed(data.train, 0)
    return dataclasses.replace(data, train=train, valid=valid, test=test)


def _transforms(config: Config, tokenizer: Tokenizer, split: int) -> Sequence[Transform]:
    """Transforms of a split's samples that the flags turn on, in the order of application.

    Args:
        config: Configuration of the phase.
        tokenizer: Its tokenizer.
        split: 0 for training, 1 for validation, 2 for test.
    """
    options = config.data
    transforms: list[Transform] = []
    if options.fim_data:
        transforms.append(FillInMiddle(options, tokenizer, (config.runtime.seed, split)))
    if options.boundary_fields:
        eod = tokenizer.eod if options.needs_eod else None
        assert eod is not None or not options.needs_eod, "checked by boundary_problems"
        transforms.append(DocumentEnds(eod, masks_loss=options.eod_mask_loss))
    return transforms
