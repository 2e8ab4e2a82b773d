"""Translates configuration files of other trainers into flags, with the table frameworks.toml.

Files: TOML of torchtitan, YAML of Primus, gpt-neox and Megatron-LM's tests, JSON of Hugging Face's
Trainer. What a table does not have is reported by name. Knows no torch.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_ds.cli.flags import dashed, training_flags
from megatron_ds.config.problems import user_error

FILES = (".toml", ".yaml", ".yml", ".json")
ENVIRONMENT = re.compile(r"\$\{(\w+)(?::([^}]*))?\}")
PRODUCT = re.compile(r"\{([^{}*]+)\*([^{}*]+)\}")
AXES = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "ds_sequence_parallel_size")


@dataclass
class Translation:
    """Flags of pretrain_gpt.py, and what is left.

    Attributes:
        flags: The arguments.
        lacking: What has no counterpart, with what to do.
        unread: Keys that were not read.
        differences: Topic, meaning there and meaning here.
        source: Where the names are from.
        model: Folder with the config.json of a Hugging Face model.
    """

    flags: list[str] = field(default_factory=list)
    lacking: list[str] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)
    differences: list[list[str]] = field(default_factory=list)
    source: str = ""
    model: Path | None = None


@functools.cache
def tables() -> Mapping[str, Any]:
    """The content of frameworks.toml."""
    return tomllib.loads(Path(__file__).with_name("frameworks.toml").read_text("utf-8"))


def read_file(path: Path) -> tuple[str, dict[str, Any]]:
    """The trainer that a file is of, and its values by key.

    Raises:
        UserError: If the file cannot be read, or is of no known trainer.
    """
    try:
        text = path.read_text("utf-8")
        if path.suffix == ".toml":
            return "torchtitan", _flat(tomllib.loads(text))
        if path.suffix == ".json":
            values = json.loads(text)
        else:
            import yaml

            # gpt-neox's files are JSON with comments and with the booleans of Python.
            values = yaml.safe_load(text)
    except Exception as error:
        raise user_error("doctor-file-unreadable", path=path, reason=_one_line(error)) from error
    if not isinstance(values, dict):
        raise user_error("doctor-file-unreadable", path=path, reason="it is not a mapping")
    if path.suffix == ".json":
        return "hf", _flat(values)
    if isinstance(values.get("MODEL_ARGS"), dict):
        return "megatron", {dashed(k).replace("-", "_"): v for k, v in values["MODEL_ARGS"].items()}
    if isinstance(values.get("modules"), dict):
        return "primus", _primus(values["modules"], path)
    return "neox", {key.replace("-", "_"): value for key, value in _flat(values).items()}


def translate(framework: str, values: Mapping[str, Any], world_size: int | None) -> Translation:
    """The flags of a trainer's settings.

    Args:
        framework: Section of frameworks.toml.
        values: By key.
        world_size: Number of processes; None if it is not known.
    """
    table = tables()[framework]
    known = {k: v for k, v in table["defaults"].items() if k not in values} | dict(values)
    result = Translation(differences=table.get("differences", []), source=table["source"])
    folder = known.pop(table.get("model", ""), None)
    result.model = None if folder is None else Path(folder)
    for key, value in known.items():
        if value is not None and key not in table["batch"] and _has_effect(table, known, key):
            _translate_key(table, known, key, result)
    sizes = [int(known.get(key) or -1) if key else -1 for key in table["batch"]]
    if sizes[0] > 0:
        result.flags += ["--micro-batch-size", str(sizes[0])]
    by_name = training_flags().by_name
    axes = [
        int(value)
        for word, value in itertools.pairwise([*result.flags, ""])
        if word[:2] == "--" and getattr(by_name.get(word[2:]), "field", "") in AXES
    ]
    dp_size = (world_size or math.prod(axes)) // math.prod(axes)
    total = sizes[2] if sizes[2] > 0 else sizes[0] * max(1, sizes[1]) * dp_size
    if sizes[0] > 0:
        result.flags += ["--global-batch-size", str(total)]
    return result


def _translate_key(
    table: Mapping[str, Any], known: dict[str, Any], key: str, result: Translation
) -> None:
    value, flags = known[key], training_flags()
    name = dashed(key).rpartition(".")[2]
    texts = table.get("values", {}).get(key)
    if texts is not None:
        words = texts.get(str(value), texts.get("*"))
        if words is None:
            advice = table.get("advice", {}).get(key, f"supported: {', '.join(texts)}")
            result.lacking.append(f"{key} {value}: {advice}")
        result.flags += _filled(words or "", known, value)
        return
    target = table.get("flags", {}).get(key)
    if target is None:
        target = name if name in flags.by_name else flags.same.get(name)
    if target is not None and target.startswith("--"):
        result.flags += _filled(target, known, value)
    elif target:
        result.flags += _words(target, value)
    elif target is None and name in flags.advice and value not in (False, "", []):
        result.lacking.append(f"{key} {value}: {flags.advice[name]}")
    elif value is not False:
        result.unread.append(key)


def _words(name: str, value: Any) -> Iterator[str]:
    """A flag and its values; of a switch that is off, the flag that turns it off."""
    by_name = training_flags().by_name
    flag = by_name.get(name)
    off = f"no-{name}"
    if value is False:
        yield from [f"--{off}"] if off in by_name else []
    elif value is True:
        yield from [f"--{name}"] if flag is not None and flag.nargs == 0 else []
    elif flag is None or flag.nargs != 0:
        listed = value if isinstance(value, list) else [value]
        yield f"--{name}"
        yield from (re.sub(r",\s+", ",", str(each)) for each in listed)


def _filled(template: str, known: dict[str, Any], value: Any) -> list[str]:
    """The flags of a template."""
    text = PRODUCT.sub(
        lambda keys: f"{math.prod(float(known[k]) for k in keys.groups()):g}", template
    )
    filled = known | (
        {str(i): each for i, each in enumerate(value)} if isinstance(value, list) else {}
    )
    words = (
        re.sub(r"\{([^{}]*)\}", lambda key: str(filled.get(key[1], value)), each)
        for each in text.split()
    )
    return list(words)


def _has_effect(table: Mapping[str, Any], known: Mapping[str, Any], key: str) -> bool:
    """Whether one of the conditions of a key holds: `other`, `!other` or `other=value`."""
    conditions = table.get("only", {}).get(key)

    def holds(condition: str) -> bool:
        name, equals, wanted = condition.lstrip("!").partition("=")
        value = known.get(name)
        return str(value) == wanted if equals else bool(value) is not condition.startswith("!")

    return conditions is None or any(map(holds, conditions))


def _primus(modules: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """The values of an experiment, over those of the model and the trainer that it names."""
    module = next(iter(modules.values()))
    values: dict[str, Any] = {}
    for key, folder in (("config", "modules"), ("model", "models")):
        name = str(module.get(key, ""))
        places = [
            each / f"primus/configs/{folder}/megatron/{name}" for each in path.resolve().parents
        ]
        found = next((each for each in [path.parent / name, *places] if each.is_file()), None)
        base = {} if found is None else _with_bases(found)
        if found is None and key == "model":
            raise user_error(
                "doctor-file-unreadable", path=path, reason=f"its model {name} is not there"
            )
        values |= {k: v for k, v in base.items() if _is_given(k, v)}
    values |= _resolved(module.get("overrides") or {})
    return values


def _with_bases(path: Path) -> dict[str, Any]:
    import yaml

    own = _resolved(yaml.safe_load(path.read_text("utf-8")) or {})
    bases = [*(own.pop("extends", None) or ()), *(own.pop("includes", None) or ())]
    paths = [path.parent / str(each) for each in bases]
    merged = [_with_bases(each) for each in paths if each.is_file()]
    return functools.reduce(lambda first, second: first | second, [*merged, own], {})


def _is_given(name: str, value: Any) -> bool:
    """Whether a value of a base file differs from what this program does without it."""
    by_name = training_flags().by_name
    flag = by_name.get(dashed(name))
    if name in tables()["primus"]["defaults"]:
        return True
    if flag is None or flag.outcome not in ("set", "no_op") or value is None:
        return False
    return value != flag.default and bool(value or flag.default)


def _resolved(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values with the defaults of `${VARIABLE:default}`."""
    import yaml

    def resolve(value: Any) -> Any:
        if not isinstance(value, str) or not ENVIRONMENT.search(value):
            return value
        return yaml.safe_load(ENVIRONMENT.sub(lambda found: found[2] or "", value))

    return {str(key): resolve(value) for key, value in values.items()}


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Values of nested blocks by their joined keys."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= (
            _flat(value, f"{prefix}{key}.")
            if isinstance(value, dict)
            else {f"{prefix}{key}": value}
        )
    return flat


def _one_line(error: object) -> str:
    return " ".join(str(error).split())
