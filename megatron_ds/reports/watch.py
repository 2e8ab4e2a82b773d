"""Watch a run in a terminal.

Reads the files that the run writes next to its checkpoints; the command line of
`megatron_ds.reports.live`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from megatron_ds import cli
from megatron_ds.config.fields import option_field
from megatron_ds.config.problems import Problem
from megatron_ds.reports.history import names_of, run_problems


@dataclass(frozen=True)
class Options:
    """Shows the progress of a run, its curves and its warnings until it ends or Ctrl-C.

    Only what the run adds to its files is read, so it may run on another machine with the same
    folder, and does not notice.
    """

    PROGRAM: ClassVar[str] = "watch.py"

    run: str = option_field("", metavar="RUN", positional=True, required=True)
    """--save folder, metrics.jsonl or table (--metrics-csv) of the run."""
    once: bool = option_field(False)
    """Print one frame and end."""
    follow: bool = option_field(False)
    """Wait for the next start when the run has ended."""
    interval: float = option_field(2.0, metavar="SECONDS", above=0)
    """Seconds between two frames."""

    def problems(self) -> Iterator[Problem]:
        yield from run_problems("run", [self.run] if self.run else [], may_start=True)


def work(options: Options) -> None:
    from rich.console import Console
    from rich.live import Live

    from megatron_ds.reports.live import Follower, frame
    from megatron_ds.reports.tables import status

    console = Console(highlight=False)
    follower = Follower(Path(options.run))
    (name,) = names_of([options.run])
    has_dots = "utf" in console.encoding.lower()
    follower.poll()
    if options.once:
        console.print(frame(name, follower, console.width, has_dots=has_dots))
        return
    try:
        with Live(console=console, auto_refresh=False) as live:
            while True:
                live.update(frame(name, follower, console.width, has_dots=has_dots), refresh=True)
                if status(follower.history, follower.age).has_ended and not options.follow:
                    return
                time.sleep(options.interval)
                follower.poll()
    except KeyboardInterrupt:
        return  # the usual end


main = cli.program(Options, work)
