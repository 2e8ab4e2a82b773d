"""Translates configuration files of other trainers into flags, with the tables of trainers/.

Files: TOML of torchtitan, YAML of Primus, nanotron, gpt-neox, Megatron-LM's --yaml-cfg and its
tests, JSON of Hugging Face's Trainer. Every key of a file is translated, or named: as what changes
neither the model nor what is learned, as a difference, or as what has no counterpart, to which
unknown keys belong. Knows no torch.

A table has these sections, by key of the file. Keys of nested blocks are joined by points.
    name           of the trainer
    source         where the facts are from
    recognized_by  keys of which a file of the trainer has at least one
    defaults       values of absent keys, as far as they decide what is learned
    changed        date and former value of defaults that changed
    same           keys that are, in this program or in ../megatron_flags.toml, names of flags
    flags          flag that a key sets; with {}, flags with the value in it; "": none, in spite of
                   its name; a table has flags by value, and other values have no counterpart
    lacking        advice for keys without a counterpart, unless the value switches it off; also
                   for values that a table of `flags` does not have
    harmless       keys that change neither the model nor what is learned
    model          key of a folder with the config.json of a Hugging Face model
    only           values of other keys without which a key has no effect
    world          keys whose product is the number of processes
    batch          keys of the samples of a process, the accumulation steps and the samples of a
                   step
    differences    what always differs, with both meanings
Names in `lacking`, `harmless` and `only` may have *. A product in braces, such as {a.b*c.d}, is the
product of two keys.
"""

from __future__ import annotations

import fnmatch
import functools
import json
import math
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_ds.cli.doctor.shell.reading import LARGEST_FILE, Reading
from megatron_ds.cli.doctor.trainers import (
    huggingface,
    megatron_yaml,
    nanotron,
    neox,
    primus,
    torchtitan,
)
from megatron_ds.cli.doctor.trainers.settings import Settings, is_off, text_of
from megatron_ds.cli.flags import dashed, training_flags
from megatron_ds.cli.scan import scan
from megatron_ds.cli.yaml_size import check_nodes, check_values
from megatron_ds.config.data_files import read_table
from megatron_ds.config.parallel_axes import REPLICA_OPTIONS
from megatron_ds.config.problems import user_error

FILES = (".toml", ".yaml", ".yml", ".json")
ENVIRONMENT = re.compile(r"\$\{\w+:([^}]*)\}")
PREPARE: Mapping[str, Callable[[Settings], None]] = {
    "huggingface": huggingface.prepare,
    "megatron_yaml": megatron_yaml.prepare,
    "nanotron": nanotron.prepare,
    "neox": neox.prepare,
    "primus": primus.prepare,
    "torchtitan": torchtitan.prepare,
}
"""Functions that translate the keys that a table cannot express, by trainer."""
MOST_BASES = 8
"""Files of Primus that are bases of each other; it has three."""
LONGEST = 60
"""Characters of a value that are shown."""


