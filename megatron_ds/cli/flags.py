"""Flags of a program: from a dataclass of options, and flags that only other frameworks have.

Owns the flag tables. How --help shows them is in `help.py`, how a command line is read in
`scan.py`. Knows no torch.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

from megatron_ds.config import Config
from megatron_ds.config.data_files import read_table
from megatron_ds.config.fields import OptionSpec, option_fields
from megatron_ds.config.problems import MARKER, default_flag
from megatron_ds.dataclass import dataclass

Outcome = Literal["set", "no_op", "ignored", "refused"]
Effect = Literal["speed", "always", "records", "elsewhere", "differs"]
Names = str | tuple[str, ...] | None

PROGRAM = "pretrain_gpt.py"
FAMILY = "..."
"""End of a name that means all flags that begin with it."""
FOREIGN_OUTCOMES: tuple[Outcome, ...] = ("no_op", "ignored", "refused")


@dataclass(frozen=True, kw_only=True)
class Flag(OptionSpec):
    """One flag: how it is written, its values and its effect.

    Attributes:
        help: Help text, if it is not the docstring of the field; or the reason of `outcome`.
        names: The name that is shown, then the aliases, without leading dashes.
        outcome: "set" gives a field its value; "no_op" requests what every run does; "ignored" has
            no effect, with a warning; "refused" is an error; `accepted_values` need neither.
        field: Name of the option field that is set.
        options: Dataclass of the field, if its docstring is the help text.
        const: Value that a flag without values sets.
        yields_to: Values of the field that take precedence if another flag gives them.
        needs: Name of a field that must be given with the flag.
        family: Task of a refused flag, if it is not the pretraining of GPTs.
        effect: Effect of an ignored flag of training in its own program; see megatron_flags.toml.
    """

    names: tuple[str, ...]
    outcome: Outcome
    field: str = ""
    options: type | None = None
    kind: type = str
    const: Any = None
    default: Any = None
    accepted_values: tuple[str, ...] = ()
    yields_to: tuple[str, ...] = ()
    needs: str = ""
    family: str = ""
    effect: Effect | None = None

    @property
    def help_text(self) -> str:
        """The help text, or the reason of `outcome`."""
        if self.options is None:
            return self.help
        from megatron_ds.config.field_help import option_help

        return option_help(self.options, self.field)

    @property
    def label(self) -> str:
        """Name of the flag in messages: `--lr`."""
        return self.metavar if self.positional else f"--{self.names[0]}"

    @property
    def usage(self) -> str:
        """The flag and its values: `--lr X`, `--data-path PATH ...`."""
        if self.positional:
            return f"{self.metavar} ..." if self.nargs == "*" else self.metavar
        return self.label + (
            f" {self.metavar} ..." if self.nargs == "*" else f" {self.metavar}" * self.count
        )

    @property
    def count(self) -> int:
        """Smallest number of values."""
        return 1 if self.nargs == "*" else int(self.nargs)


@dataclass(frozen=True)
class FlagGroup:
    """Flags with a common title in --help."""

    title: str
    flags: tuple[Flag, ...]
    hidden: bool = False


@dataclass(frozen=True)
class Dialect:
    """Spellings that one framework alone has.

    Attributes:
        owner: The framework.
        flags: Names without leading dashes. With one of them, the framework's defaults apply.
        when: Field with a number above 1.
        defaults: Default values by field.
    """

    owner: str
    flags: frozenset[str]
    when: str
    defaults: Mapping[str, Any]


@dataclass(frozen=True)
class FlagTable:
    """All flags of a program."""

    program: str
    groups: tuple[FlagGroup, ...]
    foreign: tuple[Flag, ...]
    references: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Flags for messages about fields that are not options of the program."""
    same: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Names in other trainers, with the flag of this program."""
    advice: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Names in other trainers of what this program has no flag for, with what to do instead."""
    dialects: tuple[Dialect, ...] = ()

    @property
    def shown(self) -> tuple[FlagGroup, ...]:
        """The groups in --help."""
        return tuple(group for group in self.groups if not group.hidden)

    @functools.cached_property
    def own(self) -> tuple[Flag, ...]:
        """The flags that set a field."""
        return tuple(flag for group in self.groups for flag in group.flags)

    @property
    def positionals(self) -> list[Flag]:
        """Values without a flag, in order."""
        return [flag for flag in self.own if flag.positional]

    @functools.cached_property
    def by_name(self) -> Mapping[str, Flag]:
        """Every flag by each of its names, with dashes; of two with one name the first.

        Of a value without a flag, its aliases.
        """
        named = reversed((*self.own, *self.foreign))
        return {dashed(name): flag for flag in named for name in flag.names[flag.positional :]}

    def find(self, option: str) -> Flag | None:
        """The flag that is written so, also if it is only known by how its name begins."""
        name = dashed(option)
        explained = name in self.same or name in self.advice
        families = (flag for flag in self.foreign if flag.names[0].endswith(FAMILY))
        like = (item for item in families if name.startswith(item.names[0].removesuffix(FAMILY)))
        return self.by_name.get(name) or (None if explained else next(like, None))

    @functools.cached_property
    def by_field(self) -> Mapping[str, Flag]:
        """The first flag of each option field that has one."""
        return {flag.field: flag for flag in reversed(self.own)}

    def flag_of(self, field: str) -> str:
        """The flag of a field in this program; the default flag if the program has none."""
        if field in self.by_field and field not in self.references:
            return self.by_field[field].label
        return self.references.get(field, default_flag(field))

    def resolve(self, text: str) -> str:
        """Replaces references to option fields by the flags of this program."""
        return MARKER.sub(lambda match: self.flag_of(match[1]), text)


