"""The page docs/reference/flags.md, from the declared flags."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import sys
import textwrap
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import ModuleType

from megatron_ds.cli import flags as declared
from megatron_ds.cli.command import table_of
from megatron_ds.cli.flags import Flag, FlagTable, training_flags
from megatron_ds.cli.help import default_of, explanation, other_names
from megatron_ds.programs import PROGRAMS

REPOSITORY = Path(__file__).resolve().parents[2]
OUTPUT = REPOSITORY / "docs" / "reference" / "flags.md"
TODAY = REPOSITORY / "tests" / "golden" / "today_flags.txt"

HEAD = """\
# Flags

For everybody who types a command: every flag of training and of the tools, with its values,
default and meaning.

Written by `python -m tests.pages` from the code; `--help-all` of a program shows its part.

The flags of `pretrain_gpt.py`, group by group; those of Megatron-LM (core 0.8) and of the two
Megatron-DeepSpeed forks, bigscience's and microsoft's, that are not options here: what they request
happens anyway, or they have no effect, or they are refused; then the flags of the tools.

Dashes and underscores in a flag's name are the same. N is an integer, which may be written `1_000`
or `1e3`, X a number. If a flag is repeated, the last one applies, with a warning; two flags that
give one option different values are an error. All problems of a line are reported at once. Keys of
a `--deepspeed_config` file apply where a flag was not given.
"""
NO_OP = """\
## What every run does

These switches are accepted silently, since they request what is done in any case.
"""
IGNORED = """\
## Without effect

These flags are accepted, with a warning that gives the reason. None but the first ones changes what
is learned.
"""
EFFECTS = {
    "differs": "In other programs they change numbers: the reason is what is done here.",
    "always": "What they ask for is always done, or always holds.",
    "speed": "They change kernels, messages, memory and processes, but no result.",
    "records": "They change logs, profiles, evaluations and files of checkpoints.",
    "elsewhere": "They belong to another kind of training, or to flags that are refused.",
}
"""What ignored flags change in their own programs, by `effect`."""
REFUSED = """\
## Refused

These flags would change the run, or request what does not exist. They end the program before it
starts, with the message of the second column.
"""
COUNTS = """\
## Flags of today's trainers

The number of flags by what is done with them, for Megatron-LM's branches main and dev of August
2026, and for what MindSpeed-LLM (`pretrain_gpt.py`) and Primus (keys of its YAML, read by
`tools/doctor.py`) have besides. Other families are subjects that are refused by one rule each:
{families}.
"""
ANSWERS = {
    "set": "sets an option",
    "no_op": "requests what every run does",
    "ignored": "without effect",
    "family": "refused: another family",
    "refused": "refused: what to do instead",
    "": "no flag, a key that `tools/doctor.py` reads",
}
DEFAULT_TABLE = """\
## Defaults that differ

All other flags have the same defaults as in Megatron-LM and its forks.
"""


def tool_tables() -> dict[str, FlagTable]:
    """The flags of all tools that have any, by the path of the tool and its command."""
    tables: dict[str, FlagTable] = {}
    other_names = tomllib.loads((REPOSITORY / "tools" / "other_names.toml").read_text("utf-8"))
    modules = {program.file: program.module for program in PROGRAMS.values()}
    for path in sorted((REPOSITORY / "tools").rglob("*.py")):
        name = path.relative_to(REPOSITORY)
        commands = {}
        if path.name in other_names:
            commands = {"": pkgutil.resolve_name(other_names[path.name])}
        elif not path.is_symlink() and path.stem != "start_tool":  # not another name, and a tool
            where = modules.get(name.as_posix())
            module = vars(load(path) if where is None else importlib.import_module(where))
            commands = {
                f" {word}": options for word, (options, _) in module.get("COMMANDS", {}).items()
            } or {"": module.get("Options")}
        for word, options in commands.items():
            table = None if options is None else table_of(options)
            if table is not None and table.groups and table not in tables.values():
                tables[f"{name.as_posix()}{word}"] = table
    return tables


def load(path: Path) -> ModuleType:
    """The module of a tool. Not by its dotted name: a folder may have the name of a tool."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses look for their module
    spec.loader.exec_module(module)
    return module


def page() -> str:
    """The text of docs/reference/flags.md."""
    training = training_flags()
    parts = [HEAD, *_groups(training, "##")]
    parts += [DEFAULT_TABLE, _defaults()]
    for head, outcome, title in (
        (NO_OP, "no_op", "because"),
        (REFUSED, "refused", "what to do"),
    ):
        parts += [head, _reasons(training, outcome, title)]
        if outcome == "no_op":
            parts += [IGNORED, *_ignored(training)]
    parts += _counts(training)
    parts += ["Refused values of flags that are supported:\n", _values(declared.refused_values())]
    for name, table in tool_tables().items():
        parts += [f"## {name}\n", *_groups(table, "###")]
        if table.foreign and table.shown == table.groups:
            parts += ["Flags of the peers' tool that are not options here:\n"]
            parts += [_reasons(table, "", "no effect, or refused")]
    return "\n".join(parts)


