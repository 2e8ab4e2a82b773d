"""The settings of a run as a YAML file, which --config reads; `cli.config_file` is the reader.

Keys are flags without dashes. The mapping `defaults` has the values that no flag set.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from megatron_ds.config import GROUPS, Config, flag_of
from megatron_ds.config.fields import option_fields
from megatron_ds.config.phases import NAME
from megatron_ds.config.problems import without_passwords

FILE_NAME = "config.yaml"
DEFAULTS = "defaults"
"""Key of the values that no flag set: defaults, and what a DeepSpeed file or a checkpoint gave."""
END = "\n...\n"
"""End marker that YAML writes after a document with a single value."""
NOT_WRITTEN = frozenset({"config", "print_config", "dry_run"})
_DEFAULTS = {
    item.name: item.default for group in GROUPS.values() for item, _ in option_fields(group)
}
HEADER = """\
# Settings of pretrain_gpt.py, which --config reads; flags of the command line override them.
"""
DEFAULTS_HEADER = f"""
# No flag set these. They have the values that the run had, even if another version has others.
{DEFAULTS}:
"""


def dump(config: Config) -> str:
    """The file of a configuration: every value that was given, or has an effect.

    The size of the vocabulary is written only if it was given, because tokenizers add to it.
    """
    settings = []
    defaults = []
    for group in GROUPS:
        values = dict(entries(getattr(config, group)))
        chosen = {key: value for field, (key, value) in values.items() if field in config.given}
        if chosen:
            settings += [f"\n# {group}\n", *_lines(chosen)]
        others = {
            key: value
            for field, (key, value) in values.items()
            if field not in {*config.given, "vocab_size"}
            and value is not None
            and config.has_effect(field)
        }
        if others:
            defaults += [f"  # {group}\n", *(f"  {line}" for line in _lines(others))]
    return str(without_passwords("".join([HEADER, *settings, DEFAULTS_HEADER, *defaults])))


def entries(group: Any) -> Iterator[tuple[str, tuple[str, Any]]]:
    """Key and value of each option of a group, by field."""
    for item, _ in option_fields(group):
        value = getattr(group, item.name)
        if item.name in NOT_WRITTEN or value != value:  # NaN: a required flag that is not given
            continue
        if item.name == "stages":
            value = tuple(_stage(entry) for entry in value)
        elif isinstance(value, range):
            value = f"{value.start}-{value[-1]}"
        yield item.name, _entry(item.name, value)


def _entry(field: str, value: Any) -> tuple[str, Any]:
    """Key and value of a field."""
    if isinstance(value, bool):
        # The flag of a value that is True by default turns it off.
        value = value is not (_DEFAULTS[field] is True)
    return flag_of(field).removeprefix("--"), value


def _stage(entry: str) -> dict[str, Any]:
    """An entry of --stages with flags as keys."""
    values = json.loads(entry)
    return {NAME: values.pop(NAME)} | dict(_entry(*item) for item in values.items())


def _lines(values: dict[str, Any]) -> Iterator[str]:
    import yaml

    for key, value in values.items():
        plain = list(value) if isinstance(value, tuple) else value
        text = yaml.safe_dump(
            plain,
            default_flow_style=True,
            width=float("inf"),
            allow_unicode=True,
            sort_keys=False,
        )
        yield f"{key}: {text.removesuffix(END)}\n" if text.endswith(END) else f"{key}: {text}"
