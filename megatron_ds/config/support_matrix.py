"""The support matrix: which layouts work together, and why other layouts do not.

A *layout* is one value for each axis of `AXES`. The validator rejects a layout that a rule of
`RULES` forbids; docs/reference/support_matrix.md is generated from the same tables by `python
-m tests.pages`; the tests draw their layouts from them. So nothing is accepted that the
page does not list, and no layout is rejected in one place and run in another. Flags that are not an
axis, such as --compile, have rules of their own, which the page names.

To add a feature:

1. Add its axis, or its value of an axis, to layout_axes.toml, with the flags that request it. An
   optimizer is a value by its declaration in options/optimizer_specs.py, which names the rules
   that it breaks.
2. Add a rule to layout_rules.toml for each combination that does not work or has no test, with the
   layout to use instead, and its message to messages.toml, as `{combination}: REASON; use
   {closest}`. A rule may name one axis (the value never works) or several, and is checked before
   anything is allocated.
3. The pairs that no rule forbids are then run by `tests/dist/test_layouts.py`. What the value needs
   there (small sizes, a rate) is in `TEST_FLAGS` of `tests/dist/layouts.py`, an axis that
   multiplies the ranks of a replica in `SIZES`.
4. Add a `Proof` to `tests/dist/proofs.py` for each further test, with the values that it covers.

`tests/unit/config/test_support.py` checks that every test exists, that every accepted pair has one,
and that the validator rejects what a rule forbids.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import field
from typing import Any

from megatron_ds.config import GROUPS, Config, flag_of
from megatron_ds.config.checks import listed
from megatron_ds.config.data_files import read_table
from megatron_ds.config.fields import option_fields
from megatron_ds.config.options.optimizer_specs import excluded_by
from megatron_ds.config.problems import Problem
from megatron_ds.dataclass import dataclass

Layout = Mapping[str, str]
"""A value for each axis."""
Values = Mapping[str, tuple[str, ...]]
"""Values of some axes."""


@dataclass(frozen=True)
class Axis:
    """A property of a layout.

    Attributes:
        title: Name in the documentation.
        values: Flags that request a value, by value.
        read: The value of a configuration, which is complete: DeepSpeed's file is merged.
        default: The value without flags.
        named: Flags as messages name them, by value, where `values` has example numbers.
    """

    title: str
    values: Mapping[str, str]
    read: Callable[[Config], str]
    default: str
    named: Mapping[str, str] = field(default_factory=dict)

    def flags_text(self, value: str, current: str | None = None) -> str:
        """The flags of a value for messages: `--zero-stage 0`, `no --bf16 or --fp16`.

        Args:
            value: The value.
            current: The value that it replaces, whose flags are to be left out. None: any.
        """
        flags = self.named.get(value, self.values[value])
        if value == MANY:
            return f"{flags.split()[0]} > 1"
        others = self.values if current is None else (current,)
        words = " ".join(self.named.get(other, self.values[other]) for other in others).split()
        named = dict.fromkeys(word for word in words if word.startswith("--"))
        return flags or f"no {' or '.join(named)}"


@dataclass(frozen=True)
class Rule:
    """A combination of values that does not work.

    Attributes:
        values: Values of the combination that does not work, by axis.
        alternative: Values of the closest layout that works, by axis.
        code: Problem of messages.toml; its text has the reason. "" in `WITHOUT_EFFECT`.
        upstream: Where the cause is reported: `DeepSpeed#7833`.
    """

    values: Values
    alternative: Layout
    code: str = ""
    upstream: str = ""

    def forbids(self, layout: Layout) -> bool:
        return all(layout[axis] in values for axis, values in self.values.items())


MANY = "> 1"


def _offload(config: Config) -> str:
    offload = config.deepspeed
    if offload.param_offload == "nvme":
        return "nvme"
    if offload.optimizer_offload == "nvme":
        return "nvme optimizer"
    optimizer = offload.optimizer_offload != "none"
    parameters = offload.param_offload != "none"
    names = {(True, False): "optimizer", (False, True): "parameters", (True, True): "both"}
    return names.get((optimizer, parameters), "none")


def _experts(config: Config) -> str:
    if config.expert_parallel_size > 1:
        return "distributed"
    return "replicated" if config.moe.is_used else "none"


def _recompute(config: Config) -> str:
    if config.recompute.is_by_deepspeed:
        return "partitioned" if config.recompute.partition_activations else "deepspeed"
    return config.recompute.recompute_granularity or "none"


def _zero_stage(config: Config) -> str:
    return str(config.zero_stage)


def _master_weights(config: Config) -> str:
    return "bf16" if config.in_effect("bf16_master_weights") else "fp32"


def _pipeline_schedule(config: Config) -> str:
    return str(config.in_effect("pipeline_schedule"))


def _precision(config: Config) -> str:
    return config.precision.name


def _fp8(config: Config) -> str:
    return str(config.in_effect("fp8_recipe") or "off")


def _curriculum(config: Config) -> str:
    return "off" if config.schedule.curriculum_seqlen is None else "on"


READERS: Mapping[str, Callable[[Config], str]] = {
    "zero": _zero_stage,
    "offload": _offload,
    "masters": _master_weights,
    "schedule": _pipeline_schedule,
    "experts": _experts,
    "precision": _precision,
    "recompute": _recompute,
    "curriculum": _curriculum,
    "fp8": _fp8,
}
"""Read the axes of several values; see `Axis.read`."""


def _axis(
    name: str, title: str, size: str = "", switch: str = "", choice: str = "", **entry: Any
) -> Axis:
    """An axis of layout_axes.toml, which explains the arguments."""
    field = size or switch or choice
    if size:  # the value 1 is the default
        values = {"1": f"{flag_of(field)} 1", MANY: f"{flag_of(field)} 2"}
        return Axis(title, values, lambda config: MANY if config.in_effect(field) > 1 else "1", "1")
    if switch:  # off is the default
        values = {"off": "", "on": flag_of(field)}
        return Axis(title, values, lambda config: "on" if config.in_effect(field) else "off", "off")
    if choice:
        values = {value: f"{flag_of(field)} {value}" for value in _choices(field)}
        return Axis(title, values, lambda config: str(config.in_effect(field)), next(iter(values)))
    return Axis(title, read=READERS[name], **entry)


def _choices(field: str) -> tuple[str, ...]:
    options = (option for group in GROUPS.values() for option in option_fields(group))
    return next(spec.choices for item, spec in options if item.name == field)


def _rule(values: Mapping[str, Sequence[str] | str], code: str = "", **entry: Any) -> Rule:
    """A rule of layout_rules.toml, which explains the arguments."""
    named = {
        axis: excluded_by(code) if names == "excluded" else tuple(names)
        for axis, names in values.items()
    }
    return Rule(named, code=code, **entry)


AXES: Mapping[str, Axis] = {
    name: _axis(name, **entry) for name, entry in read_table(__file__, "layout_axes.toml").items()
}
_TABLES = read_table(__file__, "layout_rules.toml")
RULES = tuple(_rule(**entry) for entry in _TABLES["rule"])
WITHOUT_EFFECT = tuple(_rule(**entry) for entry in _TABLES["without_effect"])
"""Combinations in which a flag has no effect, with a warning: no configuration reads as them."""


def layout_of(config: Config) -> Layout:
    """The layout of a complete configuration."""
    return {name: axis.read(config) for name, axis in AXES.items()}


def broken_rules(layout: Layout) -> list[Rule]:
    """The rules that forbid a layout."""
    return [rule for rule in RULES if rule.forbids(layout)]


def closest(layout: Layout, kept: Collection[str] = ()) -> Layout:
    """The closest layout that works, by the rules' `alternative` where they suffice.

    One without experts is another model: it is taken only if no other is left.

    Args:
        kept: Axes whose values stay; if no layout works with them, the result is `layout` itself.
    """
    queue = [dict(layout)]
    seen = []
    dense: list[dict[str, str]] = []
    while queue or dense:
        current = (queue or dense).pop(0)
        broken = [rule for rule in (*RULES, *WITHOUT_EFFECT) if rule.forbids(current)]
        if not broken:
            return current
        seen.append(current)
        rule = broken[0]
        others = [{axis: value} for axis in rule.values for value in AXES[axis].values]
        changes = [
            change for change in (rule.alternative, *others) if not change.keys() & set(kept)
        ]
        candidates = [{**current, **change} for change in changes]
        for candidate in candidates:
            later = dense if candidate["experts"] == "none" != layout["experts"] else queue
            if candidate not in seen and candidate not in later:
                later.append(candidate)
    return layout


def problems(config: Config) -> Iterator[Problem]:
    """Every rule that a complete configuration breaks, with the closest layout that works."""
    layout = layout_of(config)
    broken = broken_rules(layout)
    if not broken:
        return
    nearest = closest(layout)
    changed = listed(
        AXES[axis].flags_text(nearest[axis], layout[axis])
        for axis in AXES
        if nearest[axis] != layout[axis]
    )
    for rule in broken:
        combination = listed(AXES[axis].flags_text(layout[axis]) for axis in rule.values)
        problem = Problem(rule.code, combination=combination, closest=changed)
        yield problem.extended(f" ({rule.upstream})") if rule.upstream else problem
