"""The page docs/reference/support_matrix.md, from the tables of the package."""

from __future__ import annotations

import itertools
import json
import re
import string
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from megatron_ds.config import support_matrix
from megatron_ds.config.checks import listed
from megatron_ds.config.problems import catalogue, default_flag, plural
from megatron_ds.engine.ds_config import passthrough
from tests.dist import proofs
from tests.dist.proofs import EVERYTHING, PROOFS, Proof

REPOSITORY = Path(__file__).resolve().parents[2]
OUTPUT = REPOSITORY / "docs" / "reference" / "support_matrix.md"
HEAD = """\
# Support matrix

For people who combine settings: whether two of them work together, and which test shows it.

Written by `python -m tests.pages` from `support_matrix.py` and `layout_rules.toml` of
`megatron_ds/config/`, by which `pretrain_gpt.py` accepts or rejects a layout before anything is
allocated.

A layout is one value for each axis. Each table below has the pairs of one axis with all later ones:
a letter names the [test](#tests) that compares the pair with one process, a code names the
[rule](#what-does-not-work-together) by which it is rejected. A dash is a flag without an effect,
with a warning. The numbers of ranks, micro-batches, layers and heads are not axes: what they must
divide is checked, too. Flags that are not an axis have rules of their own: `--use-bnb-optimizer` is
rejected with offloading, pipeline stages, DeepSpeed-Ulysses and experts; `--compile` with
`--tiled-mlp`; `--contiguous-checkpointing`, `--eval-tasks` and `--eval-only` with pipeline stages.
"""
TESTS = """\
## Tests

A test covers every pair of its values, and each of them with the defaults of all other axes. The
versions of DeepSpeed are those with which all of its cases passed in the last recorded run of
`make test-deepspeed` ([failures](../development/deepspeed_versions.md)).
Whole layouts, drawn at random, are compared by
`tests/dist/test_layouts.py::test_random_layouts_equal_one_process`.
"""
UNRECORDED = """\
### Pairs without a record

In the last recorded run with the version of `requirements.txt`, no case of A had these pairs.
"""
LAYOUTS = "tests/dist/test_layouts.py::test_layout_equals_one_process"
RECORD = REPOSITORY / "tests" / "versions" / "results.json"
Record = dict[str, dict[str, dict[str, Any]]]
"""Results by version and test."""
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


def page(record: Record | None = None) -> str:
    """The text of docs/reference/support_matrix.md.

    Args:
        record: What `make test-deepspeed` recorded. None: the file.
    """
    if record is None:
        record = json.loads(RECORD.read_text(encoding="utf-8"))
    axes = list(support_matrix.AXES)
    parts = [HEAD, "## Axes\n", _axes()]
    for one, name in enumerate(axes[:-1]):
        title = support_matrix.AXES[name].title
        # Names keep their own case: ZeRO, hpZ, DeepSpeed.
        title = title[0].upper() + title[1:] if title.split()[0].islower() else title
        parts += [f"### {title}\n", _pairs(name, axes[one + 1 :])]
    parts += [RULES, _rules(), PASSED, _passed(), TESTS, _tests(record)]
    missing = unrecorded_pairs(record, pinned_version())
    if missing:
        parts += [UNRECORDED, _table(("", ""), missing)]
    return "\n".join(parts)


def _axes() -> str:
    rows = [
        (axis.title, f"{value}{' (default)' if value == axis.default else ''}", _code(flags))
        for axis in support_matrix.AXES.values()
        for value, flags in axis.values.items()
    ]
    return _table(("axis", "value", "flags"), rows)


def _pairs(name: str, others: Iterable[str]) -> str:
    values = support_matrix.AXES[name].values
    rows = []
    for other in others:
        for value in support_matrix.AXES[other].values:
            cells = [_cell({name: one, other: value}) for one in values]
            rows.append((f"{support_matrix.AXES[other].title}: {value}", *cells))
    return _table(("", *values), rows)


def _cell(part: support_matrix.Layout) -> str:
    rule = proofs.obstacle(part)
    if rule is not None:
        return f"no: `{rule.code}`" if rule.code else "-"
    return " ".join(letter for letter, proof in _lettered() if proof.covers(part))


