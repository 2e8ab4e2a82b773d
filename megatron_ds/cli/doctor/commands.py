"""The training commands of a script, a command line or a configuration file, as flags.

Owns which program a command starts and on how many processes. Knows no torch.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from megatron_ds.cli.doctor.frameworks import (
    FILES,
    TrainingCommand,
    tables,
    translate,
    translate_values,
    translate_yaml_cfg,
)
from megatron_ds.cli.doctor.sandbox import execute
from megatron_ds.cli.doctor.shell import slurm
from megatron_ds.cli.doctor.shell.marks import NAME, OPENED, unmarked
from megatron_ds.cli.doctor.shell.reading import LARGEST_FILE, Reading
from megatron_ds.cli.doctor.shell.shell import SCRIPTS, Shell
from megatron_ds.cli.doctor.trainer_flags import is_of_trainer, trainer_values
from megatron_ds.cli.flags import PROGRAM, dashed, training_flags
from megatron_ds.config.problems import user_error

TITAN = "torchtitan.train"
"""Module that torchtitan's commands start, whose settings are Python since 2026."""
YAML_CFG = "yaml-cfg"
"""Flag of Megatron-LM that names a file with all arguments."""
TRAINING = re.compile(r"(pre_?train|train|finetune|run_clm|sft)\w*\.py")


def read_source(
    words: Sequence[str], variables: dict[str, str], ranks: int | None, *, executes: bool = False
) -> list[TrainingCommand]:
    """Read a file, whose arguments may follow, or a command.

    Args:
        words: The file and its arguments, or the command.
        variables: Variables of the environment.
        ranks: Number of processes, if the source does not specify it.
        executes: Execute a script; see `sandbox`.

    Raises:
        UserError: If there is no training command.
    """
    path = Path(words[0])
    if path.suffix in FILES:
        files = [Path(word) for word in words if Path(word).suffix in FILES]
        return [translate(files, ranks)]
    if path.suffix == ".py" and len(words) == 1 and not TRAINING.fullmatch(path.name):
        raise user_error("doctor-python-settings", path=path)
    reading, header = read_script(words, variables)
    unread = reading.unread
    if executes:
        reading = execute(words, variables)
    commands = commands_of(reading, header, ranks)
    if not commands:
        if any(TITAN in program for program, _ in reading.started):
            raise user_error("doctor-python-settings", path=words[0])
        programs = ", ".join(sorted({started[0] for started, _ in reading.started})) or "nothing"
        entries = dict.fromkeys([*unread, *reading.unread])
        listed = "".join(f"\n  - {entry}" for entry in entries) or " nothing"
        raise user_error("doctor-no-command", source=words[0], programs=programs, unread=listed)
    return commands


def read_script(words: Sequence[str], variables: dict[str, str]) -> tuple[Reading, list[str]]:
    """Actions of a script or a command, and the options of its #SBATCH lines."""
    path = Path(words[0])
    if path.suffix == ".py" or not (_is_file(path) or path.suffix in SCRIPTS):
        shell = Shell("command", variables)
        shell.read(words[0] if len(words) == 1 else shlex.join(words))
        return shell.reading, []
    shell = Shell(words[0], variables, words[1:])
    shell.read_job(_script_text(path))
    return shell.reading, shell.job_options


def _is_file(path: Path) -> bool:
    """Whether a file is there; a command in one word may be longer than names of files are."""
    try:
        return path.is_file()
    except OSError:
        return False


def _script_text(path: Path) -> str:
    """The text of a script, which is a regular file and not too large.

    Raises:
        UserError: If it cannot be read.
    """
    try:
        if path.exists() and not path.is_file():
            raise user_error("doctor-file-unreadable", path=path, reason="it is no regular file")
        if path.stat().st_size > LARGEST_FILE:
            limit = f"{LARGEST_FILE} bytes"
            raise user_error("doctor-script-too-large", location=path, limit=limit)
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise user_error("doctor-file-unreadable", path=path, reason=error) from error


def commands_of(reading: Reading, header: list[str], ranks: int | None) -> list[TrainingCommand]:
    """The training commands among the programs that a script starts."""
    commands = []
    by_name = training_flags().by_name
    # A loop that repeats a command trains the same once more.
    started = {(tuple(words), location): None for words, location in reading.started}
    for words, location in started:
        names = [os.path.basename(path) for path in words]
        first = next((i for i, name in enumerate(names) if TRAINING.fullmatch(name)), None)
        if first is not None:
            options = reading.job_options.get(location, header)
            counts = slurm.counts([*options, *words[:first]])
            per_node = counts.get("nodes", 1) * counts.get("per_node", 0)
            size = per_node if "per_node" in counts else counts.get("total")
            command = TrainingCommand(location, list(words[:first]), [], size or ranks, reading)
            if names[first] in tables()["programs"]["other"].split():
                command.lacking.append(f"{names[first]}: another model or loss than {PROGRAM}")
            for word in words[first + 1 :]:
                flag = by_name.get(dashed("".join(command.flags[-1:])))
                # A variable without a value is no argument.
                if not OPENED.fullmatch(word) or (flag is not None and flag.nargs != 0):
                    command.flags.append(word)
            if is_of_trainer(command.flags):
                command = _of_trainer(command, words[first + 1 :])
            elif YAML_CFG in map(dashed, command.flags[:-1]):
                command = _of_yaml_cfg(command)
            commands.append(command)
    return commands


def _of_trainer(command: TrainingCommand, arguments: Sequence[str]) -> TrainingCommand:
    """The command of a script with Hugging Face's Trainer, and with these arguments."""
    values = trainer_values(arguments)
    result = translate_values("huggingface", values, command.place, command.world_size)
    return replace(result, launcher=command.launcher, reading=command.reading)


def _of_yaml_cfg(command: TrainingCommand) -> TrainingCommand:
    """The command of a file with all arguments; Megatron-LM ignores the others."""
    at = [dashed(word) for word in command.flags].index(YAML_CFG)
    path = command.flags[at + 1]
    others = [*command.flags[:at], *command.flags[at + 2 :]]
    text = command.reading.content(path, command.place.rpartition(":")[0])
    if text is None:
        reason = f"--{YAML_CFG} {unmarked(path)}: the file with all arguments is not there; "
        reason += "start the doctor where the path is right"
        return replace(command, lacking=[*command.lacking, reason], flags=others)
    result = translate_yaml_cfg(text, path, command.place, command.world_size)
    ignored = f"Megatron-LM ignores all arguments but --{YAML_CFG}: {shlex.join(others)}"
    return replace(
        result,
        launcher=command.launcher,
        reading=command.reading,
        differences=[*result.differences, *[unmarked(ignored)] * bool(others)],
        lacking=[*command.lacking, *result.lacking],
    )


def shown(word: str) -> str:
    """A word for a shell, in which what has no value yet stays as the script has it."""
    if not OPENED.search(word):
        return shlex.quote(word)
    text = unmarked(word)
    return text if NAME.fullmatch(text) or "'" in text else f'"{text}"'