def dashed(name: str) -> str:
    """The canonical name of a flag: `--num_layers` is `num-layers`."""
    return name.removeprefix("--").replace("_", "-")


@functools.cache
def flag_table(options: type, program: str, peers: str = "") -> FlagTable:
    """The flags of a program.

    Args:
        options: Dataclass of options, whose fields all have defaults. A field that holds another
            dataclass of options is a group.
        program: Name of the program, such as `clean.py`.
        peers: Section of megatron_flags.toml. Defaults to the program's name.
    """
    section = _peer_flags().get(peers or program.removesuffix(".py"), {})
    groups = tuple(_with_aliases(_groups(options(), "options", {}), section.get("aliases", {})))
    if "sets" in section:
        hidden = any(group.hidden for group in groups)
        groups += (FlagGroup(FIXED_TITLE, tuple(_fixed_values(section["sets"])), hidden),)
    references = getattr(options, "FIELD_FLAGS", {})
    specific = _peer_flags().get(program.removesuffix(".py"), {})
    same = _by_name(section.get("same", {}))
    advice = _by_name(section.get("advice", {})) | _by_name(specific.get("advice", {}))
    dialects = tuple(
        Dialect(entry["owner"], frozenset(entry["flags"].split()), entry["when"], entry["defaults"])
        for entry in section.get("dialect", ())
    )
    return FlagTable(program, groups, tuple(_foreign(section)), references, same, advice, dialects)


def _with_aliases(groups: Iterable[FlagGroup], aliases: Mapping[str, str]) -> Iterator[FlagGroup]:
    """The groups, whose flags also have their names in other trainers."""
    for group in groups:
        flags = (
            dataclasses.replace(flag, names=(*flag.names, *aliases[flag.names[0]].split()))
            if flag.names[0] in aliases
            else flag
            for flag in group.flags
        )
        yield dataclasses.replace(group, flags=tuple(flags))


def _by_name(names: Mapping[str, str]) -> dict[str, str]:
    """The inverse of a table with several names, separated by spaces, in each entry."""
    return {name: key for key, listed in names.items() for name in listed.split()}


def training_flags() -> FlagTable:
    """The flags of pretrain_gpt.py."""
    return flag_table(Config, PROGRAM)


def refused_values() -> Mapping[str, Mapping[str, str]]:
    """Values that a peer accepts and this package does not: by field and value the reason."""
    return typing.cast("Mapping[str, Mapping[str, str]]", _peer_flags()["refused_values"])


def different_defaults() -> list[dict[str, str]]:
    """Flags whose default is not the peers': `flag`, `peers`, `ours` and `note`."""
    return typing.cast("list[dict[str, str]]", _peer_flags()["defaults"])


@functools.cache
def _peer_flags() -> dict[str, Any]:
    return read_table(__file__, "megatron_flags.toml")


