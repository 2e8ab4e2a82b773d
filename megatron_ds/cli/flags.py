"""Which flags there are: the configuration's fields, their other spellings, and the peers' flags.

Owns the declarations and how --help shows them. How a command line is read stands in
`arguments.py`. Knows no torch.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import platform
import re
import textwrap
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from megatron_ds.cli.megatron_flags import (
    FIXED_VALUES,
    IGNORED,
    NO_OP,
    PREPROCESS_WITHOUT_EFFECT,
    REFUSED,
    ForeignFlag,
    Takes,
)
from megatron_ds.config import GLU_ACTIVATIONS, GROUPS

WIDTH = 80
"""Columns of --help."""
INDENT = 26
"""Column at which the explanations of --help start."""

Outcome = Literal["set", "always", "dropped", "refused"]

USAGE = """\
usage: [LAUNCHER] pretrain_gpt.py FLAGS

Pretrains a GPT with DeepSpeed. Needed are the model's shape (--num-layers,
--hidden-size, --num-attention-heads, --seq-length), --micro-batch-size, --lr,
--train-iters or --train-samples, --data-path and the tokenizer's files; all
else has a default. Dashes and underscores in a flag's name are the same, and
numbers may be written 1_000 or 1e3.

  -h, --help              show this and end
  --version               show the versions of this package, torch and
                          deepspeed, and end
"""
EPILOG = """\
Flags of Megatron-LM and of the Megatron-DeepSpeed forks that are not listed
here have no effect, which a warning says, or are refused with what to use
instead: docs/flags.md lists them all.
"""


@dataclass(frozen=True)
class Flag:
    """One flag: what it takes, and what becomes of it.

    outcome: "set" gives a field its value; "always" asks for what every run does; "dropped" has no
    effect, with a warning; "refused" is an error, except at the values `same`.
    """

    names: tuple[str, ...]
    """The name that is shown, then the aliases; without dashes in front."""
    outcome: Outcome
    takes: Takes
    explanation: str
    """Help, reason, or what to use instead."""
    field: str = ""
    kind: type = str
    const: Any = None
    """What a flag without a value sets."""
    choices: tuple[str, ...] = ()
    synonyms: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Other spellings of a choice."""
    accepted_values: tuple[str, ...] = ()
    metavar: str = ""
    default: Any = None
    required: bool = False
    valid_range: str = ""

    @property
    def usage(self) -> str:
        """The flag and its values: `--lr X`, `--data-path PATH ...`."""
        if self.takes == "*":
            return f"--{self.names[0]} {self.metavar} ..."
        return f"--{self.names[0]}" + f" {self.metavar}" * int(self.takes)


def dashed(name: str) -> str:
    """A flag's name whatever way it was typed: `--num_layers` is `num-layers`."""
    return name.removeprefix("--").replace("_", "-")


def spellings(flag: str) -> list[str]:
    """The usual forms of a flag: as it is, with dashes, with underscores."""
    forms = (flag, flag.replace("_", "-"), flag.replace("-", "_"))
    return [f"--{form}" for form in dict.fromkeys(forms)]


def groups() -> dict[str, list[Flag]]:
    """The flags that set fields, by the title of their group, in the order of --help."""
    found = {}
    for name, group in GROUPS.items():
        hints = typing.get_type_hints(group)
        doc = " ".join((group.__doc__ or "").split())
        found[f"{name}: {doc}"] = [
            _of_field(item, hints[item.name]) for item in dataclasses.fields(group)
        ]
    found["other spellings: Flags that stand for values of the flags above."] = [
        *(
            Flag((name,), "set", 0, words, field=target, const=value)
            for name, (target, value, words) in FIXED_VALUES.items()
        ),
        Flag(
            ("no-position-embedding",),
            "set",
            0,
            "--position-embedding-type none, where no other flag gives the type",
            field="position_embedding_type",
            const="none",
        ),
        Flag(
            ("glu-activation",),
            "set",
            1,
            "--activation X with --ffn-hidden-size 4 x hidden, where that is not given",
            field="activation",
            choices=GLU_ACTIVATIONS,
            metavar=_metavar(str, GLU_ACTIVATIONS),
        ),
    ]
    return found


def foreign_flags() -> list[Flag]:
    """The flags of the peers that set nothing."""
    tables: tuple[tuple[Outcome, dict[str, ForeignFlag]], ...] = (
        ("always", NO_OP),
        ("dropped", IGNORED),
        ("refused", REFUSED),
    )
    return [
        of_peer(name, peer, outcome) for outcome, table in tables for name, peer in table.items()
    ]


