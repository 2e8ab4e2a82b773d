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
from pathlib import Path
from typing import Any

from megatron_ds.cli.doctor.training_command import TrainingCommand
from megatron_ds.cli.flags import dashed, training_flags
from megatron_ds.config.problems import user_error

FILES = (".toml", ".yaml", ".yml", ".json")
ENVIRONMENT = re.compile(r"\$\{(\w+)(?::([^}]*))?\}")
AXES = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "ds_sequence_parallel_size")


@functools.cache
def tables() -> Mapping[str, Any]:
    """The content of frameworks.toml."""
    return tomllib.loads(Path(__file__).with_name("frameworks.toml").read_text("utf-8"))


def translate(path: Path, world_size: int | None) -> TrainingCommand:
    """The training command of a configuration file.

    Args:
        path: The file.
        world_size: Number of processes; None if it is not known.

    Raises:
        UserError: If the file cannot be read, or is of no known trainer.
    """
    framework, values = _read(path)
    table = tables()[framework]
    known = {k: v for k, v in table["defaults"].items() if k not in values} | values
    folder = known.pop(table.get("model", ""), None)
    result = TrainingCommand(str(path), world_size=world_size, source=table["source"])
    result.model = None if folder is None else Path(folder)
    result.differences = [
        f"{topic}: {theirs}; here {ours}" for topic, theirs, ours in table.get("differences", ())
    ]
    for key, value in known.items():
        if value is not None and key not in table["batch"] and _has_effect(table, known, key):
            _translate_key(table, known, key, result)
    micro, steps, total = (int(known.get(key) or 0) for key in table["batch"])
    if micro > 0:
        by_name = training_flags().by_name
        axes = math.prod(
            int(value)
            for word, value in itertools.pairwise(result.flags)
            if word[:2] == "--" and getattr(by_name.get(word[2:]), "field", "") in AXES
        )
        if total <= 0:
            total = micro * max(1, steps) * ((world_size or axes) // axes)
        result.flags += ["--micro-batch-size", str(micro), "--global-batch-size", str(total)]
    return result


def _read(path: Path) -> tuple[str, dict[str, Any]]:
    """The trainer that a file is of, and its values by key."""
    import yaml

    # gpt-neox's files are JSON with comments and with the booleans of Python: YAML reads them.
    parse = {".toml": tomllib.loads, ".json": json.loads}.get(path.suffix, yaml.safe_load)
    try:
        values = parse(path.read_text("utf-8"))
    except Exception as error:
        reason = " ".join(str(error).split())
        raise user_error("doctor-file-unreadable", path=path, reason=reason) from error
    if not isinstance(values, dict):
        raise user_error("doctor-file-unreadable", path=path, reason="it is not a mapping")
    if path.suffix in (".toml", ".json"):
        return "torchtitan" if path.suffix == ".toml" else "hf", dict(_flat(values))
    if isinstance(values.get("MODEL_ARGS"), dict):
        return "megatron", {dashed(k).replace("-", "_"): v for k, v in values["MODEL_ARGS"].items()}
    if isinstance(values.get("modules"), dict):
        return "primus", _primus(values["modules"], path)
    return "neox", {key.replace("-", "_"): value for key, value in _flat(values)}


def _translate_key(
    table: Mapping[str, Any], known: dict[str, Any], key: str, result: TrainingCommand
) -> None:
    value, flags = known[key], training_flags()
    name = dashed(key).rpartition(".")[2]
    same = name if name in flags.by_name else flags.same.get(name)
    target, advice = table.get("flags", {}).get(key, same), flags.advice.get(name)
    if isinstance(target, dict):
        advice = table.get("advice", {}).get(key, f"supported: {', '.join(target)}")
        target = target.get(str(value), target.get("*"))
    if target is None and advice and value not in (False, "", []):
        result.lacking.append(f"{key} {value}: {advice}")
    elif target is None:
        result.unread += [key] * (value is not False)
    elif target.startswith("--"):
        result.flags += _filled(target, known, value)
    elif target:
        result.flags += _words(target, value)


def _words(name: str, value: Any) -> Iterator[str]:
    """A flag and its values; of a switch that is off, the flag that turns it off."""
    by_name = training_flags().by_name
    if isinstance(value, bool):
        name = name if value else f"no-{name}"
        if name in by_name and by_name[name].nargs == 0:
            yield f"--{name}"
    elif name not in by_name or by_name[name].nargs != 0:
        yield f"--{name}"
        for each in value if isinstance(value, list) else [value]:
            yield re.sub(r",\s+", ",", str(each))


def _filled(template: str, known: dict[str, Any], value: Any) -> list[str]:
    """The flags of a template; a key that the file leaves out stays in braces."""
    items = enumerate(value) if isinstance(value, list) else ()
    filled = known | {"": value} | {str(place): each for place, each in items}

    def text(mark: re.Match[str]) -> str:
        values = [filled.get(key, mark[0]) for key in mark[1].split("*")]
        return f"{math.prod(map(float, values)):g}" if len(values) > 1 else str(values[0])

    return [re.sub(r"\{([^{}]*)\}", text, each) for each in template.split()]


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
        inside = f"primus/configs/{folder}/megatron/{name}"
        places = [path.parent / name, *(each / inside for each in path.resolve().parents)]
        found = next((each for each in places if each.is_file()), None)
        if found is not None:
            values |= {k: v for k, v in _with_bases(found).items() if _is_given(k, v)}
        elif key == "model":
            reason = f"its model {name} is not there"
            raise user_error("doctor-file-unreadable", path=path, reason=reason)
    return values | _resolved(module.get("overrides") or {})


def _with_bases(path: Path) -> dict[str, Any]:
    import yaml

    own = _resolved(yaml.safe_load(path.read_text("utf-8")) or {})
    merged: dict[str, Any] = {}
    for name in [*(own.pop("extends", None) or ()), *(own.pop("includes", None) or ())]:
        base = path.parent / str(name)
        merged |= _with_bases(base) if base.is_file() else {}
    return merged | own


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


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Values of nested blocks by their joined keys."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
