"""Tools: options from nested dataclasses, reports with the tool's flags, exit statuses."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import pytest

from megatron_ds import cli
from megatron_ds.cli.flags import dashed
from megatron_ds.config.fields import option_field, option_group, when
from megatron_ds.config.problems import Problem, UserError, option
from tests.pages.flags import tool_tables
from tests.problems import printed_codes


@dataclass(frozen=True)
class Files:
    """Files to read."""

    paths: tuple[str, ...] = option_field((), nargs="*", flag="input")
    """Files."""
    limit: int = option_field(3, minimum=1)
    """Limit."""
    unused: int = option_field(0)
    """No flag of this tool."""


@dataclass(frozen=True)
class Options:
    """Reads files.

    The files are those of --task-files.
    """

    PROGRAM: ClassVar[str] = "read.py"

    target: str = option_field("", metavar="OUT", positional=True, required=True)
    """Output."""
    keep: bool = option_field(True)
    """`--no-keep`: do not keep files."""
    pages: tuple[range, ...] = option_field((), nargs="*", only_with=when(keep=False))
    """Pages."""
    text: tuple[str, ...] = option_field((), nargs="*", repeatable=True)
    """Texts."""
    files: Files = option_group(
        Files(limit=5), flags={"paths": ("task-files", "tasks"), "unused": None}
    )
    given: frozenset[str] = frozenset()

    def problems(self) -> Iterator[Problem]:
        if not self.files.paths:
            yield Problem.of("test-no-files", f"{option('paths')} missing", "paths")


def status(*line: str, work: object = lambda options: None, **how: int) -> int:
    return cli.run(Options, work, line, **how)


def test_values_reach_nested_groups() -> None:
    line = ["--task_files", "a", "b", "--no-keep", "--pages", "2", "4-6", "out", "--limit", "7"]
    with_positional_first = ["out", *line[:7], *line[8:]]
    options = cli.parse(Options, with_positional_first)
    assert options.target == "out"
    assert options.files == Files(("a", "b"), 7)
    assert options.pages == (range(2, 3), range(4, 7))
    assert options.given == {"target", "paths", "keep", "pages", "limit"}
    assert cli.parse(Options, ["out", "--tasks", "a"]).files == Files(("a",), 5)


def test_a_repeatable_flag_adds_values() -> None:
    line = ["out", "--tasks", "a", "--text", "x", "- y", "--text=z"]
    assert cli.parse(Options, line).text == ("x", "- y", "z")


def test_problems_and_warnings_name_the_flags_of_the_tool(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert status("--limit", "0", "--pages", "1") == 2
    shown = capsys.readouterr().err
    assert printed_codes(shown) == ["no-effect", "required", "out-of-range", "test-no-files"]
    for text in ("WARNING: --pages", "--no-keep", "OUT is required", "--limit 0", "--task-files"):
        assert text in shown
    assert status("out", "--tasks", "a", "--limit", "0") == 2


@pytest.mark.parametrize("word", ["3-x", "-1", "7-3"])
def test_rejects_what_is_not_a_range(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert status("out", "--tasks", "a", "--pages", word) == 2
    assert printed_codes(capsys.readouterr().err) == ["not-a-range"]


def test_an_unreadable_line_exits_with_2_and_names_invalid_values_too(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert status("out", "more", "--limit", "0", "--unused", "3") == 2
    found = {"unexpected-argument", "unknown-flag", "out-of-range", "test-no-files"}
    assert set(printed_codes(capsys.readouterr().err)) == found


def test_unknown_flags_can_be_collected() -> None:
    unknown: list[str] = []
    cli.parse(Options, ["out", "--other=2", "--tasks", "a", "--more", "1", "2"], unknown=unknown)
    assert unknown == ["--other=2", "--more", "1", "2"]


@pytest.mark.parametrize(
    ("error", "code", "shown"),
    [
        (UserError(Problem.of("test-no-files", f"{option('paths')} a")), 1, "--task-files a [test"),
        (OSError(errno.EACCES, "denied", "x"), 1, "denied"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (BrokenPipeError(), 141, ""),
    ],
)
def test_errors_set_the_exit_status(
    error: BaseException,
    code: int,
    shown: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(options: Options) -> None:
        error.add_note("a note")
        raise error

    monkeypatch.setattr("megatron_ds.launch.output.redirect_to_null", lambda _: None)
    assert status("out", "--tasks", "a", work=fail) == code
    printed = capsys.readouterr().err
    assert shown in printed
    assert ("a note" in printed) is bool(shown)


@pytest.mark.parametrize("kind", [TypeError, ValueError, UnicodeError])
def test_a_defect_keeps_its_traceback(kind: type[Exception]) -> None:
    def fail(options: Options) -> None:
        raise kind

    with pytest.raises(kind):
        status("out", "--tasks", "a", work=fail)


def test_the_result_of_the_work_is_the_exit_status() -> None:
    assert status("out", "--tasks", "a") == 0
    assert status("out", "--tasks", "a", work=lambda options: 1) == 1


def test_help_describes_the_tool_and_its_flags(capsys: pytest.CaptureFixture[str]) -> None:
    assert status("--help") == 0
    shown = capsys.readouterr().out
    assert shown.startswith("usage: read.py OUT FLAGS\n\nReads files.\n")
    assert "files: Files to read.\n  --task-files TEXT ..." in shown
    assert "default: 5; at least 1" in shown
    assert "--unused" not in shown
    assert max(map(len, shown.splitlines())) <= 80
    assert status("--help-all") == 0
    assert capsys.readouterr().out == shown


@pytest.mark.parametrize("tool", tool_tables())
def test_the_flags_of_each_tool_are_unique(tool: str) -> None:
    table = tool_tables()[tool]
    shown = [flag for group in table.shown for flag in group.flags]
    names = [dashed(name) for flag in shown for name in flag.names]
    assert len(names) == len(set(names))
    assert len(shown) == len({flag.field for flag in shown})
