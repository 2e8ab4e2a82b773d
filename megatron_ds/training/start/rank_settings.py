"""Collects the settings that must be equal on all ranks; the roll call compares them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from megatron_ds.checkpoint.folders.shared_folders import SharedFolders
from megatron_ds.config import GROUPS, Config, flag_of
from megatron_ds.config.deepspeed_file import get, leaves
from megatron_ds.config.fields import option_fields
from megatron_ds.config.options.data import TRAINING_DATA
from megatron_ds.config.phases import values_of
from megatron_ds.launch import environment
from megatron_ds.launch.ranks.host_differences import CONTENT, DATA, SETTINGS
from megatron_ds.launch.ranks.roll_call import RollCall
from megatron_ds.loading.plan import LoadPlan
from megatron_ds.training.start.preflight import RunInputs

PATHS = ("DIR", "FILE", "FOLDER", "GROUP", "PATH")
"""Names of values with paths, which hosts may have in folders of their own."""


def describe(roll_call: RollCall, config: Config, plan: LoadPlan, inputs: RunInputs | None) -> None:
    """Gives the roll call what this rank was started with.

    Args:
        roll_call: Roll call of the run.
        config: Configuration, which may have problems.
        plan: Has the folders of --save and --load, which the hosts must share.
        inputs: Inputs of the run; None if they have problems.
    """
    roll_call.probe = SharedFolders(plan.folders)
    roll_call.describe(SETTINGS, dict(settings(config, plan)))
    if inputs is not None:
        roll_call.describe(DATA, dict(data(inputs)))
    # The ranks of a host have the same files.
    if inputs is not None and environment.spans_hosts() and environment.local_rank() == 0:
        roll_call.describe(CONTENT, dict(data(inputs, reads=True)))


def settings(config: Config, plan: LoadPlan) -> Iterator[tuple[str, str]]:
    """Flags of all options with their values as text."""
    for group in GROUPS:
        options = getattr(config, group)
        for item, spec in option_fields(options):
            if item.name == "stages":
                entries = map(values_of, config.schedule.stages)
                kept = [{k: v for k, v in one.items() if k not in TRAINING_DATA} for one in entries]
                yield flag_of(item.name), str(kept)
            elif spec.metavar not in PATHS:
                yield flag_of(item.name), str(getattr(options, item.name))
    # Whether the hosts share the folders of --save and --load is a question of the roll call.
    for name, location in vars(plan.folders).items():
        yield flag_of(name), str(location and location.url)
    values: dict[str, Any] = {} if config.deepspeed_file is None else config.deepspeed_file.values
    for key in leaves(values):
        yield f"{flag_of('deepspeed_config')}: {key}", json.dumps(get(values, key))


def data(inputs: RunInputs, *, reads: bool = False) -> Iterator[tuple[str, str]]:
    """Yields the identity of the tokenizer and of each token file.

    Args:
        inputs: Inputs of the run.
        reads: Identify files by their contents too.
    """
    yield "the tokenizer", inputs.tokenizer.fingerprint.digest
    for stage, files in enumerate(inputs.data):
        where = f" in stage {stage + 1}" if stage else ""
        yield from ((name + where, value) for name, value in files.identities(reads=reads))
