"""Print the completion of programs and flags for a shell: bash, zsh or fish."""

from __future__ import annotations

import importlib
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from megatron_ds.cli.command import program, table_of
from megatron_ds.cli.flags import Flag, FlagTable, training_flags
from megatron_ds.config.fields import option_field
from megatron_ds.programs import CONSOLE, PROGRAMS, summary

BASH = """\
_megatron_ds() {
    local current=${COMP_WORDS[COMP_CWORD]}
    local position=$COMP_CWORD
    local program=${COMP_WORDS[1]}
    local before=${COMP_WORDS[COMP_CWORD - 1]}
    local offered=
CASES
    COMPREPLY=($(compgen -W "$offered" -- "$current"))
}
complete -o default -F _megatron_ds megatron-ds
"""
ZSH = """\
#compdef megatron-ds
_megatron_ds() {
    local current=$words[CURRENT]
    local position=$((CURRENT - 1))
    local program=$words[2]
    local before=$words[CURRENT-1]
    local offered=
CASES
    if [[ -n $offered ]]; then compadd -- ${=offered}; else _files; fi
}
if [[ $funcstack[1] = _megatron_ds ]]; then _megatron_ds; else compdef _megatron_ds megatron-ds; fi
"""
CASES = """\
    if [ "$position" = 1 ]; then
        offered=PROGRAMS
    elif [ "${current#-}" != "$current" ]; then
        case "$program" in
FLAGS
        esac
    else
        case "$program $before" in
VALUES
        esac
    fi"""
"""Sets `offered` to what may stand at the cursor; bash and zsh read it alike."""


@dataclass(frozen=True)
class Options:
    """Prints a script by which a shell completes programs, their flags and the values of flags.

    Needs no other package, and is made from the declared flags: print it again after an update.

        megatron-ds completion bash > ~/.local/share/bash-completion/completions/megatron-ds

        megatron-ds completion zsh > "${fpath[1]}/_megatron_ds"

        megatron-ds completion fish > ~/.config/fish/completions/megatron-ds.fish
    """

    PROGRAM: ClassVar[str] = "completion.py"

    shell: str = option_field(
        "", choices=("bash", "zsh", "fish"), positional=True, required=True, metavar="SHELL"
    )
    """Name of the shell."""


@dataclass(frozen=True)
class Completed:
    """What may follow the name of a program."""

    program: str
    flags: tuple[str, ...]
    values: dict[str, tuple[str, ...]]
    """What may follow a word: a flag, or the program's name."""


def completed() -> Iterator[Completed]:
    """The commands, flags and choices of each program, from the dataclasses of their options."""
    for name, entry in PROGRAMS.items():
        module = vars(importlib.import_module(entry.module))
        commands = {word: options for word, (options, _) in module.get("COMMANDS", {}).items()}
        tables = [
            table_of(options) for options in commands.values() or [module.get("Options")] if options
        ]
        flags = [flag for table in tables or [training_flags()] for flag in _shown(table)]
        values = {
            flag.label: flag.choices for flag in flags if flag.choices and not flag.positional
        }
        first = [flag.choices for flag in flags if flag.choices and flag.positional]
        if commands or first:
            values[name] = tuple(commands) or first[0]
        labels = dict.fromkeys(flag.label for flag in flags if not flag.positional)
        yield Completed(
            name,
            (*labels, "--help", "--num-gpus") if entry.has_ranks else (*labels, "--help"),
            values,
        )


def _shown(table: FlagTable) -> Iterator[Flag]:
    return (flag for flag in table.own if flag.outcome == "set")


def bash_cases(programs: Sequence[Completed]) -> str:
    """The part of the script that bash and zsh have in common."""
    flags = [f"{item.program}) offered={shlex.quote(' '.join(item.flags))} ;;" for item in programs]
    values = [
        f"{shlex.quote(f'{item.program} {word}')}) offered={shlex.quote(' '.join(choices))} ;;"
        for item in programs
        for word, choices in item.values.items()
    ]
    names = shlex.quote(" ".join(item.program for item in programs))
    lines = {"FLAGS": flags, "VALUES": values}
    text = CASES.replace("PROGRAMS", names)
    for word, entries in lines.items():
        text = text.replace(word, "\n".join(f"            {entry}" for entry in entries))
    return text


def fish_lines(programs: Sequence[Completed]) -> Iterator[str]:
    """A `complete` command for each program, flag and list of values."""
    for item in programs:
        described = shlex.quote(summary(item.program))
        first = "test (count (commandline -opc)) -eq 1"
        yield f"complete -c {CONSOLE} -n {shlex.quote(first)} -f -a {item.program} -d {described}"
        chosen = shlex.quote(f"__fish_seen_subcommand_from {item.program}")
        for flag in item.flags:
            values = item.values.get(flag)
            listed = f" -x -a {shlex.quote(' '.join(values))}" if values else ""
            yield f"complete -c {CONSOLE} -n {chosen} -l {flag.removeprefix('--')}{listed}"
        if item.program in item.values:
            words = shlex.quote(" ".join(item.values[item.program]))
            yield f"complete -c {CONSOLE} -n {chosen} -f -a {words}"


def script(shell: str) -> str:
    """The script of a shell."""
    programs = [*completed()]
    if shell == "fish":
        return "\n".join([*fish_lines(programs), ""])
    template = BASH if shell == "bash" else ZSH
    return template.replace("CASES", bash_cases(programs))


def work(options: Options) -> None:
    print(script(options.shell), end="")


main = program(Options, work)
