"""The run that saved a checkpoint of torchtitan.

    optimizer.state.WEIGHT.exp_avg, optimizer.param_groups.WEIGHT.lr
    lr_scheduler.last_epoch
    train_state.step, train_state.ntokens_seen
    dataloader.dp_rank_0

The rate `lr` is that of the next step. No file has the schedule, the clipping or the batch size;
`ntokens_seen` counts the tokens of one data-parallel rank. What a data loader saves is pickled, and
its order is that of the data set. Weights of queries, keys and values are saved as three, but their
states as those of the one parameter `wqkv`, which has the rows of a group of queries, then those of
its key and its value. Experts have no losses, but a bias of the selection, which each step changes
by `load_balance_coeff`, which no file has, and then by its mean, which selects the same experts.
Facts: torchtitan 0.3.0, `trainer.py`, `components/optimizer`,
`models/common/attention.py`.
"""

from __future__ import annotations

import dataclasses

from torch import Tensor

from megatron_ds.config.problems import user_error
from megatron_ds.conversion.dcp.read import DcpFolder
from megatron_ds.conversion.model_settings import ModelSettings, malformed_values
from megatron_ds.conversion.source import ReadOptions, SavedRun, SourceCheckpoint
from megatron_ds.conversion.step_settings import StepSettings
from megatron_ds.conversion.trainers.layout import TrainerNames
from megatron_ds.conversion.trainers.runs.adam_states import (
    AdamOfRun,
    TheirAdam,
    adam_of_run,
    with_run,
)
from megatron_ds.conversion.trainers.runs.distributed_adam import entry_of, read_adam
from megatron_ds.engine.states.state_reader import Columns, TensorReader, join

OPTIMIZER = "optimizer"
STEP = "train_state.step"
TOKENS = "train_state.ntokens_seen"
DATA = "torchtitan's loader packs the documents of its data set in their order"
FUSED = "attention.qkv_linear.wqkv."
PARTS = ("wq", "wk", "wv")
UNREAD = "it has no optimizer states: torchtitan saves a last step without them by default"


def with_torchtitan_run(
    source: SourceCheckpoint, folder: DcpFolder, names: TrainerNames, options: ReadOptions
) -> SourceCheckpoint:
    """A model with the run that trained it, as far as the files have it.

    Args:
        source: The model.
        folder: The checkpoint.
        names: Names of its weights.
        options: What is read.

    Raises:
        UserError: If the optimizer's states are incomplete, or of another optimizer than Adam.
    """
    if not (options.optimizer or options.run):
        return source
    with malformed_values(folder.path):
        step = entry_of(folder, STEP)
        tokens = entry_of(folder, TOKENS)
        step = None if step is None else int(step)
        tokens = int(tokens or 0) or None
    settings = StepSettings(tokens_of_rank=tokens, data=DATA)
    theirs = read_adam(folder, OPTIMIZER) if options.optimizer else None
    if theirs is None:
        if step is None:
            return source
        run = SavedRun(step, None, None, None, None, settings=settings)
        return dataclasses.replace(source, run=run, unread=UNREAD)
    adam = adam_of_run(source.path, source.settings, names, _split(theirs, source.settings))
    step = adam.steps if step is None else step
    settings = _settings(adam, settings, step, has_experts=source.settings.moe.is_used)
    run = SavedRun(step, None, None, adam.steps, None, settings=settings)
    return with_run(source, adam, run)


def _settings(
    adam: AdamOfRun, settings: StepSettings, step: int, *, has_experts: bool
) -> StepSettings:
    options = dict(adam.settings.options)
    if has_experts:
        options |= {"moe_aux_loss_coeff": 0.0, "moe_z_loss_coeff": 0.0}
    rates = {} if adam.rate is None else {step + 1: adam.rate}
    return dataclasses.replace(
        adam.settings,
        options=options,
        rates=rates,
        tokens_of_rank=settings.tokens_of_rank,
        data=settings.data,
    )


def _split(theirs: TheirAdam, settings: ModelSettings) -> TheirAdam:
    """The states of queries, keys and values as those of three weights."""
    model = settings.model
    size = model.head_dim
    groups = model.num_query_groups or model.num_attention_heads
    queries = model.num_attention_heads // groups * size
    spans = {"wq": (0, queries), "wk": (queries, size), "wv": (queries + size, size)}
    states = dict(theirs.states)
    settings_of = dict(theirs.groups)
    for name in theirs.states:
        if FUSED not in name:
            continue
        fused = states.pop(name)
        expected = groups * (queries + 2 * size)
        for key, tensor in fused.items():
            if tensor.shape and tensor.shape[0] != expected:
                texts = {"shape": [*tensor.shape], "expected": [expected, *tensor.shape[1:]]}
                raise user_error("weights-shape-mismatch", name=f"{key} of {name}", **texts)
        group = settings_of.pop(name, None)
        for part in PARTS:
            start, rows = spans[part]
            split = name.replace(".wqkv.", f".{part}.")
            states[split] = {
                key: _section(tensor, groups, start, rows) if tensor.shape else tensor
                for key, tensor in fused.items()
            }
            if group is not None:
                settings_of[split] = group
    return TheirAdam(states, settings_of)


def _section(tensor: TensorReader, groups: int, start: int, rows: int) -> TensorReader:
    """The same rows of each group of a tensor.

    Args:
        tensor: A tensor of groups of rows.
        groups: Number of them.
        start: First row in a group.
        rows: Rows of a group.
    """
    stride = tensor.shape[0] // groups

    def load(wanted: range, columns: Columns | None) -> Tensor:
        parts = []
        for group in range(wanted.start // rows, -(-wanted.stop // rows)):
            first = max(wanted.start - group * rows, 0)
            last = min(wanted.stop - group * rows, rows)
            offset = group * stride + start
            parts.append(tensor.read(range(offset + first, offset + last), columns))
        if not parts:
            return tensor.read(range(0), columns)
        return join(parts)

    return TensorReader((groups * rows, *tensor.shape[1:]), tensor.dtype, load)
