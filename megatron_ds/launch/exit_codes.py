"""Exit statuses of the processes of a run; see docs/stopping_and_failures.md.

Below 64, so that none is a shell's own, one of `sysexits.h`, or a signal's (128 + its number) but
the two that mean just that signal.
"""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """Launchers take any status but 0 for a failure, end the other ranks, and may start anew."""

    FINISHED = 0
    """Trained to the end, or ended early, with the state saved, because a flag asked for it:
    --exit-interval, --exit-duration-in-mins, --kill-switch-path."""

    ERROR = 1
    """An error in words (data, files, memory), or an exception with its traceback."""

    BAD_SETTINGS = 2
    """The settings contradict each other or what is there; nothing was started or written."""

    SKIPPED_STEPS = 3
    """Too many steps in a row were skipped because their gradients were not finite."""

    PEER_LOST = 4
    """Another rank, or the launcher, is gone."""

    SAVE_FAILED = 5
    """A checkpoint could not be saved (disk full, input or output error)."""

    INTERRUPTED = 130
    """Ended after SIGINT; once training had begun, with the state saved."""

    TERMINATED = 143
    """Ended after SIGTERM, as after SIGINT; also when the launcher was gone, with the state
    saved."""


class RunAborted(Exception):
    """Ends the run with words for the user, no traceback, and a status of its own.

    Raised by one rank or by several; the first of them speaks, and the others end as well.
    """

    def __init__(self, words: str, code: ExitCode) -> None:
        super().__init__(words)
        self.code = code
