"""Requests to end a run, and the signals that make them."""

from __future__ import annotations

import signal
from enum import Enum

from megatron_ds.launch.exit_codes import ExitCode


class StopReason(Enum):
    """Reason that the run was asked to end. The value completes the message `exiting program
    ...`."""

    SIGINT = "after receiving SIGINT."
    SIGTERM = "after receiving SIGTERM."
    LAUNCHER = "since its launcher is gone."
    FOLDER_LOST = "since another run has taken its --save folder."

    @property
    def signal(self) -> str:
        """The signal as users know it."""
        return "Ctrl-C" if self is StopReason.SIGINT else self.name

    @property
    def exit_code(self) -> ExitCode:
        codes = {
            StopReason.SIGINT: ExitCode.INTERRUPTED,
            StopReason.FOLDER_LOST: ExitCode.SAVE_FAILED,
        }
        return codes.get(self, ExitCode.TERMINATED)


SIGNALS: dict[int, StopReason] = {
    signal.SIGINT: StopReason.SIGINT,
    signal.SIGTERM: StopReason.SIGTERM,
}


class StopRequest:
    """A request to end the run, which the training loop reads between steps."""

    def __init__(self) -> None:
        self.reason: StopReason | None = None

    def request(self, reason: StopReason) -> None:
        """Records the reason unless there already is one."""
        if self.reason is None:
            self.reason = reason
