"""Translates configuration files of other trainers into flags, with the table frameworks.toml.

Files: TOML of torchtitan, YAML of Primus, nanotron, gpt-neox and Megatron-LM's tests, JSON of
Hugging Face's Trainer. What a table does not have is reported by name. Knows no torch.
"""

from __future__ import annotations

import functools
import json
import math
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_ds.cli.doctor.shell import Reading
from megatron_ds.cli.flags import dashed, training_flags
from megatron_ds.cli.scan import scan
from megatron_ds.config.data_files import read_table
from megatron_ds.config.options.deepspeed_file import get, leaves
from megatron_ds.config.problems import user_error

FILES = (".toml", ".yaml", ".yml", ".json")
ENVIRONMENT = re.compile(r"\$\{\w+:([^}]*)\}")
AXES = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "ds_sequence_parallel_size")


@dataclass
class TrainingCommand:
    """A command that trains.

    Attributes:
        place: File and line, or what else it is from.
        launcher: What starts the program, as it is written.
        flags: Arguments of pretrain_gpt.py.
        world_size: Number of processes; None if the command leaves it open.
        reading: The script around it.
        source: Where the names of a configuration file are from.
        model: Folder with the config.json of a Hugging Face model.
        unread: Keys of a configuration file that were not read.
        differences: What always differs from the trainer of a configuration file.
        lacking: What has no counterpart, with what to do.
    """

    place: str
    launcher: list[str] = field(default_factory=list)
    flags: list[str] = field(default_factory=list)
    world_size: int | None = None
    reading: Reading = field(default_factory=Reading)
    source: str = ""
    model: Path | None = None
    unread: list[str] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)
    lacking: list[str] = field(default_factory=list)


@functools.cache
def tables() -> Mapping[str, Any]:
    """The content of frameworks.toml."""
    return read_table(__file__)


def translate(path: Path, world_size: int | None) -> TrainingCommand:
    """The training command of a configuration file.

    Args:
        path: The file.
        world_size: Number of processes; None if it is not known.

    Raises:
        UserError: If the file cannot be read.
    """
    framework, values = _read(path)
    table = tables()[framework]
    known = table["defaults"] | values
    folder = known.pop(table.get("model", ""), None)
    if world_size is None and "world" in table:
        world_size = math.prod(int(known.get(key) or 1) for key in table["world"])
    result = TrainingCommand(str(path), world_size=world_size, source=table["source"])
    result.model = folder and Path(folder)
    result.differences = [
        f"{topic}: {theirs}; here {ours}" for topic, theirs, ours in table.get("differences", ())
    ]
    for key, value in known.items():
        if value is not None and key not in table["batch"] and _has_effect(table, known, key):
            _translate_key(table, known, key, result)
    micro, steps, total = (int(known.get(key) or 0) for key in table["batch"])
    if micro > 0:
        sizes = scan(result.flags, training_flags()).values
        axes = math.prod(sizes.get(axis, 1) for axis in AXES)
        ranks = (world_size or axes) // axes
        batch = total if total > 0 else micro * max(1, steps) * ranks
        result.flags += ["--micro-batch-size", str(micro), "--global-batch-size", str(batch)]
    return result


def _load(path: Path) -> dict[str, Any]:
    """The content of a file, with the defaults of `${VARIABLE:default}`."""
    import yaml

    # gpt-neox's files are JSON with comments and with the booleans of Python: YAML reads them.
    parse = {".toml": tomllib.loads, ".json": json.loads}.get(path.suffix, yaml.safe_load)
    try:
        values = parse(ENVIRONMENT.sub(r"\1", path.read_text("utf-8")))
        if not isinstance(values, dict):
            raise ValueError("it is not a mapping")
    except Exception as error:
        reason = " ".join(str(error).split())
        raise user_error("doctor-file-unreadable", path=path, reason=reason) from error
    return values


def _read(path: Path) -> tuple[str, dict[str, Any]]:
    """The trainer that a file is of, and its values by key."""
    values = _load(path)
    if isinstance(values.get("modules"), dict):
        return "primus", _primus(values["modules"], path)
    framework = {".toml": "torchtitan", ".json": "hf"}.get(path.suffix, "neox")
    if isinstance(values.get("model"), dict) and "model_config" in values["model"]:
        framework = "nanotron"
    if isinstance(values.get("MODEL_ARGS"), dict):
        framework, values = "megatron", values["MODEL_ARGS"]
    known = {key.removeprefix("--").replace("-", "_"): get(values, key) for key in leaves(values)}
    return framework, known


