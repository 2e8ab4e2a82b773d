"""The user's --deepspeed_config file: parsed, validated and normalized to current key names.

Owns how old spellings are translated, what is dropped with a warning and what is refused. What a
key means for the run is in `ds_config_merge`. Does not import deepspeed.
"""

from __future__ import annotations

import copy
import difflib
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import hjson
from hjson.decoder import HjsonDecodeError, scanKeyName

from megatron_ds.config.deepspeed_file import (
    DeepSpeedFile,
    Json,
    get,
    has,
    leaves,
    pop,
    put,
)
from megatron_ds.config.file_syntax import is_block_yaml, other_syntax
from megatron_ds.config.problems import Problem, UserError, user_error
from megatron_ds.engine.ds_config import keys as ds_keys
from megatron_ds.engine.ds_config.schedules import DECAY_MAX_LR
from megatron_ds.engine.ds_config.values import Kind, as_bool, as_object

RUN_KEYS = {
    f"{first}{joint}{second}"
    for first, second in (
        ("num", "layers"),
        ("hidden", "size"),
        ("data", "path"),
        ("seq", "length"),
    )
    for joint in "-_"
}
"""Settings of every run, which DeepSpeed's files do not have."""
LITERAL = r"(?:true|false|null|-?\d[-+.\w]*)"
COMMENT = r"\#[^\n]* | //[^\n]* | /\*.*?\*/"
TOKEN = re.compile(
    rf"""
    {COMMENT}
    | \'{{3}}.*?\'{{3}} | "(?:[^"\\]|\\.)*" | '(?:[^'\\]|\\.)*'  # texts
    | [{{}}\[\],\n]
    | :(?:[ \t]*  # with a text without quotes, which ends with its line
        (?![\s"'{{}}\[\]] | {COMMENT} | {LITERAL}\s*(?:[,}}\]\n]|\Z|{COMMENT})) [^\n]*)?
    | {LITERAL}(?=[,}}\]\s\#/]|\Z) | [^\s{{}}\[\],:"']+  # key without quotes
    """,
    re.VERBOSE | re.DOTALL,
)
"""Tokens of Hjson, as far as they decide where keys are."""


def read_file(path: str) -> DeepSpeedFile:
    """Read a file, replace its old keys by the current ones, and find its problems.

    Raises:
        UserError: If it is not a JSON object.
    """
    file = parse_file(path)
    normalize(file)
    return file