def _lettered() -> list[tuple[str, Proof]]:
    letters = [*string.ascii_uppercase, *(f"A{each}" for each in string.ascii_uppercase)]
    return list(zip(letters[: len(PROOFS)], PROOFS, strict=True))


def passing_versions(test: str, record: Record) -> list[str]:
    """The versions with which all cases of a test passed, the newest first."""
    found = [
        version
        for version, results in record.items()
        if (result := results.get(test)) and result["cases"] and not result["failed"]
    ]
    return sorted(found, key=lambda version: tuple(map(int, version.split("."))), reverse=True)


def pinned_version() -> str:
    """The version of DeepSpeed in requirements.txt."""
    text = (REPOSITORY / "requirements.txt").read_text(encoding="utf-8")
    (version,) = re.findall(r"^deepspeed==(.+)$", text, re.MULTILINE)
    return str(version)


def unrecorded_pairs(record: Record, version: str) -> list[tuple[str, ...]]:
    """The accepted pairs of values that no case of the layouts passed with a version."""
    result = record.get(version, {}).get(LAYOUTS, {})
    if "layouts" not in result:
        return []  # A itself is not recorded
    defaults = {name: axis.default for name, axis in support_matrix.AXES.items()}
    passed = [
        {**defaults, **layout}.items()
        for name, layout in result["layouts"].items()
        if name not in result["failed"]
    ]
    accepted = (
        pair
        for axes in itertools.combinations(support_matrix.AXES, 2)
        for pair in proofs.pairs(*axes)
        if proofs.obstacle(pair) is None
    )
    missing = (pair for pair in accepted if not any(pair.items() <= run for run in passed))
    titles = {name: axis.title for name, axis in support_matrix.AXES.items()}
    return [tuple(f"{titles[axis]} {pair[axis]}" for axis in pair) for pair in missing]


def _alternatives(values: Mapping[str, Iterable[str]]) -> list[str]:
    """Each axis with its values: `ZeRO stage 1 or 2`."""
    return [
        f"{support_matrix.AXES[axis].title} {' or '.join(each)}" for axis, each in values.items()
    ]


def readable(text: str) -> str:
    """A message for the table: placeholders by name, references to fields as flags."""
    parts = []
    for literal, name, spec, _ in string.Formatter().parse(text):
        parts.append(literal)
        if name == "option":
            parts.append(default_flag(spec or ""))
        elif name == "settings":
            parts.append(f"{default_flag(spec or '')} {{{spec}}}")
        elif name:
            _, space, noun = (spec or "").partition(" ")
            parts.append(f"{{{name}}}{space}{plural(noun) if noun else ''}")
    return "".join(parts).replace("|", "\\|").replace("\n", "<br>")


def _rules() -> str:
    rows = []
    for rule in support_matrix.RULES:
        values = ", with ".join(_alternatives(rule.values))
        instead = listed(
            f"`{support_matrix.AXES[axis].flags_text(value)}`"
            for axis, value in rule.alternative.items()
        )
        text = readable(catalogue()[rule.code]["text"])
        reason = text.removeprefix("{combination}: ").partition("; use {closest}")[0]
        rows.append((values, f"`{rule.code}`", reason, instead, rule.upstream))
    return _table(("layout", "code", "because", "closest layout", "reported as"), rows)


def _passed() -> str:
    rows = []
    for one in passthrough.PASSED:
        values = "; ".join(_alternatives(one.values))
        result = "an approximation" if one.is_approximation else "one process, as DeepSpeed states"
        rows.append((f"`{one.key}`", one.effect, values, result))
    return _table(("key", "effect", "only with", "equals"), rows)


def _tests(record: Record) -> str:
    rows = []
    for letter, proof in _lettered():
        covered = "; ".join(
            f"{support_matrix.AXES[axis].title} {', '.join(values)}"
            for axis, values in proof.values.items()
        )
        if proof.values == EVERYTHING:
            covered = "all"
        versions = ", ".join(passing_versions(proof.test, record)) or "none recorded"
        rows.append((letter, f"`{proof.test}`", covered, versions))
    return _table(("", "test", "values", "DeepSpeed"), rows)


def _code(text: str) -> str:
    return f"`{text}`" if text else ""


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = itertools.chain([head, tuple("---" for _ in head)], rows)
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
