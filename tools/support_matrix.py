"""The page docs/support_matrix.md, from the tables of megatron_ds/config/support.py."""

from __future__ import annotations

import itertools
import string
from collections.abc import Iterable
from pathlib import Path

from megatron_ds.config import passed_keys, support
from megatron_ds.config.checks import listed
from megatron_ds.config.problems import catalogue
from tools.make_messages import readable

REPOSITORY = Path(__file__).resolve().parents[1]
OUTPUT = REPOSITORY / "docs" / "support_matrix.md"
HEAD = """\
# Support matrix

Written by `python tools/make_docs.py` from `megatron_ds/config/support.py`, the table by which
`pretrain_gpt.py` accepts or rejects a layout before anything is allocated.

A layout is one value for each axis. Each table below has the pairs of one axis with all later ones:
a letter names the [test](#tests) that compares the pair with one process, a code names the
[rule](#what-does-not-work-together) by which it is rejected. A dash is a flag without an effect,
with a warning. The numbers of ranks, micro-batches, layers and heads are not axes: what they must
divide is checked, too.
"""
TESTS = """\
## Tests

Each ran with DeepSpeed {versions} ([other versions](deepspeed_versions.md)). A test covers every
pair of its values, and each of them with the defaults of all other axes. Whole layouts, drawn at
random in each run of the tests, are compared by
`tests/dist/test_layouts.py::test_random_layouts_equal_one_process`.
"""
PASSED = """\
## What is passed on

These keys of a `--deepspeed_config` file are passed on to DeepSpeed where it supports them on the
device, which means CUDA; elsewhere they are rejected. They are not verified here: no test compares
such a run with one process, and the program says so when it starts. After the engine is built, it
must have taken them.
"""
RULES = """\
## What does not work together

The program ends with the code of the second column, and names the closest layout that works.
"""


def page() -> str:
    """The text of docs/support_matrix.md."""
    axes = list(support.AXES)
    parts = [HEAD, "## Axes\n", _axes()]
    for one, name in enumerate(axes[:-1]):
        parts += [f"### {support.AXES[name].title.capitalize()}\n", _pairs(name, axes[one + 1 :])]
    parts += [
        RULES,
        _rules(),
        PASSED,
        _passed(),
        TESTS.format(versions=", ".join(support.TESTED_WITH)),
        _tests(),
    ]
    return "\n".join(parts)


def _axes() -> str:
    rows = [
        (axis.title, f"{value}{' (default)' if value == axis.default else ''}", _code(flags))
        for axis in support.AXES.values()
        for value, flags in axis.values.items()
    ]
    return _table(("axis", "value", "flags"), rows)


def _pairs(name: str, others: Iterable[str]) -> str:
    values = support.AXES[name].values
    rows = []
    for other in others:
        for value in support.AXES[other].values:
            cells = [_cell({name: one, other: value}) for one in values]
            rows.append((f"{support.AXES[other].title}: {value}", *cells))
    return _table(("", *values), rows)


def _cell(part: support.Layout) -> str:
    rule = support.obstacle(part)
    if rule is not None:
        return f"no: `{rule.code}`" if rule.code else "-"
    return " ".join(letter for letter, proof in _lettered() if proof.covers(part))


def _lettered() -> list[tuple[str, support.Proof]]:
    return list(zip(string.ascii_uppercase, support.PROOFS, strict=False))


def _rules() -> str:
    rows = []
    for rule in support.RULES:
        values = ", with ".join(
            f"{support.AXES[axis].title} {' or '.join(values)}"
            for axis, values in rule.values.items()
        )
        instead = listed(
            f"`{support.AXES[axis].words(value)}`" for axis, value in rule.instead.items()
        )
        text = readable(catalogue()[rule.code]["text"])
        reason = text.removeprefix("{combination}: ").partition("; use {closest}")[0]
        rows.append((values, f"`{rule.code}`", reason, instead, rule.upstream))
    return _table(("layout", "code", "because", "closest layout", "reported as"), rows)


def _passed() -> str:
    rows = []
    for one in passed_keys.PASSED:
        values = "; ".join(
            f"{support.AXES[axis].title} {' or '.join(values)}"
            for axis, values in one.values.items()
        )
        result = "an approximation" if one.is_approximation else "one process, by DeepSpeed's word"
        rows.append((f"`{one.key}`", one.effect, values, result))
    return _table(("key", "effect", "only with", "equals"), rows)


def _tests() -> str:
    rows = []
    for letter, proof in _lettered():
        covered = "; ".join(
            f"{support.AXES[axis].title} {', '.join(values)}"
            for axis, values in proof.values.items()
        )
        if proof.values == support.EVERYTHING:
            covered = "all"
        rows.append((letter, f"`{proof.test}`", covered))
    return _table(("", "test", "values"), rows)


def _code(text: str) -> str:
    return f"`{text}`" if text else ""


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = itertools.chain([head, tuple("---" for _ in head)], rows)
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
