"""Translation of another program's training command: our command, and the differences.

The differences are the warnings and problems of the command line, and the tables of defaults.
Knows no torch.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_ds.cli.arguments import Complete, build_config
from megatron_ds.cli.command import render
from megatron_ds.cli.doctor.commands import shown
from megatron_ds.cli.doctor.counterparts import with_counterparts
from megatron_ds.cli.doctor.frameworks import TrainingCommand, tables
from megatron_ds.cli.doctor.shell.marks import NAME, unmarked
from megatron_ds.cli.doctor.transfer import with_transfer
from megatron_ds.cli.flags import dashed, different_defaults, training_flags
from megatron_ds.cli.scan import scan
from megatron_ds.config import GROUPS, Config, flag_of, yaml_file
from megatron_ds.config.problems import Problem
from megatron_ds.programs import training_words

MISSING_FILES = frozenset(("file-not-found", "not-a-file", "path-not-a-regular-file"))
"""Problems that do not concern a command's meaning."""
TITLES = ("not read", "differences in meaning", "without a counterpart, and what to do")
WIDTH = 96
PER_MACHINE = 8


@dataclass(frozen=True)
class Diagnosis:
    """A training command and what it means here.

    Attributes:
        command: The command.
        config: Its settings here.
        checked: The same, with the DeepSpeed file where it can be read.
        world_size: Number of processes.
        unread: Parts of the command that were not read.
        differences: Settings with another meaning here, or without one.
        lacking: Settings without a counterpart, with advice.
    """

    command: TrainingCommand
    config: Config
    checked: Config
    world_size: int
    unread: list[str]
    differences: list[str]
    lacking: list[str]

    def report(self) -> str:
        """The three lists."""
        parts = [f"{self.command.place}: {self.world_size} processes"]
        if self.command.source:
            parts.append(f"names and defaults: {self.command.source}")
        lists = (self.unread, self.differences, self.lacking)
        for title, entries in zip(TITLES, lists, strict=True):
            listed = "".join(f"\n  - {entry}" for entry in dict.fromkeys(entries))
            parts.append(f"{title}:{listed or ' none'}")
        return "\n".join(parts) + "\n"

    def command_text(self) -> str:
        """Our command, after what writes its DeepSpeed file."""
        nodes = -(-self.world_size // PER_MACHINE)
        default = f"torchrun --nnodes {nodes} --nproc_per_node {self.world_size // nodes}".split()
        lines = [" ".join(map(shown, training_words(self.command.launcher or default)))]
        for item in flags_of(self.config):
            text = " ".join(map(shown, joined([item])))
            if len(lines) == 1 or len(lines[-1]) + len(text) > WIDTH:
                lines.append(f"    {text}")
            else:
                lines[-1] += f" {text}"
        path = self.config.deepspeed.deepspeed_config or ""
        content = self.command.reading.files.get(path)
        file = "" if content is None else f"cat > {shown(path)} <<'EOT'\n{content.rstrip()}\nEOT\n"
        return file + " \\\n".join(lines) + "\n"


def diagnose(command: TrainingCommand, complete: Complete, folder: Path) -> Diagnosis:
    """Compare a command with what it means here.

    Args:
        command: The command.
        complete: Fills in the settings of the DeepSpeed file.
        folder: Where a DeepSpeed file that the script writes is put.
    """
    warnings: list[Problem] = []
    command = with_transfer(replace(command, flags=with_counterparts(command.flags)))
    config, _ = build_config(command.flags, world_size=1, warn=lambda _: None)
    smallest = math.prod(max(1, size) for size in config.axis_sizes.values())
    world_size = command.world_size or smallest
    path = config.deepspeed.deepspeed_config
    flags, missing = (command.flags, []) if path is None else _with_file(command, path, folder)
    config, problems = build_config(
        flags, world_size=world_size, warn=warnings.append, complete=complete
    )
    table = training_flags()
    # Our spelling of the flags does not imply them.
    implied = scan(flags, table).implied
    config = replace(config, given=config.given | implied.keys())
    config, unclipped = _as_without_keys(config)
    name = path and unmarked(path)

    def text(problem: Problem) -> str:
        rendered = unmarked(render(problem, table))
        return rendered.replace(str(folder / "ds_config.json"), name) if name else rendered

    used = {name for word in command.flags for name in NAME.findall(unmarked(word))}
    unread = command.reading.unread + [
        f"{location}: ${variable} is not set; {_setter(variable)}"
        for variable, location in command.reading.unset.items()
        if variable in used and not variable.startswith("SLURM_")
    ]
    unread += [f"{command.place}: {', '.join(command.unread)}"] * bool(command.unread)
    differences = [*map(text, warnings), *unclipped]
    if command.world_size is None:
        differences.append(f"the number of processes is left open: {smallest} here; --world-size N")
    differences += command.differences
    if not command.source:
        differences += _defaults(config, command)
    lacking = [*map(unmarked, command.lacking), *missing]
    lacking += [text(item) for item in problems if getattr(item, "code", "") not in MISSING_FILES]
    written = config if path is None else config.with_values({"deepspeed_config": path})
    return Diagnosis(command, written, config, world_size, unread, differences, lacking)


def _setter(variable: str) -> str:
    """What sets a variable of a script, or one of its arguments."""
    if variable.isdecimal():
        return "arguments behind the script's name set it"
    return f"--set {variable}=VALUE sets it"


def flags_of(config: Config) -> Iterator[tuple[str, list[str]]]:
    """The flags that set what a configuration was given, with their values."""
    for group in GROUPS:
        for name, (key, value) in yaml_file.entries(getattr(config, group)):
            if name in config.given and value is not None and value is not False and value != ():
                values = value if isinstance(value, tuple) else () if value is True else (value,)
                yield key, [*map(str, values)]


def joined(flags: Iterable[tuple[str, list[str]]]) -> list[str]:
    """The arguments of a command line."""
    return [word for name, values in flags for word in (f"--{name}", *values)]


def _with_file(command: TrainingCommand, path: str, folder: Path) -> tuple[list[str], list[str]]:
    """The flags with the DeepSpeed file in a folder, and why it was not read."""
    text = command.reading.content(path, command.place.rpartition(":")[0])
    if text is None:
        is_written = path in command.reading.files
        reason = "written by programs (--execute starts them)" if is_written else "not there"
        return command.flags, [f"--deepspeed_config {unmarked(path)}: the file is {reason}"]
    copy = folder / "ds_config.json"
    copy.write_text(text, "utf-8")
    return [flag.replace(path, str(copy)) for flag in command.flags], []


def _as_without_keys(config: Config) -> tuple[Config, list[str]]:
    """The settings that the forks have without some keys of the DeepSpeed file, and why."""
    file = config.deepspeed_file
    reasons = []
    for row in tables()["deepspeed"]:
        if file is not None and file.get(row["without"]) is None:
            changed = config.with_values({row["field"]: row["value"]})
            config = replace(changed, given=config.given | {row["field"]})
            reasons.append(f"{row['theirs']}; so {flag_of(row['field'])} {row['value']:g} here")
    return config, reasons


def _defaults(config: Config, command: TrainingCommand) -> Iterator[str]:
    """Defaults that differ, of options that have an effect and were not given."""
    set_fields = config.given | config.origins.keys()
    needed = tables()["default_matters_with"]
    for row in different_defaults():
        option = training_flags().by_name[row["flag"]].field
        condition = needed.get(row["flag"])
        matters = condition is None or (condition and config.in_effect(condition))
        is_its_own = "owner" not in row or _is_of_microsoft(command)
        if matters and is_its_own and config.has_effect(option) and option not in set_fields:
            note = f" ({row['note']})" if row["note"] else ""
            yield f"--{row['flag']} is not given: {row['peers']} there, {row['ours']} here{note}"


def _is_of_microsoft(command: TrainingCommand) -> bool:
    """Whether a command may be one of microsoft's fork: with DeepSpeed, and no flag of Core."""
    names = {dashed(word.partition("=")[0]) for word in command.flags if word.startswith("--")}
    programs = tables()["programs"]
    foreign = programs["core_flags"].split()
    is_core = any(fnmatch.fnmatchcase(name, part) for name in names for part in foreign)
    return not is_core and not names.isdisjoint(programs["deepspeed_flags"].split())
