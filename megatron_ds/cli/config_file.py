"""Reads the files of --config: YAML whose keys are flags without dashes.

Values are read in the same way as flags, so that both have the same errors; here with file and
line. Later files override earlier ones. How a file is written is in `config.yaml_file`. Knows no
torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from megatron_ds.cli.flags import Flag, FlagTable, dashed
from megatron_ds.cli.scan import ParsedLine, Scanner
from megatron_ds.cli.yaml_size import check_nodes
from megatron_ds.config import fields_in_phase
from megatron_ds.config.fields import InPhase
from megatron_ds.config.phases import NAME, to_entry
from megatron_ds.config.problems import Problem
from megatron_ds.config.yaml_file import DEFAULTS, NOT_WRITTEN

if TYPE_CHECKING:
    from yaml.nodes import Node

STAGES = "stages"
"""The field whose values have keys of their own."""
SWITCHES = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
NULL = ("", "~", "null")
NUMBERS = {".inf": "inf", "-.inf": "-inf", ".nan": "nan"}
"""YAML's spellings of floating-point values."""
UNREADABLE = (
    "config-file-unreadable",
    "config-file-empty",
    "config-file-no-mapping",
    "config-file-of-deepspeed",
    "config-file-of-other-syntax",
)
"""Codes of problems after which a file has set nothing."""
MAX_CHARACTERS = 1 << 16
"""Characters that decide in which syntax a file is."""
DEEPSPEED_KEY = "zero_optimization"
"""A key of DeepSpeed's files, whose value is an object."""


@dataclass
class ConfigFiles:
    """The merged values of the files of a command line.

    Attributes:
        values: Values by option field.
        given: The fields that are set as by flags; other `values` are defaults.
        origins: File and line of each given value, by field.
    """

    values: dict[str, Any] = field(default_factory=dict)
    given: set[str] = field(default_factory=set)
    origins: dict[str, str] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    warnings: list[Problem] = field(default_factory=list)
    unreadable: set[str] = field(default_factory=set)


def read(paths: Sequence[str], table: FlagTable) -> ConfigFiles:
    """Reads files in order."""
    files = ConfigFiles()
    for path in paths:
        reader = _Reader(path, table, files)
        reader.read()
        for name in reader.removed:
            files.values.pop(name, None)
            files.origins.pop(name, None)
            files.given.discard(name)
        # A default does not override what an earlier file sets.
        defaults = {k: v for k, v in reader.defaults.items() if k not in files.given}
        files.values |= defaults | reader.values
        files.given |= reader.values.keys()
        files.origins |= {name: reader.origin(name) for name in reader.values}
    return files


def read_stages(entries: Sequence[str], table: FlagTable, files: ConfigFiles) -> tuple[str, ...]:
    """Reads --stages of a command line, in YAML as in a file, into its value."""
    import yaml

    reader = _Reader(table.by_field[STAGES].label, table, files)
    try:
        nodes = [yaml.compose(entry, Loader=yaml.BaseLoader) for entry in entries]
        for node in nodes:
            if node is not None:
                check_nodes(node)
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        reason = " ".join(str(error).split())
        files.problems.append(Problem("stages-unreadable", STAGES, reason=reason))
        files.unreadable.add(STAGES)
        return ()
    return tuple(reader.stages(nodes))


