"""Write docs/flags.md: every flag of pretrain_gpt.py, and what becomes of those of the peers."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping
from pathlib import Path

from megatron_ds.cli.flags import (
    Flag,
    default_of,
    foreign_flags,
    groups,
    other_names,
    preprocess_flags,
)
from megatron_ds.cli.megatron_flags import DEFAULTS, REFUSED_VALUES

OUTPUT = Path(__file__).resolve().parents[1] / "docs" / "flags.md"

HEAD = """\
# Flags

Written by `python tools/make_docs.py` from the code; `pretrain_gpt.py --help` shows the first part.

The flags of `pretrain_gpt.py`, group by group; then those of Megatron-LM (core 0.8) and of the two
Megatron-DeepSpeed forks, bigscience's and microsoft's, that are no settings here: what they ask for
happens anyway, or they have no effect, or they are refused.

Dashes and underscores in a flag's name are the same. N is a whole number, which may be written
`1_000` or `1e3`, X a number. A flag that is given twice counts the last time, with a warning; two
flags that give one setting different values are an error. All errors of a line are named at once.
Keys of a `--deepspeed_config` file fill in where a flag was not given.
"""
ALWAYS = """\
## What every run does

These switches are accepted without a word, since they ask for what is done in any case.
"""
WITHOUT_EFFECT = """\
## Without effect

These flags are accepted, with a warning that gives the reason. None of them changes what is
learned.
"""
REFUSED = """\
## Refused

These flags would change the run, or promise what is not there. They end the program before it
starts, with the words of the second column.
"""
DEFAULT_TABLE = """\
## Defaults that differ

All other flags that the peers have, too, have their defaults.
"""
PREPROCESSING = """\
## tools/preprocess_data.py

`--help` lists its flags. Of those of the peers' tool that it does not read:
"""


def page() -> str:
    """The text of docs/flags.md."""
    by_outcome = {
        outcome: [flag for flag in foreign_flags() if flag.outcome == outcome]
        for outcome in ("always", "dropped", "refused")
    }
    parts = [HEAD]
    for title, flags in groups().items():
        name, _, words = title.partition(": ")
        parts += [f"## {name.capitalize()}\n\n{words}\n", _settings(flags)]
    parts += [DEFAULT_TABLE, _defaults()]
    parts += [ALWAYS, _by_words(by_outcome["always"], "because")]
    parts += [WITHOUT_EFFECT, _by_words(by_outcome["dropped"], "because")]
    parts += [REFUSED, _by_words(by_outcome["refused"], "what to do")]
    parts += ["Values that are refused, of flags that are not:\n", _values(REFUSED_VALUES)]
    parts += [PREPROCESSING, _by_words(preprocess_flags().values(), "no effect, or refused")]
    return "\n".join(parts)


def _settings(flags: Iterable[Flag]) -> str:
    rows = []
    for flag in flags:
        names = " ".join(f"`--{name}`" for name in (flag.names[0], *other_names(flag)))
        values = flag.usage.partition(" ")[2]
        if flag.choices:
            values = ", ".join(flag.choices)
        rows.append((names, values, default_of(flag), flag.explanation))
    return _table(("flag", "value", "default", "meaning"), rows)


def _defaults() -> str:
    rows = [(f"`--{name}`", *columns) for name, columns in DEFAULTS.items()]
    return _table(("flag", "peers' default", "default here", "so"), rows)


def _by_words(flags: Iterable[Flag], title: str) -> str:
    """A row for each reason, with all flags that share it."""
    named: dict[str, list[str]] = {}
    for flag in flags:
        words = flag.explanation + (
            f" (accepted: {', '.join(flag.accepted_values)})" if flag.accepted_values else ""
        )
        named.setdefault(words, []).append(f"`{flag.usage.removesuffix(' ...')}`")
    return _table(("flags", title), [(" ".join(flags), words) for words, flags in named.items()])


def _values(values: Mapping[str, Mapping[str, str]]) -> str:
    rows: dict[tuple[str, str], list[str]] = {}
    for field, refused in values.items():
        for value, words in refused.items():
            rows.setdefault((f"`--{field.replace('_', '-')}`", words), []).append(value)
    return _table(
        ("flag", "values", "why, and what to do"),
        [(flag, ", ".join(each), words) for (flag, words), each in rows.items()],
    )


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [" | ".join(line) for line in (head, tuple("---" for _ in head), *rows)]
    return "".join(f"| {line} |\n".replace("*", "\\*").replace("<", "\\<") for line in lines)


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    OUTPUT.write_text(page(), encoding="utf-8")
    print(f"wrote {OUTPUT}")


if __name__ == "__main__":
    main()
