"""Problems with codes, and the catalogue of all messages."""

from __future__ import annotations

import ast
import dataclasses
import json
import pickle
import re
import string
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from megatron_ds.config import Config, yaml_file
from megatron_ds.config.problems import Problem, UserError, catalogue, counted, option, raise_if_any
from megatron_ds.config.support_matrix import RULES
from tests.import_graph import PACKAGE, REPOSITORY, nodes
from tests.problems import raises_problem

UNREADABLE = "checkpoint-states-unreadable"
PROBLEM = Problem.of("not-positive", f"{option('seq_length')} 0: must be positive", "seq_length")


CREATORS: dict[str, set[str]] = {
    "Problem": set(),
    "user_error": set(),
    "library_errors": {"why"},
    "_save_error": {"iteration", "folder"},
    "ForeignFormat": {"path", "file"},
}
"""Functions that create a problem, with the values that they add."""
TABLE = "CODES"
"""Name of a dictionary whose values are codes, of problems with the same values."""


@dataclass(frozen=True)
class Use:
    """A call `Problem(code, *fields, **values)` or `user_error(...)` in the source."""

    code: str
    names: frozenset[str]
    """Names of the values."""
    has_fields: bool
    location: str


def uses() -> Iterator[Use]:
    """All problems that the package and the tools create."""
    for folder in ("megatron_ds", "tools"):
        for path in sorted((REPOSITORY / folder).rglob("*.py")):
            source = path.read_text(encoding="utf-8")
            if not any(f"{name}(" in source for name in CREATORS):
                continue
            for node in nodes(path):
                if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == TABLE:
                    assert isinstance(node.value, ast.Dict)
                    location = f"{path.relative_to(REPOSITORY)}:{node.lineno}"
                    for code in node.value.values:
                        yield Use(ast.literal_eval(code), frozenset({"None"}), True, location)
                if not isinstance(node, ast.Call):
                    continue
                function = getattr(node.func, "attr", getattr(node.func, "id", ""))
                if function in CREATORS and isinstance(node.args[0], ast.Constant):
                    keywords = {str(keyword.arg) for keyword in node.keywords}
                    names = frozenset(keywords | CREATORS[function])
                    location = f"{path.relative_to(REPOSITORY)}:{node.lineno}"
                    yield Use(str(node.args[0].value), names, len(node.args) > 1, location)
            if UNREADABLE in source:  # passed to `malformed_values`
                location = str(path.relative_to(REPOSITORY))
                yield Use(UNREADABLE, frozenset({"path", "error"}), False, location)
    for rule in RULES:
        yield Use(rule.code, frozenset({"combination", "closest"}), False, "layout_rules.toml")


def placeholders(text: str) -> frozenset[str]:
    """Names of the values that a message needs."""
    parts = [part for part in string.Formatter().parse(text) if part[1]]
    nested = [placeholders(spec or "") for _, _, spec, _ in parts]
    roots = (re.split(r"[.[]", str(name))[0] for _, name, _, _ in parts)
    return frozenset(root for root in roots if root != "option").union(*nested)


def test_every_problem_has_a_message_and_its_values() -> None:
    used = list(uses())
    for use in used:
        assert use.code in catalogue(), use
        needed = placeholders(catalogue()[use.code]["text"])
        implied = needed & {"flag", "fields"} if use.has_fields else set()
        if "None" in use.names:  # **values
            implied |= needed
        assert use.names - {"None"} | implied == needed, use
    assert {use.code for use in used} == set(catalogue()), "remove messages that are not used"


def test_codes_are_sorted_in_the_folder_that_uses_them() -> None:
    """Those of several folders, and of rules of layouts, are in config/, those of tools in cli/."""
    users: dict[str, set[str]] = {}
    for use in uses():
        folder = re.match(r"megatron_ds/(\w+)/|(tools)/|", use.location)
        assert folder is not None
        users.setdefault(use.code, set()).add(folder[1] or ("cli" if folder[2] else "config"))
    all_codes: list[str] = []
    for path in PACKAGE.glob("*/messages.toml"):
        codes = list(tomllib.loads(path.read_text(encoding="utf-8")))
        all_codes += codes
        assert codes == sorted(codes)
        assert all(re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", code) for code in codes)
        expected = {code for code in codes if len(users[code]) > 1 or "config" in users[code]}
        if path.parent.name != "config":
            expected = {code for code in codes if users[code] == {path.parent.name}}
        assert [code for code in codes if code not in expected] == []
    assert len(all_codes) == len(catalogue())


def test_message_shows_values_and_default_flags() -> None:
    problem = Problem("invalid-split", text="1,x")

    assert str(problem).startswith("--split 1,x: ")
    assert (problem.code, problem.fields) == ("invalid-split", ("split",))


def test_message_is_rendered_with_the_flags_of_a_tool() -> None:
    text = PROBLEM.render({"seq_length": "--length"}.__getitem__)

    assert text == "--length 0: must be positive [not-positive]"


def test_message_counts_in_singular_and_plural() -> None:
    def text(processes: int, devices: int) -> str:
        values = {"processes": processes, "devices": devices}
        return str(Problem("more-processes-than-devices", **values))

    assert text(2, 1).startswith("2 processes on this host, but 1 visible device:")
    assert text(1, 0).startswith("1 process on this host, but 0 visible devices:")
    assert counted(2, "micro-batch") == "2 micro-batches"
    problem = Problem("batch-size-not-reached", tokens=1_000, size=4, start=2_000)
    assert "after 1,000 tokens, before" in str(problem)


def test_prefix_and_extension_keep_code_and_fields() -> None:
    problem = PROBLEM.with_prefix("a: ", "first").extended(" (b)")

    assert problem.render() == "a: --seq-length 0: must be positive (b) [not-positive]"
    assert problem.fields == ("first", "seq_length")


def test_error_passes_a_process_boundary_with_its_problems() -> None:
    error = pickle.loads(pickle.dumps(UserError(PROBLEM)))

    assert error.problems[0].render() == PROBLEM.render()


def test_all_problems_are_raised_at_once() -> None:
    raise_if_any([])
    with pytest.raises(UserError) as raised:
        raise_if_any([PROBLEM, Problem.of("other", "another")])

    assert raised.value.problems == (PROBLEM, Problem.of("other", "another"))
    assert str(raised.value) == f"{PROBLEM}\nanother"


def test_expected_problem_is_compared_by_code_and_fields() -> None:
    with raises_problem("not-positive", "seq_length", contains="0"):
        raise UserError(PROBLEM)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("http://user:secret@host/d", "http://***@host/d"),
        ("at https://secret@host:80/a@b, twice s3://k:secret@b/c", None),
        ("http://user:se@cret@host", "http://***@host"),
        ("s3://bucket/name@v1", "s3://bucket/name@v1"),
        ("user@host", "user@host"),
    ],
)
def test_passwords_in_urls_are_not_shown(text: str, shown: str | None) -> None:
    """Claim (command-line): user information of URLs is neither printed nor saved"""
    config = Config().with_values({"data_path": ("0.5", text), "lr": 1e-3})
    config = dataclasses.replace(config, given=frozenset({"data_path", "lr"}))
    outputs = [
        str(Problem.of("x", f"{text} is missing")),
        Problem.of("x", f"{text} is missing").render(),
        json.dumps(config.to_dict()),
        yaml_file.dump(config),
    ]
    for output in outputs:
        assert "secret" not in output
        assert shown is None or shown in output
