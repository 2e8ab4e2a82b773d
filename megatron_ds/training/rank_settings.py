"""What all ranks of a run must be started with alike; the roll call compares it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from megatron_ds.config import GROUPS, Config, flag_of
from megatron_ds.config.deepspeed_file import get, leaves
from megatron_ds.config.fields import option_fields
from megatron_ds.loading.plan import LoadPlan
from megatron_ds.training.preflight import RunInputs

PATHS = ("DIR", "FILE", "FOLDER", "GROUP", "PATH")
"""Names of values with paths, which hosts may have in folders of their own."""


def settings(config: Config, plan: LoadPlan) -> Iterator[tuple[str, str]]:
    """By flag the value as text."""
    for group in GROUPS:
        options = getattr(config, group)
        for item, spec in option_fields(options):
            if spec.metavar not in PATHS:
                yield flag_of(item.name), str(getattr(options, item.name))
    # Whether the hosts share the folders of --save and --load is a question of the roll call.
    for name, location in vars(plan.folders).items():
        yield flag_of(name), str(location and location.url)
    values: dict[str, Any] = {} if config.deepspeed_file is None else config.deepspeed_file.values
    for key in leaves(values):
        yield f"{flag_of('deepspeed_config')}: {key}", json.dumps(get(values, key))


def data(inputs: RunInputs, *, reads: bool = False) -> Iterator[tuple[str, str]]:
    """What identifies the tokenizer and each token file.

    Args:
        inputs: Of the run.
        reads: Compare contents too; the ranks of a host have the same files.
    """
    yield "the tokenizer", inputs.tokenizer.fingerprint.digest
    yield from inputs.data.identities(reads=reads)