class _Reader:
    """State of reading one file. Adds the problems of the file to the problems of all files."""

    def __init__(self, path: str, table: FlagTable, files: ConfigFiles) -> None:
        self._path = path
        self._table = table
        self._files = files
        self._lines: dict[str, int] = {}
        """Line number of each setting, by key and by field."""
        self.values: dict[str, Any] = {}
        self.defaults: dict[str, Any] = {}
        self.removed: set[str] = set()

    def origin(self, name: str) -> str:
        # Some flags also set the field of another one.
        line = f":{self._lines[name]}" if name in self._lines else ""
        return f"set in {self._path}{line}"

    def read(self) -> None:
        import yaml

        try:
            with open(self._path, encoding="utf-8") as file:
                # Plain strings: YAML would make off and no booleans, and 1e-3 a text.
                root = yaml.compose(file, Loader=yaml.BaseLoader)
            if root is not None:
                check_nodes(root)
        except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
            reason = " ".join(str(error).split())
            name, equals, value = self._path.partition("=")
            if isinstance(error, FileNotFoundError) and equals:
                reason += f"; a setting is a flag: --{name} {value}"
            elif r"'\t'" in reason:
                reason += "; indent with spaces instead of tabs"
            if not isinstance(error, OSError) and self._is_of_other_syntax():
                return
            self._files.problems.append(
                Problem("config-file-unreadable", "config", path=self._path, reason=reason)
            )
            return
        if root is None:
            self._files.problems.append(Problem("config-file-empty", "config", path=self._path))
            return
        if not isinstance(root, yaml.MappingNode):
            if self._is_of_other_syntax():
                return
            self._report(root, Problem("config-file-no-mapping", "config"))
            return
        if any(
            key.value == DEEPSPEED_KEY and isinstance(value, yaml.MappingNode)
            for key, value in root.value
        ):
            problem = Problem("config-file-of-deepspeed", "config", path=self._path)
            self._files.problems.append(problem)
            return
        entries = []
        nested = []
        for key, value in root.value:
            if key.value == DEFAULTS and isinstance(value, yaml.MappingNode):
                nested += value.value
            elif key.value != DEFAULTS or value.value not in NULL:
                entries.append((key, value))
        line = self._scan(entries)
        self.values = line.values
        self.defaults = self._scan(nested).values

    def _is_of_other_syntax(self) -> bool:
        """Reports a file in TOML or Python."""
        from megatron_ds.config.file_syntax import other_syntax

        with open(self._path, encoding="utf-8", errors="replace") as file:
            syntax = other_syntax(self._path, file.read(MAX_CHARACTERS))
        if syntax:
            problem = Problem(
                "config-file-of-other-syntax", "config", path=self._path, syntax=syntax
            )
            self._files.problems.append(problem)
        return bool(syntax)

    def _scan(self, entries: Sequence[tuple[Node, Node]]) -> ParsedLine:
        """Reads entries as the flags of one command line."""
        scanner = Scanner(self._table)
        direct = dict[str, Any]()
        line = scanner.line
        for key, value in entries:
            line_number = key.start_mark.line + 1
            name = key.value if isinstance(key.value, str) else "a list"  # which may be endless
            flag = self._table.by_name.get(dashed(name))
            if self._lines.setdefault(name, line_number) != line_number:
                self._report(
                    key, Problem("config-file-repeated-key", key=name, first=self._lines[name])
                )
                continue
            if flag is not None and flag.field in NOT_WRITTEN:
                self._report(key, Problem("config-file-key-refused", key=name))
                continue
            if flag is not None and flag.field:
                self._lines[flag.field] = line_number
            before = len(line.problems)
            if flag is not None and flag.field == STAGES and value.value not in NULL:
                nodes = value.value if isinstance(value.value, list) else [value]
                direct[STAGES] = tuple(self.stages(nodes))
                continue
            words = self._words(flag, key, value)
            if words == [] and flag is not None and flag.nargs == "*":
                direct[flag.field] = ()
            elif isinstance(words, list):
                scanner.read(f"--{name}", words)
            elif flag is not None and flag.field and words is False:
                direct[flag.field] = not flag.const
            elif flag is not None and words is None:
                self.removed.add(flag.field)
            line.problems[before:] = [
                self._located(line_number, problem) for problem in line.problems[before:]
            ]
        count = len(line.problems)
        scanner.finish()
        line.values = direct | line.values
        files = self._files
        prefix = f"{self._path}: "
        files.problems += line.problems[:count]
        files.problems += [problem.with_prefix(prefix) for problem in line.problems[count:]]
        files.warnings += [warning.with_prefix(prefix) for warning in line.warnings]
        files.unreadable |= line.unreadable
        return line

    def stages(self, items: Sequence[Node]) -> Iterator[str]:
        """The entries of --stages, which have the same keys as a file."""
        import yaml

        settable = fields_in_phase(InPhase.REPLACED, InPhase.COUNTED)
        for index, item in enumerate(items, 1):
            if not isinstance(item, yaml.MappingNode):
                self._report(item, Problem("stage-no-mapping", STAGES))
                self._files.unreadable.add(STAGES)
                continue
            reader = _Reader(self._path, self._table, self._files)
            entries = [entry for entry in item.value if entry[0].value != NAME]
            names = [str(node.value) for key, node in item.value if key.value == NAME]
            values = reader._scan(entries).values
            for name in [name for name in values if name not in settable]:
                self._report(item, Problem("stage-setting-fixed", name, STAGES))
                del values[name]
            yield to_entry(names[0] if names else str(index), values)

    def _words(self, flag: Flag | None, key: Node, value: Node) -> list[str] | bool | None:
        """The arguments of a key's flag; False for a switch that is off, None for no value."""
        import yaml

        if isinstance(value, yaml.MappingNode):
            self._report(key, Problem("config-file-nested", key=key.value))
            self._files.unreadable |= {flag.field} if flag else set()
            return None
        if isinstance(value, yaml.SequenceNode):
            return list(_scalars(value))
        text = str(value.value)
        if value.style is None and text in NULL:
            return None
        if flag is not None and flag.nargs == 0:
            if text.lower() not in SWITCHES:
                self._report(
                    key, Problem("config-file-not-a-switch", flag.field, key=key.value, value=text)
                )
                self._files.unreadable.add(flag.field)
                return None
            return [] if SWITCHES[text.lower()] else False
        return [NUMBERS.get(text, text)]

    def _report(self, node: Node, problem: Problem) -> None:
        self._files.problems.append(self._located(node.start_mark.line + 1, problem))

    def _located(self, line_number: int, problem: Problem) -> Problem:
        return problem.with_prefix(f"{self._path}:{line_number}: ")


def _scalars(sequence: Node) -> Iterator[str]:
    """The texts of a list, also of one in it."""
    for node in sequence.value:
        if isinstance(node.value, str):
            yield NUMBERS.get(node.value, node.value)
        else:
            yield from _scalars(node)
