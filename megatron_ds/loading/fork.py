"""Forks a run: starts one of its own from a checkpoint, with another schedule, as for a decay.

The folder of the fork has the checkpoint, by links to its files, the settings of the run that saved
it, and its parent. Owns which settings the fork takes over. Imports no torch.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from megatron_ds import schedule_validation, schedules
from megatron_ds.checkpoint.compatibility import resume_conflicts, saved_config
from megatron_ds.checkpoint.files.local_files import write_pointers
from megatron_ds.checkpoint.folders.output_folder import output_folder
from megatron_ds.checkpoint.lineage import PARENT
from megatron_ds.checkpoint.metadata import POINTER_PENDING, check_names
from megatron_ds.checkpoint.selection import list_folder, select_checkpoint
from megatron_ds.config import (
    GROUP_OF_FIELD,
    CheckpointConfig,
    Config,
    fields_that_decide,
    flag_of,
    yaml_file,
)
from megatron_ds.config.fields import Decides, option_field, option_group
from megatron_ds.config.options.checkpoint import is_url, missing_folder
from megatron_ds.config.options.schedule import SCHEDULE_LENGTHS, SCHEDULE_UNITS
from megatron_ds.config.problems import Problem, raise_if_any, renaming_fields, user_error
from megatron_ds.engine.ds_config.fields import field_value
from megatron_ds.loading.options_from_checkpoint import SAVED_GROUPS
from megatron_ds.programs import training_words
from megatron_ds.train_state import TrainState

SETTINGS = "fork.yaml"
COMPARED_STEPS = 1000
"""Number of steps at which the learning rates of fork and parent are compared."""


@dataclass(frozen=True)
class Options:
    """Starts a run of its own from a checkpoint of another run, as for a decay of the learning rate
    from a stable one.

    Flags of pretrain_gpt.py replace settings of the run. With --lr-wsd-decay-iters (or -samples,
    -tokens) and no length of the run, the decay begins at the checkpoint and ends the run. The fork
    equals the run that had its settings from the start, if their rates do so until the checkpoint.
    No weights are copied. The command that starts the fork is printed.
    """

    PEERS: ClassVar[str] = "pretrain_gpt"

    run: str = option_field("", metavar="RUN", positional=True, required=True)
    """--save folder of the run."""
    at: int = option_field(0, minimum=1, required=True)
    """Iteration of the checkpoint."""
    save: str = option_field("", metavar="FOLDER", required=True)
    """New folder of the fork."""
    training: Config = option_group(Config(), hidden=True)
    given: frozenset[str] = frozenset()

    def problems(self) -> Iterator[Problem]:
        yield from missing_folder(self.run)
        for name in ("run", "save"):
            if is_url(getattr(self, name)):
                yield Problem("fork-at-url", name, url=getattr(self, name))

    @property
    def changes(self) -> dict[str, Any]:
        """The flags of pretrain_gpt.py, by field."""
        names = self.given - {"run", "at", "save"}
        return {name: field_value(self.training, name) for name in sorted(names)}


def fork(options: Options, warn: Callable[[Problem], None]) -> str:
    """Creates the folder of the fork, and returns the command that starts it.

    Raises:
        UserError: If there is no such checkpoint, the fork cannot continue it, or the folder of the
            fork has files already.
        OSError: If the disk fails.
    """
    selected = CheckpointConfig(load=options.run, ckpt_step=options.at)
    with renaming_fields(ckpt_step="at"):
        listing = list_folder(Path(options.run))
        checkpoint = select_checkpoint(listing, selected, check_names, warn)
    assert checkpoint is not None
    layout = checkpoint.run.layout
    save = os.path.abspath(options.save)
    world_size = layout.world_size
    before = saved_config(checkpoint)
    if before.schedule.stages or "stages" in options.changes:
        raise user_error("fork-with-stages", "stages", path=checkpoint.path)
    config = _forked(before, checkpoint.run.state, options.changes, save)
    dp_size = config.parallel.data_parallel_size(world_size)
    raise_if_any(
        [
            *config.problems(world_size),
            *schedule_validation.problems(config, dp_size),
            *resume_conflicts(checkpoint, config, dp_size),
        ]
    )
    for difference in _rate_differences(before, config, checkpoint.run.state, dp_size):
        warn(difference)
    changed = {
        flag_of(name): [field_value(before, name), field_value(config, name)]
        for name in GROUP_OF_FIELD
        if field_value(before, name) != field_value(config, name)
    }
    parent = {
        "run": os.path.abspath(options.run),
        "iteration": checkpoint.iteration,
        "branch": checkpoint.run.branch.segments[-1][0],
        "changed": changed,
    }
    with output_folder(Path(save)) as folder:
        _link(checkpoint.path.resolve(), folder / checkpoint.path.name)
        write_pointers(folder / checkpoint.path.name)
        (folder / SETTINGS).write_text(yaml_file.dump(config), encoding="utf-8")
        (folder / PARENT).write_text(json.dumps(parent, indent=2) + "\n", encoding="utf-8")
    launcher = "python" if world_size == 1 else f"torchrun --nproc_per_node {world_size}"
    command = " ".join(training_words(launcher.split()))
    return f"{command} --config {Path(options.save) / SETTINGS}"


def _forked(before: Config, state: TrainState, changes: Mapping[str, Any], save: str) -> Config:
    """The settings of the fork; those that are not the default count as given by flags."""
    default = Config()
    taken = {name: field_value(default, name) for name in fields_that_decide(Decides.RUN)}
    values = dict(changes)
    units = [unit for unit in SCHEDULE_UNITS if changes.get(f"lr_wsd_decay_{unit}")]
    if units and not any(changes.get(f"train_{unit}") for unit in SCHEDULE_UNITS):
        unit = units[0]
        position = state.iteration if unit == "iters" else getattr(state, f"consumed_{unit}")
        values[f"train_{unit}"] = position + changes[f"lr_wsd_decay_{unit}"]
        taken |= {f"lr_decay_{unit}": None for unit in SCHEDULE_UNITS}
        taken["lr_decay_style"] = "WSD"
    for stem in ("train", *SCHEDULE_LENGTHS):
        fields = [f"{stem}_{unit}" for unit in SCHEDULE_UNITS]
        if any(name in values for name in fields):  # in another unit than the run's
            taken |= {name: field_value(default, name) for name in fields}
    folders = {"load": save, "save": save, "override_opt_param_scheduler": True}
    config = before.with_values({**taken, **values, **folders})
    chosen = {
        name
        for name, group in GROUP_OF_FIELD.items()
        if group not in SAVED_GROUPS and field_value(config, name) != field_value(default, name)
    }
    config = dataclasses.replace(config, given=frozenset(chosen | changes.keys()))
    return dataclasses.replace(config, start_samples=state.consumed_samples)


def _rate_differences(
    before: Config, config: Config, state: TrainState, dp_size: int
) -> Iterator[Problem]:
    """First compared step before the checkpoint at which the two schedules differ."""
    last = schedules.batch_size_at(before, state.consumed_samples, state.consumed_tokens, dp_size)
    length = state.applied_tokens / max(state.applied_samples, 1)
    for index in range(COMPARED_STEPS):
        samples = max(0, state.applied_samples - last) * index // (COMPARED_STEPS - 1)
        at = TrainState(applied_samples=samples, applied_tokens=round(samples * length))
        rates = [schedules.learning_rate(run, at, dp_size) for run in (before, config)]
        if rates[0] != rates[1]:
            texts = {"samples": samples, "before": rates[0], "now": rates[1]}
            yield Problem("fork-rates-differ", **texts)
            return


def _link(path: Path, target: Path) -> None:
    """Gives a checkpoint a second name, under which its files stay if the first one is deleted.

    Across file systems, it is a link to the folder.
    """
    ignored = shutil.ignore_patterns(POINTER_PENDING)
    try:
        shutil.copytree(path, target, copy_function=os.link, ignore=ignored)
    except (shutil.Error, OSError):
        shutil.rmtree(target, ignore_errors=True)
        target.symlink_to(path, target_is_directory=True)