def of_peer(name: str, peer: ForeignFlag, outcome: Outcome) -> Flag:
    return Flag((name,), outcome, peer.takes, peer.words, accepted_values=peer.same, metavar="X")


@functools.cache
def all_flags() -> Mapping[str, Flag]:
    """Every flag of pretrain_gpt.py, by each of its names with dashes between the words."""
    flags = [*(flag for group in groups().values() for flag in group), *foreign_flags()]
    return {dashed(name): flag for flag in flags for name in flag.names}


@functools.cache
def preprocess_flags() -> Mapping[str, Flag]:
    """The flags of the peers' preprocess_data.py that tools/preprocess_data.py does not read."""
    return {
        name: of_peer(name, peer, "dropped") for name, peer in PREPROCESS_WITHOUT_EFFECT.items()
    }


def help_text() -> str:
    """The flags that set something, with defaults, for a terminal of 80 columns."""
    parts = [USAGE]
    for title, flags in groups().items():
        entries = "\n".join(_help_entry(flag) for flag in flags)
        parts.append(f"{textwrap.fill(title, WIDTH - 1, break_on_hyphens=False)}\n{entries}\n")
    return "\n".join([*parts, EPILOG])


def version_text() -> str:
    """The versions that decide what a run computes, without importing what they are of."""
    packages = [f"{name} {_version_of(name)}" for name in ("megatron_ds", "torch", "deepspeed")]
    return ", ".join([*packages, f"Python {platform.python_version()}"])


def _version_of(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"


def _help_entry(flag: Flag) -> str:
    left = f"  {flag.usage}"
    if len(left) >= WIDTH:
        spaced = left.replace(",", ", ")
        left = textwrap.fill(spaced, WIDTH - 1, subsequent_indent="      ")
    words = textwrap.wrap(explanation(flag), WIDTH - 1 - INDENT, break_on_hyphens=False)
    if len(left) <= INDENT - 2:
        words[0] = f"{left:<{INDENT}}{words[0]}"
        return f"\n{' ' * INDENT}".join(words)
    return f"\n{' ' * INDENT}".join([left, *words])


def explanation(flag: Flag) -> str:
    """Help, default, valid range and aliases of a flag that sets a field."""
    notes = ["required"] if flag.required else []
    if default_of(flag):
        notes.append(f"default: {default_of(flag)}")
    if flag.valid_range:
        notes.append(flag.valid_range)
    if other_names(flag):
        notes.append("also " + ", ".join(f"--{name}" for name in other_names(flag)))
    if not notes:
        return flag.explanation
    if re.search(r" \(default[^()]*\)$", flag.explanation):
        return f"{flag.explanation[:-1]}; {'; '.join(notes)})"
    return f"{flag.explanation} ({'; '.join(notes)})"


def default_of(flag: Flag) -> str:
    """The default as users write it, 1e-8 or 65536; "" if there is none or the help names it."""
    if flag.default is None or "(default" in flag.explanation:
        return ""
    if isinstance(flag.default, float):
        return f"{flag.default:.15g}".replace("e-0", "e-").replace("e+0", "e")
    return str(flag.default)


def other_names(flag: Flag) -> list[str]:
    """The aliases that are more than another way to write the dashes."""
    return [name for name in flag.names[1:] if dashed(name) != dashed(flag.names[0])]


def _of_field(item: dataclasses.Field[Any], hint: Any) -> Flag:
    meta = item.metadata
    kind = _value_type(hint)
    name = item.name.replace("_", "-")
    main = meta["flag"] or (f"no-{name}" if item.default is True else name)
    names = (main, *meta["aliases"])
    if kind is bool:
        return Flag(names, "set", 0, meta["help"], item.name, bool, const=item.default is not True)
    choices = tuple(meta["choices"] or ())
    return Flag(
        names,
        "set",
        meta["nargs"] or 1,
        meta["help"],
        item.name,
        kind,
        choices=choices,
        synonyms=meta["values"],
        metavar=meta["metavar"] or _metavar(kind, choices),
        default=None if meta["required"] else item.default,
        required=meta["required"],
        valid_range=meta["range"],
    )


def _metavar(kind: Any, choices: tuple[str, ...]) -> str:
    if choices:
        return "{" + ",".join(choices) + "}"
    return {int: "N", float: "X"}.get(kind, "TEXT")


def _value_type(hint: Any) -> Any:
    """int, float, str or bool, out of `int | None` and `tuple[int, ...]`."""
    if isinstance(hint, types.UnionType):
        hint = next(arm for arm in typing.get_args(hint) if arm is not type(None))
    if typing.get_origin(hint) is tuple:
        hint = typing.get_args(hint)[0]
    return hint