def parse_file(path: str) -> DeepSpeedFile:
    """Read a file as it is written, in Hjson as DeepSpeed does: with comments and trailing commas.

    Raises:
        UserError: If it is not a JSON object.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
        if not text.strip():  # an empty object to Hjson
            raise ValueError("empty")
        try:
            values = json.loads(text, object_pairs_hook=_without_duplicates)
        except json.JSONDecodeError:
            _check_syntax(path, text)
            values = hjson.loads(text, object_pairs_hook=_without_duplicates)
    except UserError:
        raise
    except HjsonDecodeError as error:
        reason = str(error).rpartition(": line ")[0]
        reason = reason.replace("Bad key name (eof)", "the end of an object is missing")
        raise _unreadable(f"{path}:{error.lineno}:{error.colno}", reason) from error
    except RecursionError:
        raise _unreadable(path, "nested too deeply") from None
    except IndexError:
        raise _unreadable(path, "ends inside a comment or a text") from None
    except (OSError, ValueError, OverflowError) as error:  # of numbers that are too large as well
        raise _unreadable(path, error) from error
    if not isinstance(values, dict):
        raise _unreadable(path, "not a JSON object")
    if (key := next((key for key in values if key in RUN_KEYS), None)) is not None:
        raise user_error("ds-config-has-flags", path=path, key=key)
    return DeepSpeedFile(path, values, _key_lines(text))


def _check_syntax(path: str, text: str) -> None:
    """
    Raises:
        UserError: If a text is in TOML, Python or YAML, which Hjson reads as something else.
    """
    syntax = other_syntax(path, text) or ("YAML" if is_block_yaml(path, text) else "")
    if syntax:
        raise user_error("ds-config-of-other-syntax", path=path, syntax=syntax)


def normalize(file: DeepSpeedFile) -> None:
    """Replace old keys of a parsed file by the current ones, and find its problems."""
    _drop_inactive_curriculum(file)
    translate(file)
    _drop_or_refuse_keys(file)
    _check_keys_and_values(file)
    _drop_rate_of_optimizer(file)


def translate(file: DeepSpeedFile) -> None:
    """Replace old keys of a parsed file by the current ones."""
    _normalize_blocks(file)
    _translate_old_keys(file)


def _unreadable(location: str, reason: object) -> UserError:
    return user_error("ds-config-unreadable", location=location, reason=reason)


def _drop_inactive_curriculum(file: DeepSpeedFile) -> None:
    # Before all else: the content of a disabled block is not even checked.
    key = "curriculum_learning"
    if get(file.values, key) == "auto":
        pop(file.values, key)
    elif has(file.values, key) and _is_off(get(file.values, key)):
        pop(file.values, key)
        _warn_dropped(file, key, "it is off")


def _normalize_blocks(file: DeepSpeedFile) -> None:
    """Drop blocks that are null or not objects, so that the rest is readable."""
    values = file.values
    zero = file.values.get("zero_optimization")
    if isinstance(zero, bool):
        values["zero_optimization"] = {"stage": int(zero)}
        _warn_translated(file, "zero_optimization", f'{{"stage": {int(zero)}}}')
    if "bfloat16" in values and "bf16" not in values:
        _replace_key(file, "bfloat16", "bf16", values.pop("bfloat16"))
    for block in ds_keys.BLOCKS:
        value = get(values, block)
        if value is None:
            pop(values, block)
        else:
            _check_value(file, block, as_object, value)


def _translate_old_keys(file: DeepSpeedFile) -> None:
    values = file.values
    for old, new in ds_keys.RENAMED.items():
        if has(values, old):
            _replace_key(file, old, new, pop(values, old))
    pin = pop(values, ds_keys.OLD_PIN_KEY)
    is_pin_used = False
    for old, (new, replacement) in ds_keys.OLD_SWITCHES.items():
        value = get(values, old)
        if value is not None and _check_value(file, old, as_bool, value):
            if not value:
                _warn_dropped(file, old, "it is off")
            elif isinstance(replacement, dict) and isinstance(pin, bool):
                is_pin_used = True
                _replace_key(file, old, new, {**replacement, "pin_memory": pin})
            else:
                _replace_key(file, old, new, replacement)
        pop(values, old)
    if is_pin_used:
        _warn_translated(file, ds_keys.OLD_PIN_KEY, "pin_memory")
    elif pin is not None:
        _warn_dropped(file, ds_keys.OLD_PIN_KEY, "nothing is offloaded")


def _replace_key(file: DeepSpeedFile, old: str, new: str, value: Any) -> None:
    """Set the current key that replaces an old one, unless it contradicts."""
    present = get(file.values, new)
    agrees = present == value
    if isinstance(present, dict) and isinstance(value, dict):
        agrees = all(present.get(key, one) == one for key, one in value.items())
    if present is not None and not agrees:
        problem = Problem("ds-old-key-contradicts", old=old, present=file.describe(new))
        file.problems.append(file.at(old, problem))
        return
    if present is None:
        put(file.values, new, copy.deepcopy(value))
        children = value if isinstance(value, dict) else ()
        for key in (new, *(f"{new}.{child}" for child in children)):
            file.lines.setdefault(key, file.lines.get(old, 1))
    _warn_translated(file, old, f"{new} {json.dumps(value)}")


def _drop_or_refuse_keys(file: DeepSpeedFile) -> None:
    for key, reason in (ds_keys.IGNORED_KEYS | ds_keys.REFUSED).items():
        if not has(file.values, key):
            continue
        value = pop(file.values, key)
        if value == "auto":
            continue
        if key in ds_keys.REFUSED and _is_off(value):
            _warn_dropped(file, key, f"it is off, and not supported: {reason}")
        elif key in ds_keys.IGNORED_KEYS and value == ds_keys.DROPPED_IF.get(key, value):
            _warn_dropped(file, key, reason)
        else:
            problem = Problem("ds-key-unsupported", key=key, reason=reason)
            file.problems.append(file.at(key, problem))


def _check_keys_and_values(file: DeepSpeedFile) -> None:
    for block, kinds in {"": ds_keys.TOP_KEYS, **ds_keys.BLOCKS}.items():
        for dotted, key, value in _entries(file, block):
            if key not in kinds:
                is_checked = block in ds_keys.CHECKED_BLOCKS
                hint = did_you_mean(key, kinds, 0.6 if is_checked else 0.8)
                if is_checked or hint:  # most likely a misspelt key, whose setting would be lost
                    problem = Problem("ds-key-unknown", key=dotted, hint=hint)
                    file.problems.append(file.at(dotted, problem))
                else:
                    pop(file.values, dotted)
                    _warn_dropped(file, dotted, f"DeepSpeed does not read it{hint}")
            elif value not in (None, "auto"):
                _check_value(file, dotted, kinds[key], value)


def _drop_rate_of_optimizer(file: DeepSpeedFile) -> None:
    """A warm-up of DeepSpeed replaces the learning rate of the optimizer."""
    key = "optimizer.params.lr"
    peak = "scheduler.params.warmup_max_lr"
    value = file.get(peak)
    if file.get("scheduler.type") == "WarmupDecayLR" and not has(file.values, peak):
        value = DECAY_MAX_LR
    if file.get(key) is not None and value not in (None, file.get(key)):
        pop(file.values, key)
        _warn_dropped(file, key, f"the scheduler sets the learning rate, by warmup_max_lr {value}")


def unknown_keys(file: DeepSpeedFile) -> list[str]:
    """The dotted keys of a file that are unknown."""
    return [
        dotted
        for block, kinds in {"": ds_keys.TOP_KEYS, **ds_keys.BLOCKS}.items()
        for dotted, key, _ in _entries(file, block)
        if key not in kinds
    ]


def did_you_mean(name: str, names: Iterable[str], cutoff: float = 0.6) -> str:
    """The end of a message about an unknown name."""
    near = difflib.get_close_matches(name, list(names), n=1, cutoff=cutoff)
    return f"; did you mean {near[0]!r}?" if near else ""


def _entries(file: DeepSpeedFile, block: str) -> list[tuple[str, str, Any]]:
    """Dotted key, key and value of the keys in a block; none of options that are not read."""
    if block == "scheduler.params" and not str(file.get("scheduler.type")).startswith("Warmup"):
        return []  # the scheduler is refused by its type
    values = (get(file.values, block) or {}) if block else file.values
    return [(f"{block}.{key}".removeprefix("."), key, value) for key, value in values.items()]


def _check_value(file: DeepSpeedFile, key: str, convert: Kind, value: Any) -> bool:
    """Whether a value is valid; an invalid one is removed, so that the rest is readable."""
    try:
        convert(value)
    except ValueError as error:
        file.problems.append(file.invalid(key, error))
        pop(file.values, key)
        return False
    return True


def _warn_dropped(file: DeepSpeedFile, key: str, reason: str) -> None:
    file.warnings.append(file.at(key, Problem("ds-key-dropped", key=key, reason=reason)))


def _warn_translated(file: DeepSpeedFile, key: str, current: str) -> None:
    file.warnings.append(file.at(key, Problem("ds-old-key", key=key, current=current)))


def _without_duplicates(pairs: list[tuple[str, Any]]) -> Json:
    """Python's parser keeps the last of several equal keys, silently."""
    seen: set[str] = set()
    for key, _ in pairs:
        if key in seen:
            raise ValueError(f"duplicate key {key!r}")
        seen.add(key)
    return dict(pairs)


