"""The text of --help and --version, for terminals of 80 columns.

Owns the layout and how a flag is explained; docs/reference/flags.md uses the same explanations.
Knows no torch: versions are read from the packages' metadata.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import textwrap
from collections.abc import Iterable

from megatron_ds.cli.flags import Flag, FlagGroup, FlagTable, dashed
from megatron_ds.programs import is_installed, shown_name

WIDTH = 80
INDENT = 26
"""Column at which explanations start."""

HEAD = """\
usage: [LAUNCHER] PROGRAM FLAGS

Pretrains a GPT with DeepSpeed. Required are the model's shape (--num-layers,
--hidden-size, --num-attention-heads, --seq-length, or all of them by --preset
or --load hf:FOLDER), --micro-batch-size, --lr, --train-iters, --train-samples
or --train-tokens, --data-path and the tokenizer's files; all other flags have
defaults. --config reads flags from files, and --dry-run N checks them. Dashes
and underscores in a flag's name are the same, and numbers may be written 1_000
or 1e3.

  -h, --help              show this text with the most used flags, and exit
  --help-all              show the same with all flags, and exit
  --version               show the versions of this package, torch and
                          deepspeed, and exit
"""
EXAMPLE = """\
For example, with token files of tools/preprocess_data.py:

  python pretrain_gpt.py --num-layers 4 --hidden-size 256 \\
      --num-attention-heads 8 --seq-length 256 --micro-batch-size 8 --lr 1e-3 \\
      --train-iters 1000 --data-path data/my_text_document \\
      --vocab-file tokenizer/vocab.json --merge-file tokenizer/merges.txt \\
      --save checkpoints --load checkpoints

The same command resumes the run. To use N devices, replace "python" by
"deepspeed --num_gpus N" or "torchrun --nproc-per-node N".
"""
INSTALLED = (
    ("tools/preprocess_data.py", "megatron-ds preprocess"),
    ("python pretrain_gpt.py", "megatron-ds train"),
    (EXAMPLE.partition("resumes the run. ")[2], "To use N devices, add --num-gpus N.\n"),
)
"""What an installed package has instead, in `EXAMPLE`."""
TAIL = """\
Flags of Megatron-LM and of the Megatron-DeepSpeed forks that are not listed
here have no effect, with a warning, or are refused with an alternative:
docs/reference/flags.md lists them all.
"""


def training_help(table: FlagTable, *, every_flag: bool = False) -> str:
    """The help of pretrain_gpt.py: the most used flags, or all."""
    head = HEAD.replace("PROGRAM", shown_name(table.program), 1)
    if every_flag:
        return "\n".join([head, *_groups(table.shown, table), TAIL])
    used = [tuple(flag for flag in group.flags if flag.common) for group in table.shown]
    groups = [
        dataclasses.replace(group, flags=flags)
        for group, flags in zip(table.shown, used, strict=True)
        if flags
    ]
    return "\n".join([head, *_groups(groups, table), _example()])


def _example() -> str:
    text = EXAMPLE
    for of_repository, of_package in INSTALLED if is_installed() else ():
        text = text.replace(of_repository, of_package)
    return text


def tool_help(table: FlagTable, options: type) -> str:
    """The help of a tool.

    Args:
        options: The tool's dataclass of options. Its docstring describes the tool.
    """
    values = "".join(f"{flag.usage} " for flag in table.positionals)
    paragraphs = (inspect.getdoc(options) or "").split("\n\n")
    described = [
        text if text.startswith(" ") else _filled(table.resolve(text)) for text in paragraphs
    ]
    usage = f"usage: {shown_name(table.program)} {values}{'FLAGS' if table.groups else ''}"
    head = [usage.rstrip(), *described]
    return "\n\n".join([*head, "\n".join(_groups(table.shown, table)).rstrip("\n")])


def explanation(flag: Flag, table: FlagTable, *, in_table: bool = False) -> str:
    """Explain a flag that sets a field: help, default, valid range and aliases.

    Args:
        in_table: Leave out default and aliases, which have columns of their own.
    """
    text = table.resolve(flag.help_text)
    notes = ["required"] if flag.required else []
    if default_of(flag) and not in_table:
        notes.append(f"default: {default_of(flag)}")
    if flag.range:
        notes.append(flag.range)
    if flag.conditions:
        unmet = " or ".join(condition.describe_unmet() for condition in flag.conditions)
        notes.append(f"no effect {table.resolve(unmet)}")
    if other_names(flag) and not in_table:
        notes.append("also " + ", ".join(f"--{name}" for name in other_names(flag)))
    if not notes:
        return text
    if re.search(r" \(default[^()]*\)$", text):
        return f"{text[:-1]}; {'; '.join(notes)})"
    return f"{text} ({'; '.join(notes)})"


def default_of(flag: Flag) -> str:
    """The default as users write it, such as 1e-8; "" without a default, or if the help names
    it."""
    if flag.default in (None, "", ()) or "(default" in flag.help_text:
        return ""
    if isinstance(flag.default, float):
        return f"{flag.default:.15g}".replace("e-0", "e-").replace("e+0", "e")
    return " ".join(map(str, flag.default)) if flag.nargs == "*" else str(flag.default)


def other_names(flag: Flag) -> list[str]:
    """The aliases that differ from the first name in more than dashes and underscores."""
    return [name for name in flag.names[1:] if dashed(name) != dashed(flag.names[0])]


def _groups(groups: Iterable[FlagGroup], table: FlagTable) -> list[str]:
    return [
        f"{_filled(group.title)}\n" + "\n".join(_entry(flag, table) for flag in group.flags) + "\n"
        for group in groups
    ]


def _filled(text: str) -> str:
    return textwrap.fill(text, WIDTH - 1, break_on_hyphens=False)


def _entry(flag: Flag, table: FlagTable) -> str:
    left = f"  {flag.usage}"
    if len(left) >= WIDTH:
        left = textwrap.fill(left.replace(",", ", "), WIDTH - 1, subsequent_indent="      ")
    lines = textwrap.wrap(explanation(flag, table), WIDTH - 1 - INDENT, break_on_hyphens=False)
    if len(left) <= INDENT - 2:
        lines[0] = f"{left:<{INDENT}}{lines[0]}"
        return f"\n{' ' * INDENT}".join(lines)
    return f"\n{' ' * INDENT}".join([left, *lines])