@dataclass
class TrainingCommand:
    """A command that trains.

    Attributes:
        place: File and line, or what else it is from.
        launcher: Command that starts the program, as written.
        flags: Arguments of pretrain_gpt.py.
        world_size: Number of processes; None if the command leaves it open.
        reading: The script around it.
        source: Where the names of a configuration file are from.
        model: Folder with the config.json of a Hugging Face model.
        unread: Keys of a configuration file that change nothing here.
        differences: Differences from the trainer of a configuration file.
        lacking: Settings without a counterpart, with advice.
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


@functools.cache
def trainer_table(trainer: str) -> Mapping[str, Any]:
    """The table of a trainer."""
    return read_table(neox.__file__, f"{trainer}.toml")


def translate(paths: Sequence[Path], world_size: int | None) -> TrainingCommand:
    """The training command of a configuration file.

    Args:
        paths: The file; of gpt-neox, whose settings may be in several, all of them.
        world_size: Number of processes; None if it is not known.

    Raises:
        UserError: If the file cannot be read, or is not one of a trainer that is known.
    """
    path, *further = paths
    trainer, values = _read(path, {k: v for file in further for k, v in _load(file).items()})
    return translate_values(trainer, values, " ".join(map(str, paths)), world_size)


def translate_values(
    trainer: str, values: Mapping[str, Any], origin: str, world_size: int | None
) -> TrainingCommand:
    """The training command of a trainer's settings.

    Args:
        trainer: Name of its table.
        values: The settings by key.
        origin: File, or file and line, that they are from.
        world_size: Number of processes; None if it is not known.
    """
    table = trainer_table(trainer)
    settings = Settings(dict(table["defaults"]) | dict(values), frozenset(values))
    if world_size is None and "world" in table:
        world_size = math.prod(settings.number(key, 1, keeps=True) for key in table["world"])
    settings.differences += [
        f"{topic}: {theirs}; here {ours}" for topic, theirs, ours in table.get("differences", ())
    ]
    settings.differences += _changed_defaults(table, settings)
    if trainer in PREPARE:
        PREPARE[trainer](settings)
    folder = settings.take(table.get("model", ""))
    micro, steps, total = (settings.number(key, 0) for key in table["batch"])
    for key in settings.values:
        if settings.values[key] is not None and _has_effect(table, settings, key):
            _translate_key(table, settings, key)
    if micro > 0:
        sizes = scan(settings.flags, training_flags()).values
        axes = math.prod(sizes.get(option, 1) for option in REPLICA_OPTIONS)
        ranks = (world_size or axes) // axes
        batch = total if total > 0 else micro * max(1, steps) * ranks
        settings.add("micro-batch-size", micro)
        settings.add("global-batch-size", batch)
    return TrainingCommand(
        origin,
        flags=settings.flags,
        world_size=world_size,
        source=table["source"],
        model=folder and Path(folder),
        unread=settings.unread,
        differences=settings.differences,
        lacking=settings.lacking,
    )


def _changed_defaults(table: Mapping[str, Any], settings: Settings) -> Iterator[str]:
    """Defaults that depend on the trainer's version, of keys that a file leaves out."""
    for key, (date, before) in table.get("changed", {}).items():
        if key not in settings.given:
            default = settings.values[key]
            yield f"{key} is not given: {default} since {date} (written below), {before} before"


def _load(path: Path) -> dict[str, Any]:
    """The content of a file, with the defaults of `${VARIABLE:default}`."""
    # gpt-neox's files are JSON with comments and with the booleans of Python: YAML reads them.
    parse = {".toml": tomllib.loads, ".json": json.loads}.get(path.suffix, _parse_yaml)

    def read() -> Any:
        if path.exists() and not path.is_file():
            raise ValueError("it is no regular file")
        if path.stat().st_size > LARGEST_FILE:
            raise ValueError(f"it has more than {LARGEST_FILE} bytes")
        return parse(ENVIRONMENT.sub(r"\1", path.read_text("utf-8")))

    return _checked(read, path)


def _checked(read: Callable[[], Any], path: Path | str) -> dict[str, Any]:
    """The values by key that a function reads from a file.

    Raises:
        UserError: If it raises an exception, or the values are not those of a settings file.
    """
    try:
        values = read()
        if not isinstance(values, dict):
            raise ValueError("it is not a mapping")
        check_values(values)
    except Exception as error:
        reason = " ".join(str(error).split())
        raise user_error("doctor-file-unreadable", path=path, reason=reason) from error
    return values


def _parse_yaml(text: str) -> Any:
    """The values of YAML, whose aliases and merges are counted before they are expanded."""
    import yaml

    loader = yaml.SafeLoader(text)
    try:
        root = loader.get_single_node()
        if root is None:
            return None
        check_nodes(root)
        return loader.construct_document(root)
    finally:
        loader.dispose()