def _key_lines(text: str) -> dict[str, int]:
    """Line of every dotted key in valid Hjson, without keys inside lists."""
    lines: dict[str, int] = {}
    stack: list[str | None] = []  # the key of each open object; None for a list
    key = ""
    line = 1
    last = ""
    last_line = 1
    for match in TOKEN.finditer(text):
        token = match.group()
        if token == "{":
            stack.append(key)
        elif token == "[":
            stack.append(None)
        elif token in ("}", "]"):
            stack = stack[:-1]
        elif token.startswith(":"):
            if None not in stack:
                key = scanKeyName(f"{last}:", 0)[0]
                lines[".".join([*(name for name in stack if name), key])] = last_line
        elif token not in (",", "\n") and not token.startswith(("#", "//", "/*")):
            last = token
            last_line = line
        line += token.count("\n")
    return lines


def _is_off(value: Any) -> bool:
    """Whether a key or block disables its feature."""
    if not isinstance(value, dict):
        return not value or value == "auto"
    if "enabled" in value:
        parts = [one for one in value.values() if isinstance(one, dict) and "enabled" in one]
        return value["enabled"] in (False, "auto") or (parts != [] and all(map(_is_off, parts)))
    keys = leaves(value)
    switches = [key for key in keys if key.endswith(".enabled")]
    return all(_is_off(get(value, key)) for key in switches or keys)