def _groups(
    options: Any, title: str, names: Mapping[str, Names], hidden: bool = False
) -> Iterator[FlagGroup]:
    """The flags of a dataclass, then of the groups in it, depth first."""
    hints = typing.get_type_hints(type(options))
    sections: dict[str, list[Flag]] = {}
    for item, spec in option_fields(options):
        if (named := names.get(item.name, "")) is not None:
            default = getattr(options, item.name)
            flag = _of_field(type(options), item.name, spec, hints[item.name], default, named)
            sections.setdefault(_section(type(options), item.name, title), []).append(flag)
    for section, flags in sections.items():
        yield FlagGroup(section, tuple(flags), hidden)
    for item in dataclasses.fields(options):
        group = getattr(options, item.name)
        if "option" not in item.metadata and dataclasses.is_dataclass(group):
            yield from _groups(
                group,
                _title(item.name, type(group)),
                {**item.metadata.get("flags", {}), **names},
                hidden or item.metadata.get("hidden", False),
            )


def _section(options: type, field: str, title: str) -> str:
    """The title of the class that declares a field: of `options`, or of one that it extends."""
    declares = (cls for cls in options.__mro__ if field in vars(cls).get("__annotations__", ()))
    owner = next(declares)
    if owner is options:
        return title
    return _title(re.sub("(?<=[a-z])(?=[A-Z])", "_", owner.__name__.removesuffix("Config")), owner)


def _title(name: str, group: type) -> str:
    """Name and purpose of a group."""
    doc = " ".join((group.__doc__ or "").split("\n\n")[0].split())
    return f"{name.replace('_', ' ').lower()}: {doc}"


def _of_field(
    options: type, name: str, spec: OptionSpec, hint: Any, default: Any, named: Names
) -> Flag:
    value_type = _value_type(hint)
    names = (spec.flag_name(name, default), *spec.aliases)
    if named:
        names = (named,) if isinstance(named, str) else named
    declared = {**vars(spec), "metavar": spec.metavar or _metavar(value_type, spec.choices)}
    if value_type is bool:
        declared |= {"nargs": 0, "const": default is not True}
    elif not spec.required:
        declared["default"] = default
    if not spec.help:
        declared["options"] = options
    return Flag(**declared, names=names, outcome="set", field=name, kind=value_type)


def _metavar(value_type: Any, choices: tuple[str, ...]) -> str:
    if choices:
        return "{" + ",".join(choices) + "}"
    return {int: "N", float: "X", range: "N"}.get(value_type, "TEXT")


def _value_type(hint: Any) -> Any:
    """int, float, str, bool or range, out of `int | None` and `tuple[int, ...]`."""
    if isinstance(hint, types.UnionType):
        hint = next(arm for arm in typing.get_args(hint) if arm is not type(None))
    if typing.get_origin(hint) is tuple:
        hint = typing.get_args(hint)[0]
    return hint


FIXED_TITLE = "other spellings: Flags that stand for values of the flags above."


def _fixed_values(entries: Iterable[Mapping[str, Any]]) -> Iterator[Flag]:
    """Flags that imply values of other flags."""
    for entry in entries:
        choices = tuple(entry.get("choices", ()))
        yield Flag(
            help=entry["help"],
            names=(entry["flag"],),
            outcome="set",
            nargs=0 if "value" in entry else 1,
            field=entry["field"],
            const=entry.get("value"),
            choices=choices,
            synonyms=entry.get("synonyms", {}),
            metavar=_metavar(str, choices),
            yields_to=tuple(entry.get("unless", ())),
        )


def _foreign(section: Mapping[str, Any]) -> Iterator[Flag]:
    """The flags of a program that only other frameworks have; they set nothing."""
    for outcome in FOREIGN_OUTCOMES:
        for entry in section.get(outcome, ()):
            accepted = tuple(entry.get("accepted_values", ()))
            kinds: dict[str, int | str] = {"switches": 0, "valued": 1, "lists": "*"}
            for key, nargs in kinds.items():
                for name in entry.get(key, "").split():
                    yield Flag(
                        help=entry["reason"],
                        names=(name,),
                        outcome=outcome,
                        nargs=nargs,
                        accepted_values=accepted,
                        needs=entry.get("requires", ""),
                        family=entry.get("family", ""),
                        effect=entry.get("effect"),
                        metavar="X",
                    )