def _groups(table: FlagTable, level: str) -> list[str]:
    parts = []
    for group in table.shown:
        name, _, doc = group.title.partition(": ")
        parts += [f"{level} {name.capitalize()}\n"] if len(table.shown) > 1 else []
        parts += [f"{doc}\n"] if doc else []
        parts += [_settings(group.flags, table)]
    return parts


def _settings(flags: Iterable[Flag], table: FlagTable) -> str:
    rows = []
    for flag in flags:
        names = " ".join(f"`--{name}`" for name in (flag.names[0], *other_names(flag)))
        values = _choices(flag) or flag.usage.partition(" ")[2]
        if flag.positional:
            names = f"`{flag.metavar}`"
            values = ""
        rows.append((names, values, default_of(flag), explanation(flag, table, in_table=True)))
    return markdown_table(("flag", "value", "default", "meaning"), rows)


def _choices(flag: Flag) -> str:
    """The choices of a flag, each with its other spellings."""
    others: dict[str, list[str]] = {choice: [] for choice in flag.choices or ()}
    for other, choice in flag.synonyms.items():
        others[choice].append(other)
    return ", ".join(
        f"{choice} (also {', '.join(names)})" if names else choice
        for choice, names in others.items()
    )


def _defaults() -> str:
    rows = [
        (f"`--{entry['flag']}`", entry["peers"], entry["ours"], entry["note"])
        for entry in declared.different_defaults()
    ]
    return markdown_table(("flag", "peers' default", "default here", "so"), rows)


def _ignored(table: FlagTable) -> Iterator[str]:
    """A table for each effect that ignored flags have elsewhere."""
    for effect, text in EFFECTS.items():
        yield f"{text}\n"
        yield _reasons(table, "ignored", "because", effect)


def _reasons(table: FlagTable, outcome: str, title: str, effect: str | None = None) -> str:
    """A row for each reason, with all flags of an outcome, and of an effect, that share it.

    Args:
        table: The flags.
        outcome: Of the flags; any if "".
        title: Of the column of reasons.
        effect: Of the flags; any if None.
    """
    named: dict[str, list[str]] = {}
    for flag in table.foreign:
        if outcome in ("", flag.outcome) and effect in (None, flag.effect):
            accepted = ", ".join(flag.accepted_values)
            reason = flag.help_text + (f" (accepted: {accepted})" if accepted else "")
            named.setdefault(reason, []).append(f"`{flag.usage.removesuffix(' ...')}`")
    return markdown_table(
        ("flags", title), [(" ".join(flags), why) for why, flags in named.items()]
    )


def flags_of_today() -> dict[str, list[str]]:
    """The names of tests/golden/today_flags.txt by what has them."""
    blocks = (block.partition("\n") for block in TODAY.read_text("utf-8").split("\n\n"))
    return {owner: names.split() for owner, _, names in blocks}


def answer_of(name: str) -> str:
    """The key of `ANSWERS` of a flag of training."""
    flag = training_flags().find(name)
    return "" if flag is None else "family" if flag.family else flag.outcome


def _counts(table: FlagTable) -> list[str]:
    blocks = flags_of_today()
    both = blocks.pop("main+dev")
    columns = {f"Megatron-LM {name}": both + blocks.pop(name) for name in ("main", "dev")} | blocks
    counts = [Counter(map(answer_of, names)) for names in columns.values()]
    rows = [(text, *(str(count[answer]) for count in counts)) for answer, text in ANSWERS.items()]
    rows.append(("all", *(str(count.total()) for count in counts)))
    families = dict.fromkeys(flag.family for flag in table.foreign if flag.family)
    head = COUNTS.format(families=textwrap.fill(", ".join(families), 98))
    return [head, markdown_table(("answer", *columns), rows)]


def _values(values: Mapping[str, Mapping[str, str]]) -> str:
    rows: dict[tuple[str, str], list[str]] = {}
    for field, refused in values.items():
        for value, words in refused.items():
            rows.setdefault((f"`--{field.replace('_', '-')}`", words), []).append(value)
    return markdown_table(
        ("flag", "values", "why, and what to do"),
        [(flag, ", ".join(each), words) for (flag, words), each in rows.items()],
    )


def markdown_table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """A table in Markdown."""
    lines = [" | ".join(line) for line in (head, tuple("---" for _ in head), *rows)]
    return "".join(f"| {line} |\n".replace("*", "\\*").replace("<", "\\<") for line in lines)
