"""Runs a tool: reads its command line into its options, reports errors, sets the exit status.

Owns what all tools have in common around their work. The flags come from the tool's dataclass of
options; pretrain_gpt.py, which needs more, is in `arguments.py`. Knows no torch.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import io
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from megatron_ds.cli.flags import FlagTable, flag_table
from megatron_ds.cli.scan import scan
from megatron_ds.config.fields import field_problems, ineffective, option_fields
from megatron_ds.config.problems import Problem, UserError, counted
from megatron_ds.launch import output
from megatron_ds.launch.exit_codes import ExitCode, SettingsRejected
from megatron_ds.launch.process import program_start
from megatron_ds.programs import shown_name

HELP_ALL = "--help-all"
HELP = ("--help", "-h", HELP_ALL)

T = TypeVar("T")
"""A dataclass of a tool's options, all with defaults; its docstring describes the tool.

`PROGRAM` may name the tool, if it is not the file that defines the options, `OTHER_NAMES` links to
it, `PEERS` the program whose flags in other frameworks are accepted, if it is another one, and
`FIELD_FLAGS` the flags for messages about fields that are not options of the tool.

A field `given: frozenset[str]` of it, or of a group, receives the names of the fields that were
set, and a field `arguments: tuple[str, ...]` the arguments. A method `problems()` yields what the
ranges of the fields do not cover, a method `warnings()` what `only_with` does not cover.
"""


def table_of(options: type) -> FlagTable:
    """The flags of a tool."""
    return flag_table(options, program_name(options), getattr(options, "PEERS", ""))


def program_name(options: type) -> str:
    """The name of a tool in its messages: its own, or the one of its link that was started."""
    started = Path(sys.argv[0]).name
    if started in getattr(options, "OTHER_NAMES", ()):
        return started
    return getattr(options, "PROGRAM", "") or Path(inspect.getfile(options)).name


def parse(
    options: type[T],
    argv: Sequence[str],
    *,
    rank: int = 0,
    unknown: list[str] | None = None,
    raises: bool = False,
) -> T:
    """Read the options of a tool.

    Args:
        options: Dataclass of the options.
        argv: The arguments without the program's name.
        rank: Only rank 0 prints.
        unknown: Receives the arguments of unknown flags, which are an error otherwise.
        raises: Raise the problems instead of printing them.

    Raises:
        SettingsRejected: If there are problems, and `raises`.
        SystemExit: After --help, with status 0, and after all problems are printed, with status 2.
    """
    table = table_of(options)
    if any(word in HELP for word in argv):
        if rank == 0:
            from megatron_ds.cli.help import tool_help

            print(tool_help(table, options))
        raise SystemExit(0)
    line = scan(argv, table, keep_unknown=unknown is not None)
    result: T = build(options(), line.values, argv)
    values = _each(result, field_problems, line.values, table)
    related = result.problems() if hasattr(result, "problems") else ()
    # Consequences of a value that could not be read are unknown: reporting them would mislead.
    invalid = [item for item in (*values, *related) if line.unreadable.isdisjoint(item.mentioned)]
    problems = list(dict.fromkeys([*line.problems, *invalid]))
    if rank == 0:
        warnings = result.warnings() if hasattr(result, "warnings") and not problems else ()
        for warning in (*line.warnings, *_each(result, ineffective, line.values, table), *warnings):
            print_warning(warning, table)
    if problems:
        if raises:
            texts = [render(problem, table) for problem in problems]
            raise SettingsRejected(listing(problems, table), texts)
        fail(problems, table, rank=rank)
    if unknown is not None:
        unknown += line.unknown
    return result


def run(
    options: type[T],
    work: Callable[[T], int | None],
    argv: Sequence[str],
    unknown: list[str] | None = None,
) -> int:
    """Run a tool and return its exit status.

    Args:
        options: Dataclass of the options.
        work: The tool. Its result is the exit status; None is 0. Users' errors are `UserError` and
            OSError; their notes are printed, too, and so are a KeyboardInterrupt's.
        argv: The arguments without the program's name.
        unknown: Receives the arguments of unknown flags, which are an error otherwise.
    """
    program_start.finish()
    table = table_of(options)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # the name of a file may not be text
    with output.plain_warnings(lambda text: render(text, table)):
        try:
            result = work(parse(options, argv, unknown=unknown)) or 0
            sys.stdout.flush()
        except SystemExit as end:
            return int(end.code or 0)
        except BrokenPipeError:  # the reader of the output has exited, as `head` does
            output.redirect_to_null(sys.stdout)
            return 128 + signal.SIGPIPE
        except (UserError, OSError) as error:
            problems = error.problems if isinstance(error, UserError) else (str(error),)
            shown = [
                f"{shown_name(table.program)}: error:",
                *(render(problem, table) for problem in problems),
            ]
            print(*shown, *getattr(error, "__notes__", ()), sep="\n", file=sys.stderr)
            return ExitCode.ERROR
        except KeyboardInterrupt as error:
            print("interrupted", *getattr(error, "__notes__", ()), sep="; ", file=sys.stderr)
            return ExitCode.INTERRUPTED
    return result


def program(options: type[T], work: Callable[[T], int | None]) -> Callable[[Sequence[str]], int]:
    """The main function of a tool; see `run`."""
    return functools.partial(run, options, work)


def fail(problems: Sequence[Problem], table: FlagTable, *, rank: int = 0) -> NoReturn:
    """Print the problems of a command line on rank 0 and exit."""
    if rank == 0:
        print(
            f"{shown_name(table.program)}: {listing(problems, table)}", file=sys.stderr, flush=True
        )
    raise SystemExit(int(ExitCode.BAD_SETTINGS))


def listing(problems: Sequence[Problem], table: FlagTable) -> str:
    """The problems of a command line, one a line."""
    count = counted(len(problems), "problem")
    lines = "\n".join(f"  - {render(problem, table)}" for problem in problems)
    return f"{count} with the settings (--help lists the flags):\n{lines}"


def render(problem: Problem | str, table: FlagTable) -> str:
    """A message with the flags of a program and, if it has one, its code."""
    return problem.render(table.flag_of) if isinstance(problem, Problem) else problem


def print_warning(warning: Problem, table: FlagTable) -> None:
    print(f"WARNING: {render(warning, table)}", file=sys.stderr, flush=True)


def build(options: Any, values: Mapping[str, Any], argv: Sequence[str] = ()) -> Any:
    """Options with new values.

    Args:
        options: An instance of a dataclass of options.
        values: Values by field, including the fields of nested groups.
        argv: The arguments that set them.
    """
    changes: dict[str, Any] = {
        item.name: values[item.name] for item, _ in option_fields(options) if item.name in values
    }
    for item in dataclasses.fields(options):
        value = getattr(options, item.name)
        if item.name == "given":
            changes["given"] = frozenset(values)
        elif item.name == "arguments":
            changes["arguments"] = tuple(argv)
        elif item.name not in changes and dataclasses.is_dataclass(value):
            changes[item.name] = build(value, values, argv)
    return dataclasses.replace(options, **changes)


def _each(
    options: Any,
    check: Callable[[Any, Mapping[str, Any]], Iterable[Problem]],
    values: Mapping[str, Any],
    table: FlagTable,
) -> Iterator[Problem]:
    """The problems of fields with flags, of a dataclass of options and of its groups."""
    for problem in check(options, values):
        if not table.by_field.keys().isdisjoint(problem.fields):
            yield problem
    for item in dataclasses.fields(options):
        value = getattr(options, item.name)
        if dataclasses.is_dataclass(value) and not item.metadata.get("hidden"):
            yield from _each(value, check, values, table)
