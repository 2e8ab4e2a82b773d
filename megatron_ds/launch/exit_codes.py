"""Exit statuses of the processes of a run; see docs/running/stopping_and_failures.md.

All are below 64, so that none collides with a shell's own statuses, with `sysexits.h` or with 128 +
a signal number, except for the two that mean exactly that signal.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum


class ExitCode(IntEnum):
    """Exit status. Launchers treat any status but 0 as a failure and end the other ranks."""

    FINISHED = 0
    """Trained to the end, or stopped by a flag with the state saved: --exit-interval,
    --exit-duration-in-mins, --kill-switch-path."""

    ERROR = 1
    """An error with a message (data, files, memory), or an exception with its traceback."""

    BAD_SETTINGS = 2
    """The settings contradict each other or the files; nothing was started or written."""

    SKIPPED_STEPS = 3
    """Too many consecutive steps were skipped because of non-finite gradients."""

    PEER_LOST = 4
    """Another rank or the launcher is gone."""

    SAVE_FAILED = 5
    """A checkpoint could not be saved (disk full, I/O error)."""

    HUNG = 6
    """A rank made no progress for --hang-timeout."""

    HOSTS_DIFFER = 7
    """The hosts of a run have different settings, software, files, folders, devices or clocks, or
    some of them cannot start; nothing was trained."""

    FAULTY_RANK = 8
    """A rank computes wrongly, or its weights differ from its replicas'."""

    INTERRUPTED = 130
    """Stopped by SIGINT, with the state saved once training had started."""

    TERMINATED = 143
    """Stopped by SIGTERM, or because the launcher was gone; the state is saved as for SIGINT."""


class RunAborted(Exception):
    """Ends the run with a message, without a traceback, and with a status of its own.

    Args:
        message: Printed by the first rank that raises it.
        code: Exit status.
    """

    def __init__(self, message: str, code: ExitCode) -> None:
        super().__init__(message)
        self.code = code


class SettingsRejected(RunAborted):
    """Ends a rank whose settings contradict each other or the files.

    Args:
        message: Message with all problems.
        problems: The problems alone.
    """

    def __init__(self, message: str, problems: Sequence[str]) -> None:
        super().__init__(message, ExitCode.BAD_SETTINGS)
        self.problems = problems
