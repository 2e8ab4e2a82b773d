"""Checks that all ranks of a run were started with the same settings, versions and data."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from megatron_ds.config import GROUPS, Config, flag_of
from megatron_ds.config.deepspeed_file import get, leaves
from megatron_ds.config.fields import option_fields
from megatron_ds.config.problems import user_error
from megatron_ds.launch import distributed, environment
from megatron_ds.training.preflight import RunInputs

PATHS = ("DIR", "FILE", "FOLDER", "GROUP", "PATH")
"""Names of values with paths, which hosts may have in folders of their own."""


def require_equal(config: Config, inputs: RunInputs) -> None:
    """Compares what the ranks were started with. Collective.

    Raises:
        UserError: On every rank, the same one, if two ranks differ.
    """
    difference = distributed.find_difference(dict(described(config, inputs)))
    if difference is not None:
        raise user_error(
            "settings-differ-between-ranks",
            name=difference.name,
            first=difference.first,
            rank=difference.rank,
            other=difference.other,
        )


def described(config: Config, inputs: RunInputs) -> Iterator[tuple[str, str]]:
    """What must be equal on all ranks: by flag, version or token file the value as text."""
    for group in GROUPS:
        options = getattr(config, group)
        for item, spec in option_fields(options):
            if spec.metavar not in PATHS:
                yield flag_of(item.name), str(getattr(options, item.name))
    # Whether the ranks share the folders of --save and --load is checked when they are claimed.
    for name, location in vars(inputs.plan.folders).items():
        yield flag_of(name), str(location and location.url)
    values: dict[str, Any] = {} if config.deepspeed_file is None else config.deepspeed_file.values
    for key in leaves(values):
        yield f"{flag_of('deepspeed_config')}: {key}", json.dumps(get(values, key))
    yield "the tokenizer", inputs.tokenizer.fingerprint.digest
    yield from inputs.data.identities()
    yield "the version", environment.version_text()
