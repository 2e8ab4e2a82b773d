"""Failures that repeat: torchrun would start a run again up to --max-restarts times.

A file of the host keeps the failure of each attempt.
"""

from __future__ import annotations

import json
import os
import signal
import tempfile
from contextlib import suppress
from pathlib import Path

from megatron_ds.launch.watch.liveness import ProcessHandle

FUTILE = 3
"""Number of attempts with the same failure after which the job is not started again."""


def end_if_futile(failure: str, launcher: ProcessHandle) -> bool:
    """Ends torchrun if another attempt would most likely fail like this one.

    Args:
        failure: Description of the failure and its iteration: equal only if there was no progress.
        launcher: The agent of torchrun, which starts the attempts.

    Returns:
        Whether it did.
    """
    names = ("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS")
    attempt, last = (int(os.environ.get(name) or 0) for name in names)
    name = f"megatron_ds-attempts-{launcher.pid}-{launcher.started}"
    path = Path(tempfile.gettempdir(), name)
    failures = {}
    with suppress(OSError, ValueError, TypeError):
        failures = dict(json.loads(path.read_text()))
    failures[str(attempt)] = failure
    is_repeated = attempt < last and [*failures.values()][-FUTILE:] == [failure] * FUTILE
    with suppress(OSError):
        if is_repeated or attempt >= last:
            path.unlink(missing_ok=True)
        else:
            path.write_text(json.dumps(failures))
        if is_repeated:
            os.kill(launcher.pid, signal.SIGTERM)
    return is_repeated
