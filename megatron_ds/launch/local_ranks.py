"""Starts several ranks of a program on this machine, by torchrun."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from megatron_ds.config.problems import user_error
from megatron_ds.launch.environment import rank_of_launcher

FLAG = "--num-gpus"
"""As of the `deepspeed` command, there with an underscore."""
FLAGS = (FLAG, "--num_gpus", "--nproc-per-node", "--nproc_per_node")


def take_count(words: Sequence[str]) -> tuple[int | None, list[str]]:
    """Separates the number of ranks from the arguments of a program.

    Args:
        words: The arguments.

    Returns:
        The last number of ranks, or None, and the other arguments.

    Raises:
        UserError: If it is not a positive number, or if a launcher has started this process.
    """
    count: int | None = None
    others: list[str] = []
    rest = iter(words)
    for word in rest:
        flag, has_value, value = word.partition("=")
        if flag not in FLAGS:
            others.append(word)
            continue
        text = value if has_value else next(rest, "")
        if not (text.isdecimal() and int(text)):
            raise user_error("bad-rank-count", flag=flag, value=text)
        if (rank := rank_of_launcher()) is not None:
            raise user_error("ranks-started-twice", flag=flag, rank=rank)
        count = int(text)
    return count, others


def command(count: int, words: Sequence[str]) -> list[str]:
    """The command that starts the ranks.

    Args:
        count: Number of ranks.
        words: The module and its arguments.
    """
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
    return [sys.executable, *launcher, "-m", *words]


def become(words: Sequence[str]) -> NoReturn:
    """Replaces this process by a command: signals and its exit status are the command's."""
    sys.stdout.flush()
    os.execv(words[0], list(words))