def _read(path: Path, further: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The trainer that a file is of, and its values by key, with values of further files.

    Raises:
        UserError: If no trainer that is known has such a file.
    """
    values = {**further, **_load(path)}
    if isinstance(values.get("modules"), dict):
        return "primus", _primus(values["modules"], path)
    if isinstance(values.get("MODEL_ARGS"), dict):
        return "megatron", _by_key(values["MODEL_ARGS"])
    if isinstance(values.get("language_model"), dict) and "model_parallel" in values:
        return "megatron_yaml", _of_megatron_yaml(values)
    known = _by_key(values)
    for other in tables()["others"]:
        if any(_has_keys(known, keys.split()) for keys in other["keys"]):
            raise user_error(
                "doctor-other-file", path=path, owner=other["name"], hint=other["hint"]
            )
    candidates = ("torchtitan",) if path.suffix == ".toml" else ("nanotron", "huggingface", "neox")
    for trainer in candidates:
        keys = trainer_table(trainer)["recognized_by"]
        if any(_covers(key, name) for key in keys for name in known):
            return trainer, known
    listed = candidates if path.suffix == ".toml" else (*candidates, "primus")
    required = "; ".join(
        f"{trainer_table(trainer)['name']}: {', '.join(trainer_table(trainer)['recognized_by'])}"
        for trainer in listed
    )
    raise user_error("doctor-unknown-file", path=path, required=required)


def translate_yaml_cfg(
    text: str, path: str, origin: str, world_size: int | None
) -> TrainingCommand:
    """The training command of Megatron-LM's --yaml-cfg.

    Args:
        text: The content of the file.
        path: The file.
        origin: File and line of the command that names it.
        world_size: Number of processes; None if it is not known.

    Raises:
        UserError: If the file cannot be read.
    """
    values = _checked(functools.partial(_parse_yaml, text), path)
    return translate_values("megatron_yaml", _of_megatron_yaml(values), origin, world_size)


def _of_megatron_yaml(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of all sections, of which those of the model and of the parallelism count."""
    sections = [values.get(name) for name in ("language_model", "model_parallel")]
    merged = {key: value for key, value in values.items() if value not in sections}
    for section in sections:
        merged |= section if isinstance(section, dict) else {}
    return {key: value for key, value in _by_key(merged).items() if value != ""}


def _by_key(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values of all nested blocks, by their keys joined with points; an empty block is one."""
    known: dict[str, Any] = {}
    for name, value in values.items():
        key = prefix + str(name).removeprefix("--").replace("-", "_")
        known |= _by_key(value, f"{key}.") if isinstance(value, dict) and value else {key: value}
    return known


def _covers(pattern: str, key: str) -> bool:
    """Whether a key is a name, matches a pattern, or is inside of the block of that name."""
    return key.startswith(f"{pattern}.") or fnmatch.fnmatchcase(key, pattern)


def _has_keys(known: Mapping[str, Any], keys: Iterable[str]) -> bool:
    """Whether a file has some keys, and not the ones after a `!`."""
    return all(
        any(_covers(key.lstrip("!"), name) for name in known) is not key.startswith("!")
        for key in keys
    )


def _matching(names: Iterable[str], key: str) -> str | None:
    """The name that is a key, or the first pattern that it matches."""
    listed = list(names)
    if key in listed:
        return key
    return next((name for name in listed if fnmatch.fnmatchcase(key, name)), None)


def _translate_key(table: Mapping[str, Any], settings: Settings, key: str) -> None:
    """Translates a key by the section of a table that has its name, or a pattern of it."""
    value = settings.values[key]
    targets = table.get("flags", {})
    lacking = table.get("lacking", {})
    advised = _matching(lacking, key)
    if key in targets:
        _set_flags(settings, key, targets[key], lacking.get(key, ""))
    elif key in table.get("same", "").split():
        _set_same_flag(settings, key)
    elif advised is not None:
        if not is_off(value):
            settings.lacking.append(f"{key} {_short(value)}: {lacking[advised]}")
    elif _matching(table.get("harmless", "").split(), key) is not None:
        settings.unread += [key] * (not is_off(value))
    elif table.get("has_megatron_names"):
        _set_same_flag(settings, key)
    else:
        settings.lacking.append(_unknown(key, value))


def _set_flags(settings: Settings, key: str, target: str | Mapping[str, str], advice: str) -> None:
    """Adds the flags of a key's entry in a table."""
    value = settings.values[key]
    if not isinstance(target, str):
        by_value = target.get(str(value), target.get("*"))
        if by_value is None:
            words = ", ".join(word for word in target if word not in ("", "*", "[]"))
            supported = advice or f"supported: {words}"
            settings.lacking.append(f"{key} {_short(value)}: {supported}")
            return
        target = by_value
    if target.startswith("--"):
        settings.flags += _filled(target, settings.values, value)
    elif target:
        settings.flags += _words(target, value)


def _set_same_flag(settings: Settings, key: str) -> None:
    """Adds the flag of a key's own name, or the advice of this name."""
    value = settings.values[key]
    flags = training_flags()
    name = dashed(key).rpartition(".")[2]
    same = name if flags.find(name) else flags.same.get(name)
    switches = (f"no-{name}", f"disable-{name}")
    off = [f"--{word}" for word in switches if word in flags.by_name]
    advice = flags.advice.get(name)
    if same is not None:
        settings.flags += _words(same, value)
    elif off and isinstance(value, bool):  # Megatron-LM's name of what is on
        settings.flags += off[:1] * (not value)
    elif advice:
        settings.lacking += [f"{key} {_short(value)}: {advice}"] * (not is_off(value))
    else:
        settings.lacking.append(_unknown(key, value))


def _unknown(key: str, value: object) -> str:
    return f"{key} {_short(value)}: an unknown key, which was not read"


def _short(value: object) -> str:
    text = text_of(value)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."


def _words(name: str, value: Any) -> Iterator[str]:
    """A flag and its values; of a switch that is off, the flag that turns it off."""
    if value is False:
        name = f"no-{name}"
    flag = training_flags().find(name)
    if (flag and flag.nargs == "*") or isinstance(value, bool) is bool(flag and flag.nargs == 0):
        values = value if isinstance(value, list) else [value] * (not isinstance(value, bool))
        if values or isinstance(value, bool):  # a flag without values has none to set
            yield from (f"--{name}", *(re.sub(r",\s+", ",", str(item)) for item in values))


def _filled(template: str, known: Mapping[str, Any], value: Any) -> list[str]:
    """The flags of a template; a key that the file leaves out stays in braces."""
    items = enumerate(value) if isinstance(value, list) else ()
    filled = {**known, "": value, **{str(index): item for index, item in items}}

    def text(mark: re.Match[str]) -> str:
        values = [filled.get(key, mark[0]) for key in mark[1].split("*")]
        return text_of(math.prod(map(float, values)) if len(values) > 1 else values[0])

    return [re.sub(r"\{([^{}]*)\}", text, word) for word in template.split()]


def _has_effect(table: Mapping[str, Any], settings: Settings, key: str) -> bool:
    """Whether one of the conditions of a key holds: `other`, `!other` or `other=value`."""
    limits = table.get("only", {})
    conditions = limits.get(_matching(limits, key), ())
    for condition in conditions:
        name, equals, wanted = condition.lstrip("!").partition("=")
        value = settings.values.get(name)
        if str(value) == wanted if equals else bool(value) is not condition.startswith("!"):
            return True
    return not conditions


def _primus(modules: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """The values of an experiment, over the values of the model and the trainer that it names."""
    module = next(iter(modules.values()), None)
    if not isinstance(module, dict) or not isinstance(module.get("overrides") or {}, dict):
        reason = "modules must have a module with keys, and overrides keys of its own"
        raise user_error("doctor-file-unreadable", path=path, reason=reason)
    values: dict[str, Any] = {"sft_trainer": "sft" in str(module.get("config", ""))}
    for key, folder in (("config", "modules"), ("model", "models")):
        name = str(module.get(key, ""))
        inside = f"primus/configs/{folder}/megatron/{name}"
        places = [path.parent / name, *(parent / inside for parent in path.resolve().parents)]
        base = next((file for file in places if file.is_file()), None)
        if base is not None:
            values |= _with_bases(base)
        elif key == "config":
            values |= trainer_table("primus")["configs"].get(name, {})
        else:
            reason = f"its model {name} is not there"
            raise user_error("doctor-file-unreadable", path=path, reason=reason)
    return values | (module.get("overrides") or {})


def _with_bases(path: Path, depth: int = 0) -> dict[str, Any]:
    """The values of a file of Primus that differ from Megatron-LM's, over its bases' values.

    A file that only lists the names and defaults of all keys is asked for the known ones.

    Args:
        path: The file.
        depth: Number of files within each other that have it as a base.
    """
    if depth > MOST_BASES:
        reason = f"it has more than {MOST_BASES} bases within each other, or itself as its base"
        raise user_error("doctor-file-unreadable", path=path, reason=reason)
    values = _load(path)
    merged = dict[str, Any]()
    table = trainer_table("primus")
    for key in ("extends", "includes", "bases"):
        names = values.pop(key, None) or ()
        for name in names if isinstance(names, list) else [names] * bool(names):
            base = path.parent / str(name)
            merged |= _with_bases(base, depth + 1) if base.is_file() else {}
    is_list = path.name in table["lists_of_keys"].split()
    return merged | {k: v for k, v in values.items() if not is_list or _is_set(table, k, v)}


def _is_set(table: Mapping[str, Any], name: str, value: Any) -> bool:
    """Whether a value of a list of all keys differs from what this program does without it."""
    flag = training_flags().by_name.get(dashed(name))
    if name in table["defaults"]:
        return True
    if flag is None or flag.outcome not in ("set", "no_op") or value is None:
        return False
    return bool(value != flag.default and (value or flag.default))