def _translate_key(
    table: Mapping[str, Any], known: dict[str, Any], key: str, result: TrainingCommand
) -> None:
    value, flags = known[key], training_flags()
    name = dashed(key).rpartition(".")[2]
    same = name if flags.find(name) else flags.same.get(name)
    off = [f"--{word}" for word in (f"no-{name}", f"disable-{name}") if word in flags.by_name]
    target, advice = table.get("flags", {}).get(key, same), flags.advice.get(name)
    if target is None and off and isinstance(value, bool):  # Megatron-LM's name of what is on
        result.flags += off[:1] * (not value)
        return
    if isinstance(target, dict):
        advice = table.get("advice", {}).get(key, f"supported: {', '.join(target)}")
        target = target.get(str(value), target.get("*"))
    if target:
        is_template = target.startswith("--")
        result.flags += _filled(target, known, value) if is_template else _words(target, value)
    elif target is None and advice and value not in (False, "", []):
        result.lacking.append(f"{key} {value}: {advice}")
    elif target is None and value is not False:
        result.unread.append(key)


def _words(name: str, value: Any) -> Iterator[str]:
    """A flag and its values; of a switch that is off, the flag that turns it off."""
    if value is False:
        name = f"no-{name}"
    flag = training_flags().find(name)
    if (flag and flag.nargs == "*") or isinstance(value, bool) is bool(flag and flag.nargs == 0):
        values = value if isinstance(value, list) else [value] * (not isinstance(value, bool))
        yield from (f"--{name}", *(re.sub(r",\s+", ",", str(item)) for item in values))


def _filled(template: str, known: dict[str, Any], value: Any) -> list[str]:
    """The flags of a template; a key that the file leaves out stays in braces."""
    items = enumerate(value) if isinstance(value, list) else ()
    filled = known | {"": value} | {str(index): item for index, item in items}

    def text(mark: re.Match[str]) -> str:
        values = [filled.get(key, mark[0]) for key in mark[1].split("*")]
        return f"{math.prod(map(float, values)):g}" if len(values) > 1 else str(values[0])

    return [re.sub(r"\{([^{}]*)\}", text, word) for word in template.split()]


def _has_effect(table: Mapping[str, Any], known: Mapping[str, Any], key: str) -> bool:
    """Whether one of the conditions of a key holds: `other`, `!other` or `other=value`."""
    conditions = table.get("only", {}).get(key, ())
    for condition in conditions:
        name, equals, wanted = condition.lstrip("!").partition("=")
        value = known.get(name)
        if str(value) == wanted if equals else bool(value) is not condition.startswith("!"):
            return True
    return not conditions


def _primus(modules: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """The values of an experiment, over the values of the model and the trainer that it names."""
    module = next(iter(modules.values()))
    values: dict[str, Any] = {}
    for key, folder in (("config", "modules"), ("model", "models")):
        name = str(module.get(key, ""))
        inside = f"primus/configs/{folder}/megatron/{name}"
        places = [path.parent / name, *(parent / inside for parent in path.resolve().parents)]
        base = next((file for file in places if file.is_file()), None)
        if base is not None:
            values |= {k: v for k, v in _with_bases(base).items() if _is_given(k, v)}
        elif key == "model":
            reason = f"its model {name} is not there"
            raise user_error("doctor-file-unreadable", path=path, reason=reason)
    return values | (module.get("overrides") or {})


def _with_bases(path: Path) -> dict[str, Any]:
    values, merged = _load(path), dict[str, Any]()
    for name in [*(values.pop("extends", None) or ()), *(values.pop("includes", None) or ())]:
        base = path.parent / str(name)
        merged |= _with_bases(base) if base.is_file() else {}
    return merged | values


def _is_given(name: str, value: Any) -> bool:
    """Whether a value of a base file differs from what this program does without it."""
    flag = training_flags().by_name.get(dashed(name))
    if name in tables()["primus"]["defaults"]:
        return True
    if flag is None or flag.outcome not in ("set", "no_op") or value is None:
        return False
    return bool(value != flag.default and (value or flag.default))
